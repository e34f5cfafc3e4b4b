"""Load test of a running service; prints a table and writes JSON.

The exit status is 1 if a request failed and 2 if an argument is invalid. A rejection (503) is not a
failure.
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
TIMEOUT_S = 60.0  # twice the default request timeout of the service, which should have responded by then
UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0}


def duration(text: str) -> float:
    """Parse a duration such as `10s`, `500ms`, `2m` or `10`, in seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m)?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a duration such as 500ms, 10s or 2m, got {text!r}")
    return float(match[1]) * UNITS_S[match[2] or "s"]


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def positive_rate(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number greater than 0, got {text}")
    return value


def read_sentences(path: Path) -> list[str]:
    """Read the lines of a file that are not blank."""
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtest", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="URL of the service (default: %(default)s)")
    parser.add_argument(
        "--endpoint",
        choices=("generate", "encode", "attention"),
        default="generate",
        help="endpoint to call (default: %(default)s)",
    )
    parser.add_argument("--stream", action="store_true", help="request streamed responses (generate only)")
    parser.add_argument(
        "--max-new-tokens",
        type=positive,
        metavar="N",
        help="largest number of generated tokens (generate and attention only)",
    )
    parser.add_argument(
        "--sentences",
        type=Path,
        default=Path("tests/data/sentences.txt"),
        help="file with one sentence per line (default: %(default)s)",
    )
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument(
        "--clients",
        type=positive,
        default=16,
        metavar="N",
        help="number of clients of a closed loop (default: %(default)s)",
    )
    loop.add_argument("--rate", type=positive_rate, metavar="R", help="requests per second of an open loop")
    parser.add_argument(
        "--duration", type=duration, help="duration of the measurement (default: 10s without --requests)"
    )
    parser.add_argument("--requests", type=positive, metavar="N", help="end after N requests")
    parser.add_argument(
        "--warm-up", type=duration, default=1.0, help="duration of the load before the measurement (default: 1s)"
    )
    parser.add_argument("--retry", action="store_true", help="after a 503, wait for Retry-After and repeat the request")
    parser.add_argument("--key-file", type=Path, metavar="FILE", help="file with the API key to send; never recorded")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write arguments, versions and results to FILE")
    options = parser.parse_args(arguments)
    if options.endpoint != "generate" and options.stream:
        parser.error("--stream needs --endpoint generate")
    if options.endpoint == "encode" and options.max_new_tokens is not None:
        parser.error("--max-new-tokens needs --endpoint generate or attention")
    if options.rate is not None and options.retry:
        parser.error("--retry needs a closed loop; remove --rate")
    try:
        options.bodies = request_bodies(options, read_sentences(options.sentences))
    except OSError as error:
        parser.error(f"--sentences: {error}")
    if not options.bodies:
        parser.error(f"--sentences: {options.sentences} has no sentences; expected one sentence per line")
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json: the folder {options.json.parent} does not exist; create it")
    try:
        key = options.key_file.read_text(encoding="ascii").strip() if options.key_file else ""
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"--key-file: {error}")
    if len(key.split()) > 1:
        parser.error(f"--key-file: {options.key_file} must have one key and nothing else")
    try:
        options.client = Client(options.url, TIMEOUT_S, key=key)
    except ValueError as error:
        parser.error(f"--url: {error}")
    return options


def request_bodies(options: argparse.Namespace, sentences: Sequence[str]) -> list[bytes]:
    """Return the JSON body of a request for each sentence."""
    extra: dict[str, Any] = {}
    if options.max_new_tokens is not None:
        extra["parameters"] = {"max_new_tokens": options.max_new_tokens}
    if options.stream:
        extra["stream"] = True
    if options.endpoint == "encode":
        extra["pooling"] = "mean"
    return [orjson.dumps({"inputs": sentence, **extra}) for sentence in sentences]


async def measure(options: argparse.Namespace) -> Measurement:
    """Run the warm-up load, then measure."""
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
    """Return the results as JSON, with the arguments and versions that produced them."""
    arguments = {
        name: value for name, value in vars(options).items() if name not in ("bodies", "client", "json", "key_file")
    }
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
    print(f"\nThe load test used {processor_share:.0%} of one processor.")
    if options.json is not None:
        options.json.write_bytes(record(options, started_at, summary, processor_share))
    return 1 if summary.failed else 0


if __name__ == "__main__":
    sys.exit(main())
