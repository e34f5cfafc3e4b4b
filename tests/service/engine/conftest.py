"""An engine with the fake model, and reference results computed without rows or batches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sightline.base.bundle import PREFILL_TOKENS, TOP_TOKENS, Manifest
from sightline.service.engine.engine import Engine
from sightline.service.engine.generation import ActiveRequest, Sink
from sightline.service.engine.request import (
    EncodeRequest,
    Event,
    Final,
    Generated,
    GenerateRequest,
    Request,
    Target,
    TokenEvent,
)
from sightline.service.engine.scores import StepScores
from sightline.service.parameters import GenerateParameters
from sightline.service.runtime.runner import BLOCK_TOKENS, Array, Bools, Int32, Int64, Runner
from tests.support.fake_runner import PRIME, FakeFaultError, FakeRunner, Faults, fake_manifest

FAR = 1e9
SOURCES = [tuple(range(3 + start, 5 + 2 * start)) for start in range(9)]  # 2 to 10 tokens

NextLogits = Callable[[Sequence[Sequence[int]]], NDArray[np.float32]]  # as in tests.support.reference_decoding


class Harness:
    """An engine with the fake runner and a manual clock; records the events of each request."""

    def __init__(
        self, max_rows: int = 4, faults: Faults | None = None, runner: Runner | None = None, **settings: Any
    ) -> None:
        self.now = 0.0
        self.runner = runner or FakeRunner(fake_manifest(), max_rows, faults=faults)
        self.engine = Engine(self.runner, lambda: self.now, **{"alone_s": 0.0, **settings})
        self.events: dict[ActiveRequest, list[Event]] = {}

    def submit(self, request: Request, sink: Sink | None = None) -> ActiveRequest:
        events: list[Event] = []
        active = self.engine.submit(request, sink or events.append)
        self.events[active] = events
        return active

    def generate(
        self, source: Sequence[int], deadline: float = FAR, sink: Sink | None = None, **fields: Any
    ) -> ActiveRequest:
        return self.submit(GenerateRequest("g", tuple(source), deadline, **fields), sink)

    def search(self, source: Sequence[int], num_beams: int, deadline: float = FAR, **parameters: Any) -> ActiveRequest:
        """Submit a beam search that returns all beams."""
        all_parameters = {"num_beams": num_beams, "num_return_sequences": num_beams, **parameters}
        return self.generate(source, deadline, parameters=GenerateParameters(**all_parameters))

    def encode(self, source: Sequence[int], deadline: float = FAR) -> ActiveRequest:
        return self.submit(EncodeRequest("e", tuple(source), deadline))

    def run(self) -> None:
        while self.engine.has_work:
            self.engine.step()

    def final(self, active: ActiveRequest) -> Final:
        finals = [event for event in self.events[active] if not isinstance(event, TokenEvent)]
        assert len(finals) == 1
        assert self.events[active][-1] is finals[0]
        return finals[0]

    def generated(self, active: ActiveRequest) -> Generated:
        final = self.final(active)
        assert isinstance(final, Generated), final
        return final

    def target(self, active: ActiveRequest) -> Target:
        """Return the only target of a request."""
        (target,) = self.generated(active).targets
        return target

    def ids(self, active: ActiveRequest) -> list[int]:
        return ids_of(self.target(active))

    def expected(self, source: Sequence[int]) -> list[int]:
        """Return the expected tokens of greedy decoding."""
        return FakeRunner(self.runner.manifest, 1).expected(source, self.runner.manifest.limits.max_target_tokens)


def ids_of(target: Target) -> list[int]:
    return [token.id for token in target.tokens]


def run_alone(request: GenerateRequest, manifest: Manifest) -> Generated:
    """Return the result of a request that runs alone."""
    harness = Harness(runner=FakeRunner(manifest, request.parameters.num_beams))
    active = harness.submit(request)
    harness.run()
    return harness.generated(active)


@dataclass
class StopAfter:
    """Stops after a number of tokens."""

    left: int

    def update(self, token_id: int) -> bool:
        self.left -= 1
        return self.left == 0

    def copy(self) -> "StopAfter":
        return StopAfter(self.left)


@dataclass
class StopAtSum:
    """Stops when the sum of the token ids reaches a limit, so that it depends on the tokens."""

    enough: int
    seen: int = 0

    def update(self, token_id: int) -> bool:
        self.seen += token_id
        return self.seen >= self.enough

    def copy(self) -> "StopAtSum":
        return StopAtSum(self.enough, self.seen)


def slow_logits(manifest: Manifest, source: Sequence[int]) -> NextLogits:
    """Return the fake model as a function from decoder inputs to logits (rows, V).

    The decoder inputs start with the last token of `Manifest.decoder_prompt_ids`.
    """
    tokens, vocabulary = manifest.tokens, manifest.limits.vocabulary
    source_hash = sum(position * token for position, token in enumerate(source, 1)) % PRIME
    filled = manifest.decoder_prompt_ids(source)[:-1]

    def logits(read: Sequence[int]) -> list[float]:
        read_hash = sum(position * token for position, token in enumerate(read, 1)) % PRIME
        rolling = 0
        for token in read:
            rolling = (rolling * 31 + token + 7) % PRIME
        key = (source_hash * 13 + read_hash * 17 + rolling) % PRIME
        after = [key * position * 40503 % PRIME / PRIME * 4.0 for position in range(1, vocabulary + 1)]
        is_over = len(read) - len(filled) > 2 + source_hash % 11
        after[tokens.end_id if is_over else 3 + key % (vocabulary - 3)] = 6.0
        return after

    return lambda prefixes: np.array([logits([*filled, *read]) for read in prefixes], np.float32)


def scores_of(logits: Sequence[Sequence[float]]) -> StepScores:
    """Return the scores of a step whose rows have these logits."""
    array = np.array(logits, np.float32)
    logprobs = array - np.log(np.exp(array).sum(axis=1, keepdims=True))
    top_ids = np.argsort(-array, axis=1, kind="stable")[:, :TOP_TOKENS]
    top_logprobs = np.take_along_axis(logprobs, top_ids, axis=1)
    return StepScores({"logits": array, "logprobs": logprobs, "top_ids": top_ids, "top_logprobs": top_logprobs})


@dataclass
class CheckedRow:
    """Expected content of a row."""

    source: list[int]
    read: list[int] = field(default_factory=list)


class CheckedRunner:
    """Wraps a FakeRunner and checks every call against its own record of the rows."""

    def __init__(
        self, max_rows: int, manifest: Manifest | None = None, faults: Faults | None = None, num_prefix_blocks: int = 0
    ) -> None:
        self.inner = FakeRunner(
            manifest or fake_manifest(), max_rows, faults=faults, num_prefix_blocks=num_prefix_blocks
        )
        self.manifest, self.max_rows = self.inner.manifest, max_rows
        self.num_prefix_blocks = num_prefix_blocks
        self.blocks: dict[int, list[int]] = {}  # all tokens before the end of each block
        self.rows: list[CheckedRow] = []  # may include rows that have ended
        self.encoded: list[list[list[int]]] = []  # the sources of each encoder call
        self.stepped: list[CheckedRow] = []  # rows of all steps; tests may clear it
        self.retries_left = 0  # rows of a failed step that are still to be repeated alone
        self.num_retries = 0
        self.failed: list[tuple[CheckedRow, int]] = []  # rows whose repetition failed, with their tokens
        self.prefilled: list[int] = []  # tokens of all prefill calls; tests may clear it
        self.num_swapped = 0
        self.num_moved = 0
        self.num_branched = 0

    def run_encoder(self, source_ids: Int64, source_lengths: Int32, outputs: Sequence[str]) -> Mapping[str, Array]:
        sources = [ids[:length].tolist() for ids, length in zip(source_ids, source_lengths, strict=True)]
        self.encoded.append(sources)
        return self.inner.run_encoder(source_ids, source_lengths, outputs)

    def predict(self, hidden: Array) -> Array:
        return self.inner.predict(hidden)

    def measure_contributions(self, method: str, source_ids: Int64, target_ids: Int64) -> Mapping[str, Array]:
        return self.inner.measure_contributions(method, source_ids, target_ids)

    def init_rows(
        self,
        first: int,
        encoded: Mapping[str, Array],
        examples: Sequence[int],
        visible: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        assert examples
        assert first + len(examples) <= self.max_rows
        if self.manifest.is_decoder_only:
            assert not encoded and len(examples) == 1
            self._grow(first)
            self.rows[first] = CheckedRow([], [])
            self.inner.init_rows(first, encoded, examples)
            return
        assert 0 <= first <= len(self.rows)
        sources = [self.encoded[-1][example] for example in examples]
        for number, example in enumerate(examples):
            if visible and example in visible:
                sources[number] = [sources[number][index] for index in visible[example]]
        self.rows[first:] = [CheckedRow(one[:]) for one in sources]
        self.inner.init_rows(first, encoded, examples, visible)

    def _grow(self, last: int) -> None:
        """Record rows up to `last`, which no call has initialized so far."""
        self.rows += [CheckedRow([], []) for _ in range(last + 1 - len(self.rows))]

    def prefill(self, row: int, token_ids: Int64, length: int, outputs: Sequence[str] = ()) -> Mapping[str, Array]:
        assert self.manifest.is_decoder_only
        assert (1 if not length else 2) <= len(token_ids) <= 1.5 * PREFILL_TOKENS
        assert length % BLOCK_TOKENS == 0
        assert length == len(self.rows[row].read)
        given = self.inner.prefill(row, token_ids, length, outputs)
        self.rows[row].read += token_ids.tolist()
        self.prefilled += token_ids.tolist()
        return given

    def store_prefix(self, row: int, first_token: int, block: int) -> None:
        assert 0 <= block < self.num_prefix_blocks
        assert first_token % BLOCK_TOKENS == 0
        assert len(self.rows[row].read) >= first_token + BLOCK_TOKENS
        self.blocks[block] = self.rows[row].read[: first_token + BLOCK_TOKENS]
        self.inner.store_prefix(row, first_token, block)

    def load_prefix(self, block: int, row: int, first_token: int) -> None:
        assert self.rows[row].read == self.blocks[block][:first_token] and first_token % BLOCK_TOKENS == 0
        self.rows[row].read = self.blocks[block][:]
        self.inner.load_prefix(block, row, first_token)

    def swap(self, first: int, second: int, target_tokens: int) -> None:
        assert self.manifest.is_decoder_only
        assert target_tokens == max(len(self.rows[first].read), len(self.rows[second].read))
        self.rows[first], self.rows[second] = self.rows[second], self.rows[first]
        self.num_swapped += 1
        self.inner.swap(first, second, target_tokens)

    def move(self, source: int, target: int, target_tokens: int, source_tokens: int) -> None:
        if self.manifest.is_decoder_only:
            self._grow(max(source, target))
            if target_tokens:
                assert target_tokens == len(self.rows[source].read)
                self.num_moved += 1
            self.rows[target], self.rows[source] = self.rows[source], CheckedRow([], [])
            self.inner.move(source, target, target_tokens, source_tokens)
            return
        assert 0 <= target < source < len(self.rows)
        moved = self.rows[source]
        assert (target_tokens, source_tokens) == (len(moved.read), len(moved.source))
        self.rows[target] = moved
        self.num_moved += 1
        del self.rows[source:]
        self.inner.move(source, target, target_tokens, source_tokens)

    def fork(self, sources: Sequence[int], targets: Sequence[int], positions: Sequence[slice]) -> None:
        assert len(sources) == len(targets) == len(set(targets)) > 0
        assert not set(sources) & set(targets), "a row is both a source and a target"
        self._grow(max(targets) if self.manifest.is_decoder_only else 0)
        for source, target, part in zip(sources, targets, positions, strict=True):
            assert part.stop == len(self.rows[source].read)
            first = part.start or 0
            assert self.rows[target].read[:first] == self.rows[source].read[:first], "the rows differ before"
            if self.manifest.is_decoder_only and not self.rows[source].source:  # the end of a prefill
                self.rows[target].source = []
            assert self.rows[source].source == self.rows[target].source
            self.rows[target].read = self.rows[source].read[:]
        self.num_branched += len(sources)
        self.inner.fork(sources, targets, positions)

    def step(
        self,
        token_ids: Int64,
        lengths: Int32,
        source_lengths: Int32,
        outputs: Sequence[str],
        *,
        first: int = 0,
        whole: Bools | None = None,
    ) -> Mapping[str, Array]:
        assert 0 < len(token_ids) <= len(self.rows) - first
        rows = self.rows[first : first + len(token_ids)]
        self.stepped += rows
        assert lengths.tolist() == [len(row.read) for row in rows]
        if self.manifest.is_decoder_only:  # the source is the first part of what was read
            for row, size in zip(rows, source_lengths.tolist(), strict=True):
                row.source = row.read[:size]
        assert source_lengths.tolist() == [len(row.source) for row in rows]
        is_retry = self.retries_left > 0
        self.retries_left -= is_retry
        try:
            given = self.inner.step(token_ids, lengths, source_lengths, outputs, first=first, whole=whole)
        except FakeFaultError:
            if is_retry:
                self.failed.append((rows[0], int(token_ids[0])))
            elif len(token_ids) > 1:
                self.retries_left = self.num_retries = len(token_ids)
            self._end_retries()
            raise
        for row, token_id in zip(rows, token_ids.tolist(), strict=True):
            row.read.append(token_id)
        self._end_retries()
        return given

    def _end_retries(self) -> None:
        """Record rows that failed alone: their states are invalid, but tracked until their release.

        If all rows fail, the step has changed nothing.
        """
        if self.retries_left == 0:
            if len(self.failed) < self.num_retries:
                for row, token_id in self.failed:
                    row.read.append(token_id)
            self.failed.clear()

    def release_memory(self) -> None:
        self.rows.clear()
        self.inner.release_memory()

    def terminate(self) -> None:
        self.inner.terminate()
