"""The servers that are compared, and the settings to start them with."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from bench.libraries.contender import Setup
from bench.models import Subject
from bench.server import RunningServer, free_port, serving, serving_command

MAX_ROWS = (32, 64, 320)
BATCH_SIZES = (16, 32, 64)
BATCH_TIMEOUTS_MS = (1, 5, 10)
PATIENCE_S = 60  # long enough that queued requests are never rejected, as with the peers


@dataclass(frozen=True)
class ServerSetup:
    """A server and its settings."""

    server: str
    settings: str
    start: Callable[[], contextlib.AbstractContextManager[RunningServer]]


def sightline_setups(subject: Subject, dtype: str, threads: int) -> list[ServerSetup]:
    """Vary the number of rows, and use all threads for the model or leave all but one to HTTP."""

    def setup(max_rows: int, model_threads: int) -> ServerSetup:
        def start() -> contextlib.AbstractContextManager[RunningServer]:
            return serving(
                subject.bundles[dtype].parent,
                threads=model_threads,
                max_rows=max_rows,
                queue_timeout_s=PATIENCE_S,
                request_timeout_s=PATIENCE_S,
            )

        settings = f"{dtype}, {max_rows} rows, {model_threads} thread{'s' * (model_threads > 1)}"
        return ServerSetup("sightline", settings, start)

    return [setup(max_rows, count) for max_rows in MAX_ROWS for count in sorted({1, threads})]


def litserve_setups(subject: Subject, library: Setup, num_beams: int, threads: int) -> list[ServerSetup]:
    """Vary batch size and waiting time; `library` gives the data type and instruction set."""
    return [
        _peer(
            "litserve",
            f"{library.name}, batch {size}, {timeout_ms} ms",
            [*_arguments(subject, library, num_beams, threads), *_batching(size, timeout_ms)],
            library,
        )
        for size in BATCH_SIZES
        for timeout_ms in BATCH_TIMEOUTS_MS
    ]


def fastapi_setups(subject: Subject, library: Setup, num_beams: int, threads: int) -> list[ServerSetup]:
    """Vary between all threads for one request and one thread for each of several requests."""
    return [
        _peer(
            "fastapi",
            f"{library.name}, {workers} x {threads // workers} threads",
            [*_arguments(subject, library, num_beams, threads), "--workers", str(workers)],
            library,
        )
        for workers in sorted({1, threads})
    ]


def _batching(size: int, timeout_ms: int) -> list[str]:
    return ["--max-batch-size", str(size), "--batch-timeout-ms", str(timeout_ms)]


def _arguments(subject: Subject, library: Setup, num_beams: int, threads: int) -> list[str]:
    return [
        *("--model", str(library.model), "--tokenizer", str(subject.tokenizer_file)),
        *("--num-beams", str(num_beams), "--compute-type", library.dtype, "--threads", str(threads)),
    ]


def _peer(server: str, settings: str, arguments: list[str], library: Setup) -> ServerSetup:
    def start() -> contextlib.AbstractContextManager[RunningServer]:
        port = free_port()
        command = [f"bench.peers.{server}_app", *arguments, "--port", str(port)]
        return serving_command(command, port, "/health", library.environment)

    return ServerSetup(server, settings, start)
