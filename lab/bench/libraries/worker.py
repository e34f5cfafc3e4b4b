"""Decode the task in each line of standard input and write the result as a line of JSON.

Usage: `python -m lab.bench.libraries.worker KIND MODEL`. A task and its result:

    {"sources": [[id, ...], ...], "num_beams": 1, "new_tokens": 20 or null, "at_least_s": 0.3}
    {"seconds": median of the runs, "outputs": [[id, ...], ...]}

The first output line is `{"ready": true}`, written once the model is loaded and warm. The worker
ends with its input.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from lab.bench.libraries.decoders import CTranslate2Decoder, Decoder, SightlineDecoder, TransformersDecoder


def open_decoder(arguments: argparse.Namespace) -> Decoder:
    if arguments.kind == "sightline":
        return SightlineDecoder(arguments.model, arguments.threads, arguments.max_rows)
    if arguments.kind == "ctranslate2":
        return CTranslate2Decoder(arguments.model, arguments.compute_type, arguments.threads)
    return TransformersDecoder(arguments.model, arguments.threads)


def run_task(decoder: Decoder, task: dict[str, Any]) -> dict[str, Any]:
    """Decode repeatedly for at least `at_least_s`, and at least once."""
    prepared = decoder.prepare(task["sources"])
    seconds: list[float] = []
    while not seconds or sum(seconds) < task["at_least_s"]:
        started = time.perf_counter()
        outputs = decoder.decode(prepared, task["num_beams"], task["new_tokens"])
        seconds.append(time.perf_counter() - started)
    return {"seconds": statistics.median(seconds), "outputs": outputs}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.bench.libraries.worker", description=__doc__)
    parser.add_argument("kind", choices=("sightline", "ctranslate2", "transformers"))
    parser.add_argument("model", type=Path, help="a bundle, or a folder with a CTranslate2 model")
    parser.add_argument("--compute-type", default="float32", help="CTranslate2's compute type")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-rows", type=int, default=1, help="maximum number of rows of Sightline's engine")
    decoder = open_decoder(parser.parse_args())
    run_task(decoder, {"sources": [[0]], "num_beams": 1, "new_tokens": 1, "at_least_s": 0})
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run_task(decoder, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
