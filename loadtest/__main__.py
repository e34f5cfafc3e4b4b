"""`python -m loadtest`: loads a running service, prints a table and writes JSON.

The exit status is 1 when a request failed, 2 when the arguments are wrong; refusals are no failures.
"""

import argparse
import asyncio
import dataclasses
import importlib.metadata
import math
import platform
import re
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import uvloop

from loadtest.client import Client
from loadtest.commit import commit
from loadtest.load import Load, Measurement, run_load
from loadtest.report import Summary, format_table, summarize

DEFAULT_DURATION_S = 10.0
TIMEOUT_S = 60.0  # twice the service's own deadline: past it, the service has broken its word
UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0}


def duration(text: str) -> float:
    """Seconds of `10s`, `500ms`, `2m` or plain `10`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m)?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration; write 500ms, 10s or 2m")
    return float(match[1]) * UNITS_S[match[2] or "s"]


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def positive_rate(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a rate above 0")
    return value


def read_sentences(path: Path) -> list[str]:
    """The lines of `path` that are not blank."""
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtest", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the service (%(default)s)")
    parser.add_argument("--endpoint", choices=("generate", "encode", "attention"), default="generate")
    parser.add_argument("--stream", action="store_true", help="ask for streamed answers (generate only)")
    parser.add_argument("--max-new-tokens", type=positive, metavar="N", help="(generate and attention only)")
    parser.add_argument("--sentences", type=Path, default=Path("tests/data/sentences.txt"), help="one a line")
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument("--clients", type=positive, default=16, metavar="N", help="of a closed loop (%(default)s)")
    loop.add_argument("--rate", type=positive_rate, metavar="R", help="requests a second, of an open loop instead")
    parser.add_argument("--duration", type=duration, help="such as 10s; the default where --requests is not given")
    parser.add_argument("--requests", type=positive, metavar="N", help="end after so many")
    parser.add_argument("--warm-up", type=duration, default=1.0, help="load that is not measured, before (1s)")
    parser.add_argument("--retry", action="store_true", help="wait Retry-After on a refusal and send it again")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write arguments, versions and figures there")
    options = parser.parse_args(arguments)
    if options.endpoint != "generate" and options.stream:
        parser.error("--stream is for --endpoint generate")
    if options.endpoint == "encode" and options.max_new_tokens is not None:
        parser.error("--max-new-tokens is for --endpoint generate and attention")
    if options.rate is not None and options.retry:
        parser.error("--retry is for a closed loop: an open loop waits for nothing")
    try:
        options.bodies = request_bodies(options, read_sentences(options.sentences))
    except OSError as error:
        parser.error(f"--sentences: {error}")
    if not options.bodies:
        parser.error(f"--sentences: {options.sentences} has no sentence")
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.parent}")
    try:
        options.client = Client(options.url, TIMEOUT_S)
    except ValueError as error:
        parser.error(f"--url: {error}")
    return options


def request_bodies(options: argparse.Namespace, sentences: Sequence[str]) -> list[bytes]:
    """The JSON of a request for each sentence."""
    extra: dict[str, Any] = {}
    if options.max_new_tokens is not None:
        extra["parameters"] = {"max_new_tokens": options.max_new_tokens}
    if options.stream:
        extra["stream"] = True
    if options.endpoint == "encode":
        extra["pooling"] = "mean"
    field = "input" if options.endpoint == "attention" else "inputs"
    return [orjson.dumps({field: sentence, **extra}) for sentence in sentences]


async def measure(options: argparse.Namespace) -> Measurement:
    """Warm up, forget that, and measure."""
    load = Load(
        path=f"/v1/{options.endpoint}",
        bodies=options.bodies,
        is_streamed=options.stream,
        clients=options.clients,
        rate=options.rate,
        honors_retry_after=options.retry,
    )
    duration_s = options.duration
    if duration_s is None:
        duration_s = DEFAULT_DURATION_S if options.requests is None else math.inf
    async with options.client as client:
        if options.warm_up:
            await run_load(client, dataclasses.replace(load, duration_s=options.warm_up))
        return await run_load(client, dataclasses.replace(load, duration_s=duration_s, requests=options.requests))


def record(options: argparse.Namespace, started_at: datetime, summary: Summary, processor_share: float) -> bytes:
    """All that is needed to read the figures later, and the figures, as JSON."""
    arguments = {name: value for name, value in vars(options).items() if name not in ("bodies", "client", "json")}
    versions = {name: importlib.metadata.version(name) for name in ("httptools", "orjson", "uvloop")}
    return orjson.dumps(
        {
            "arguments": arguments | {"sentences": str(options.sentences)},
            "versions": {"python": platform.python_version(), "platform": platform.platform()} | versions,
            "commit": commit(),
            "started_at": started_at.isoformat(timespec="seconds"),
            "client_processor_share": processor_share,
            "figures": dataclasses.asdict(summary),
        },
        option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    started_at = datetime.now(UTC)
    wall_s, processor_s = time.perf_counter(), time.process_time()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            measurement = runner.run(measure(options))
        except KeyboardInterrupt:
            return 130
    processor_share = (time.process_time() - processor_s) / (time.perf_counter() - wall_s)
    summary = summarize(measurement)
    print(format_table(summary))
    print(f"\nThe client took {processor_share:.0%} of one processor.")
    if options.json is not None:
        options.json.write_bytes(record(options, started_at, summary, processor_share))
    return 1 if summary.failed else 0


if __name__ == "__main__":
    sys.exit(main())
