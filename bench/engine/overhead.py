"""Measure the cost of HTTP: the engine in this process, the service, and the service without a
model.

All three process the same sentences in turns, with as many concurrent requests as there are rows.
The fake's outputs have the mean length of the model's outputs.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.libraries.contender import Setup, Task, running_contenders
from bench.load import GENERATE, bodies_of, measure_load
from bench.models import Subject
from bench.options import Options
from bench.record import Figure, Result
from bench.server import RunningServer, serving
from loadtest.load import Load

ROWS = 32
REQUESTS = {"tiny": 1200, "base": 300}


def run_tiny(options: Options) -> Result:
    return _run(options, options.models.tiny, options.models.shipped_dtype)


def run_base(options: Options) -> Result:
    return _run(options, options.models.grown_base, "int8")


def _run(options: Options, subject: Subject, dtype: str) -> Result:
    speeds = _measure(options, subject, subject.bundles[dtype], dtype)
    # The throughput if decoding and HTTP alternate without overlapping.
    bounds = [1 / (1 / bare + 1 / fake) for bare, fake in zip(speeds["bare"], speeds["fake"], strict=True)]
    over = {"bare": speeds["bare"], "bound": bounds}
    return Result(
        {
            f"http.{subject.name}.over_{what}": Figure.of([a / b for a, b in zip(speeds["http"], below, strict=True)])
            for what, below in over.items()
        },
        [
            {"what": what, "dtype": dtype, "requests_per_s": [round(value, 1) for value in values]}
            for what, values in speeds.items()
        ],
    )


def _measure(options: Options, subject: Subject, bundle: Path, dtype: str) -> dict[str, list[float]]:
    """Return requests per second in each round for the bare decode loop, the service, and the
    service with the fake.
    """
    count = REQUESTS[subject.name]
    sentences = [options.sentences[number % len(options.sentences)] for number in range(count)]
    task = Task(subject.sources(sentences), at_least_s=0)
    settings: dict[str, Any] = {"threads": options.threads, "max_rows": ROWS, "queue_timeout_s": 30}
    with (
        running_contenders([Setup("sightline", dtype, bundle, ["--max-rows", str(ROWS)])], options.threads) as (bare,),
        serving(bundle.parent, **settings) as http,
        serving(bundle.parent, "bench.fake_server", **settings) as fake,
    ):
        length = round(bare.measure(task).num_tokens / count)
        loads = {
            "http": (http, bodies_of(sentences)),
            "fake": (fake, bodies_of(sentences, max_new_tokens=length, min_new_tokens=length)),
        }
        for server, bodies in loads.values():
            _requests_per_s(server, bodies)  # warm-up
            server.process.suspend()
        speeds: dict[str, list[float]] = {"bare": [], "http": [], "fake": []}
        for _ in range(options.rounds):
            speeds["bare"].append(count / bare.measure(task).seconds)
            for name, (server, bodies) in loads.items():
                with server.process.running():
                    speeds[name].append(_requests_per_s(server, bodies))
    return speeds


def _requests_per_s(server: RunningServer, bodies: Sequence[bytes]) -> float:
    return measure_load(server.url, Load(GENERATE, bodies, clients=ROWS, requests=len(bodies))).requests_per_s
