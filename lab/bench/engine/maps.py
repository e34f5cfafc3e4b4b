"""Compare the time of an engine step with and without all attention maps, for the same tokens."""

import math
import time
from collections.abc import Sequence

from lab.bench.options import Options
from lab.bench.record import Figure, Result
from sightline.base.bundle_files import read_bundle
from sightline.service.engine.engine import Engine
from sightline.service.engine.observer import EngineObserver
from sightline.service.engine.request import GenerateRequest
from sightline.service.parameters import GenerateParameters
from sightline.service.runtime.ort import OnnxRunner

ROWS = (1, 8, 32)
PARAMETERS = GenerateParameters(max_new_tokens=24, min_new_tokens=24)


def run(options: Options) -> Result:
    subject = options.models.shipped
    folder = subject.bundle("shipped")
    manifest = read_bundle(folder)
    sources = [tuple(source) for source in subject.sources(options.sentences)]
    steps = _Steps()
    runner = OnnxRunner(folder, manifest, num_threads=options.threads, max_rows=max(ROWS))
    engine = Engine(runner, observer=steps)
    kinds = frozenset(attention.kind for attention in manifest.attention)
    figures = {}
    for rows in options.allowed(ROWS):
        ratios = []
        for _ in range(1 + options.rounds):  # the first round is a warm-up
            with_maps = _seconds_per_step(engine, steps, sources[:rows], kinds)
            ratios.append(with_maps / _seconds_per_step(engine, steps, sources[:rows], frozenset()))
        figures[f"maps.{rows}"] = Figure.of(ratios[1:])
    return Result(figures)


class _Steps(EngineObserver):
    """Counts the decoder steps after the last run of the encoder."""

    def on_encode(self, requests: int, real_tokens: int, padded_tokens: int, seconds: float) -> None:
        self.number, self.started = 0, time.perf_counter()

    def on_step(self, rows: int, seconds: float) -> None:
        self.number += 1


def _seconds_per_step(
    engine: Engine, steps: _Steps, sources: Sequence[tuple[int, ...]], attention: frozenset[str]
) -> float:
    for source in sources:
        request = GenerateRequest("bench", source, math.inf, PARAMETERS, attention=attention)
        engine.submit(request, lambda event: None)
    while engine.has_work:
        engine.step()
    return (time.perf_counter() - steps.started) / steps.number
