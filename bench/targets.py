"""The targets of all figures, in the order in which they are reported."""

from dataclasses import dataclass
from typing import Literal

from bench.record import Figure


@dataclass(frozen=True)
class Target:
    """The target of a figure: the figure's name, its description in the table, and its limit."""

    figure: str
    text: str
    better: Literal["lower", "higher"]
    limit: float

    def is_met(self, figure: Figure) -> bool:
        return figure.value <= self.limit if self.better == "lower" else figure.value >= self.limit


def _at_least(figure: str, text: str, limit: float) -> Target:
    return Target(figure, text, "higher", limit)


def _at_most(figure: str, text: str, limit: float) -> Target:
    return Target(figure, text, "lower", limit)


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


LIBRARY = tuple(
    _at_least(f"library.{subject}.greedy.{rows}.{types}", f"{text}, {_rows(rows)}", limit)
    for subject, types, text, limits in (
        ("base-random", "best", "base model, best type over CTranslate2's best", {1: 5, 8: 3.3, 32: 1.3, 64: 1.3}),
        ("base-random", "float32", "base model, float32 over CTranslate2's float32", {1: 1.05, 8: 1.6, 32: 1.9}),
        ("tiny", "best", "shipped model, best type over CTranslate2's best", {1: 1, 8: 1.1, 32: 1.3}),
    )
    for rows, limit in limits.items()
)

SERVERS = (
    _at_most("server.tiny.greedy.1 client.p50.fastapi", "server, shipped model, p50 at 1 client over FastAPI's", 1),
    *(
        target
        for clients in (16, 64)
        for target in (
            _at_least(
                f"server.tiny.greedy.{clients} clients.throughput.better",
                f"server, shipped model, throughput at {clients} clients over the better peer's",
                1.3,
            ),
            _at_most(
                f"server.tiny.greedy.{clients} clients.p99.better",
                f"server, shipped model, p99 at {clients} clients over the better peer's",
                1,
            ),
        )
    ),
    *(
        target
        for decoding, limit in (("greedy", 2), ("beam 5", 1.5))
        for target in (
            _at_least(
                f"server.base.{decoding}.64 clients.throughput.litserve",
                f"server, d 512 model, {decoding}, throughput at 64 clients over LitServe's",
                limit,
            ),
            _at_most(
                f"server.base.{decoding}.64 clients.p99.litserve",
                f"server, d 512 model, {decoding}, p99 at 64 clients over LitServe's",
                1,
            ),
        )
    ),
)

ENGINE = (
    _at_least("http.base.over_bare", "HTTP over the bare decode loop, d 512 model", 0.9),
    _at_least("http.tiny.over_bound", "HTTP over 1 / (t_bare + t_http), shipped model", 0.9),
    *(_at_most(f"maps.{rows}", f"a step with all maps over one without, {_rows(rows)}", 1.1) for rows in (1, 8, 32)),
    _at_most("mixed.delay", "mixed load, p99 delay of a running row over one encode of the token budget", 1),
    _at_most("memory.ready", "VmRSS of a service that is ready, every shipped bundle", 350),
    _at_most("memory.loaded", "largest VmRSS sampled over 5,000 mixed calls, every shipped bundle", 450),
    _at_most("memory.growth", "growth of VmRSS from request 1,000 to 5,000 of every kind", 5),
    _at_most("start.ready", "from process start to the first 200 of /health/ready", 2),
    _at_most("start.first", "the first request over the tenth", 1.5),
    _at_most("start.resident", "VmRSS after 2,000 requests at 32 rows", 250),
    _at_least("batching.tiny", "32 concurrent requests over sequential ones, shipped model", 2),
    _at_least("batching.base-random", "32 concurrent requests over sequential ones, base model", 5),
)

TARGETS = LIBRARY + SERVERS + ENGINE
