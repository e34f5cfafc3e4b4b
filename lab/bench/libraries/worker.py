"""Decode the task in each line of standard input and write the result as a line of JSON.

Usage: `python -m lab.bench.libraries.worker KIND MODEL`. A task and its result:

    {"sources": [[id, ...], ...], "num_beams": 1, "new_tokens": 20 or null, "at_least_s": 0.3}
    {"seconds": median of the runs, "outputs": [[id, ...], ...]}

The first output line is written once the model is loaded and warm. The worker ends with its input.
Each library is imported where it is used, so that a process loads only the one that it measures.
"""

import argparse
import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from lab.bench.process import answer_lines, repeat
from sightline.service.engine.request import Event, Generated, GenerateRequest
from sightline.service.parameters import GenerateParameters

MAX_NEW_TOKENS = 128
Ids = Sequence[int]


class Decoder(Protocol):
    """Interface of a decoder. Sources are token ids that end with the end token."""

    def prepare(self, sources: Sequence[Ids]) -> Any:
        """Convert sources to the library's format; this is not timed."""
        ...

    def decode(self, prepared: Any, num_beams: int, new_tokens: int | None) -> list[list[int]]:
        """Return the best output of each prepared source, the end token included.

        With `new_tokens`, every output has this number; None decodes to the natural end, up to
        MAX_NEW_TOKENS.
        """
        ...


class SightlineDecoder:
    """Sightline's engine, given all sources at once; rows are refilled as they become free."""

    def __init__(self, bundle: Path, num_threads: int, max_rows: int) -> None:
        from sightline.base.bundle_files import read_bundle
        from sightline.service.engine.engine import Engine
        from sightline.service.runtime.ort import OnnxRunner

        runner = OnnxRunner(bundle, read_bundle(bundle), num_threads=num_threads, max_rows=max_rows)
        self._engine = Engine(runner)

    def prepare(self, sources: Sequence[Ids]) -> list[tuple[int, ...]]:
        return [tuple(source) for source in sources]

    def decode(self, prepared: list[tuple[int, ...]], num_beams: int, new_tokens: int | None) -> list[list[int]]:
        parameters = GenerateParameters(
            max_new_tokens=new_tokens or MAX_NEW_TOKENS,
            min_new_tokens=new_tokens or 0,
            num_beams=num_beams,
            early_stopping=num_beams > 1,  # CTranslate2's stopping rule
        )
        results: dict[int, Event] = {}
        for index, source in enumerate(prepared):
            request = GenerateRequest("bench", source, math.inf, parameters)
            self._engine.submit(request, lambda event, index=index: results.__setitem__(index, event))  # type: ignore[misc]
        while self._engine.has_work:
            self._engine.step()
        return [_best_ids(results[index]) for index in range(len(prepared))]


def _best_ids(result: Event) -> list[int]:
    assert isinstance(result, Generated), result
    return [token.id for token in result.targets[0].tokens]


class CTranslate2Decoder:
    """CTranslate2 with all sources in one batch."""

    def __init__(self, model: Path, compute_type: str, num_threads: int) -> None:
        import ctranslate2

        self._translator = ctranslate2.Translator(
            str(model), device="cpu", compute_type=compute_type, inter_threads=1, intra_threads=num_threads
        )
        self._names: list[str] = json.loads((model / "shared_vocabulary.json").read_text(encoding="utf-8"))
        self._ids = {name: id_ for id_, name in enumerate(self._names)}

    def prepare(self, sources: Sequence[Ids]) -> list[list[str]]:
        return [[self._names[id_] for id_ in source] for source in sources]

    def decode(self, prepared: list[list[str]], num_beams: int, new_tokens: int | None) -> list[list[int]]:
        results = self._translator.translate_batch(
            prepared,
            beam_size=num_beams,
            max_batch_size=0,  # no limit
            min_decoding_length=new_tokens or 1,
            max_decoding_length=new_tokens or MAX_NEW_TOKENS,
            return_end_token=True,
        )
        return [[self._ids[name] for name in result.hypotheses[0]] for result in results]


class TransformersDecoder:
    """Hugging Face transformers' `generate` with PyTorch, all sources in one padded batch."""

    def __init__(self, folder: Path, num_threads: int) -> None:
        import torch
        from transformers import MarianMTModel

        torch.set_num_threads(num_threads)
        self._model = MarianMTModel.from_pretrained(folder).eval()

    def prepare(self, sources: Sequence[Ids]) -> dict[str, Any]:
        import torch

        longest, pad_id = max(map(len, sources)), self._model.config.pad_token_id
        ids = torch.tensor([[*source, *[pad_id] * (longest - len(source))] for source in sources])  # (B, S)
        lengths = torch.tensor([len(source) for source in sources])
        return {"input_ids": ids, "attention_mask": (torch.arange(longest) < lengths[:, None]).long()}

    def decode(self, prepared: dict[str, Any], num_beams: int, new_tokens: int | None) -> list[list[int]]:
        outputs = self._model.generate(
            **prepared,
            num_beams=num_beams,
            do_sample=False,
            early_stopping=num_beams > 1,
            max_new_tokens=new_tokens or MAX_NEW_TOKENS,
            min_new_tokens=new_tokens or 0,
        )
        return [_until_end(ids[1:], self._model.config.eos_token_id) for ids in outputs.tolist()]


def _until_end(ids: list[int], end_id: int) -> list[int]:
    """Remove the padding after the end token."""
    return ids[: ids.index(end_id) + 1] if end_id in ids else ids


def open_decoder(arguments: argparse.Namespace) -> Decoder:
    if arguments.kind == "sightline":
        return SightlineDecoder(arguments.model, arguments.threads, arguments.max_rows)
    if arguments.kind == "ctranslate2":
        return CTranslate2Decoder(arguments.model, arguments.compute_type, arguments.threads)
    return TransformersDecoder(arguments.model, arguments.threads)


def run_task(decoder: Decoder, task: dict[str, Any]) -> dict[str, Any]:
    """Decode repeatedly for at least `at_least_s`, and at least once."""
    prepared = decoder.prepare(task["sources"])
    decode = partial(decoder.decode, prepared, task["num_beams"], task["new_tokens"])
    seconds, outputs = repeat(decode, task["at_least_s"])
    return {"seconds": seconds, "outputs": outputs}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.bench.libraries.worker", description=__doc__)
    parser.add_argument("kind", choices=("sightline", "ctranslate2", "transformers"))
    parser.add_argument("model", type=Path, help="a bundle, or a folder with a CTranslate2 model")
    parser.add_argument("--compute-type", default="float32", help="CTranslate2's compute type")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-rows", type=int, default=1, help="maximum number of rows of Sightline's engine")
    decoder = open_decoder(parser.parse_args())
    run_task(decoder, {"sources": [[0]], "num_beams": 1, "new_tokens": 1, "at_least_s": 0})
    answer_lines(partial(run_task, decoder))


if __name__ == "__main__":
    main()
