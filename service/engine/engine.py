"""The decode loop of one model: admit, encode, step, emit. It has no thread and knows no socket."""

import logging
import time
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.bundle import MAX_BEAMS
from service.engine.attention import ENCODER_KINDS, encoder_maps, map_outputs, record_step
from service.engine.beam import BeamGeneration
from service.engine.checks import GraphName, not_finite, run_known_input
from service.engine.generation import Generation, Handle, Moves, NotFiniteError, Sink
from service.engine.observer import EngineObserver, NullObserver
from service.engine.request import (
    Cancelled,
    Compared,
    Encoded,
    EncodeRequest,
    Event,
    Failed,
    Generated,
    GenerateRequest,
    Request,
    SimilarRequest,
    TokenEvent,
)
from service.engine.rows import Rows, num_rows
from service.engine.scheduler import Scheduler, Waiting
from service.engine.scores import StepScores
from service.engine.single import SingleGeneration
from service.engine.throughput import Throughput
from service.runtime.protocol import Runner

Array = NDArray[Any]
ROWS_PER_RESERVED = 16  # one row of 16 is reserved for calls that hold none
HASTENED_STEPS = 3  # of small calls by themselves, for each 16 rows of a step of all rows
MAX_FAILURES = 8  # consecutive failures of one graph, from distinct calls, before a known input is tried
logger = logging.getLogger(__name__)


class RuntimeFailedError(Exception):
    """Encoder or decoder fails on a known input too, as on a device that has broken down: nothing can be served."""


class Engine:
    """Runs requests on one runner, new ones joining between two decoder steps.

    `step` belongs to one thread; `check`, `submit`, `cancel` and the properties may be used from any. Every request
    that was submitted ends with exactly one of Generated, Encoded, Compared, Failed and Cancelled at its sink.
    """

    def __init__(
        self,
        runner: Runner,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_batch_tokens: int = 1024,
        observer: EngineObserver | None = None,
    ) -> None:
        """`max_batch_tokens` bounds one encoder call, padding included; deadlines are read on `clock`."""
        self._runner = runner
        self._manifest = runner.manifest
        self._clock = clock
        self._observer = observer or NullObserver()
        self._ids = count()
        self._max_batch_tokens = max_batch_tokens
        self._reserved_rows = runner.max_rows // ROWS_PER_RESERVED
        self._scheduler = Scheduler(max_batch_tokens, self._reserved_rows)
        # What waits or is being encoded, by id. A request is in its next place before it leaves the last, so that no
        # other thread ever sees it nowhere.
        self._waiting: dict[int, Handle] = {}
        self._map_names: dict[str, Sequence[str]] = {one.kind: one.outputs for one in self._manifest.attention}
        self._rows = Rows(runner)
        self.throughput = Throughput()
        # Of each graph, one after another: a request of each run that failed. Those of a call have one id.
        self._failures: dict[GraphName, set[str]] = {"encoder": set(), "step": set()}
        # The two ways in from other threads: appending to a deque and emptying it from the left need no lock.
        self._arrived: deque[Handle] = deque()
        self._given_up: deque[Handle] = deque()

    @property
    def num_running(self) -> int:
        """How many requests run; each may take several rows."""
        return self._rows.num_generations

    @property
    def num_waiting(self) -> int:
        return len(self._arrived) + len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._arrived or self._waiting or len(self._rows))

    def check(self, request: Request) -> None:
        """Raise ValueError where this model cannot run a request."""
        if isinstance(request, SimilarRequest):
            if self._manifest.similar is None or not request.token_ids:
                raise ValueError(f"{self._manifest.name} cannot compare {len(request.token_ids)} tokens")
            self._check_vocabulary(request.token_ids)
            return
        most = self._manifest.limits.max_source_tokens
        if not 0 < len(request.source_ids) <= most:
            raise ValueError(f"{len(request.source_ids)} source tokens; 1 to {most} can be read")
        missing = request.attention - {attention.kind for attention in self._manifest.attention}
        if missing:
            raise ValueError(f"{self._manifest.name} has no attention maps of kind {', '.join(sorted(missing))}")
        if isinstance(request, GenerateRequest):
            self._check_generation(request)
        elif request.wants_labels and not self._manifest.labels:
            raise ValueError(f"{self._manifest.name} has no labels")
        elif request.attention.difference(ENCODER_KINDS):
            raise ValueError(f"an encoder has maps of kind {' and '.join(ENCODER_KINDS)} alone")

    def _check_generation(self, request: GenerateRequest) -> None:
        if self._manifest.step is None:
            raise ValueError(f"{self._manifest.name} generates nothing")
        parameters, prefix = request.parameters, request.target_prefix
        num_tokens = len(prefix) + min(1, parameters.num_new_tokens)  # at the least
        room = self._manifest.room(len(request.source_ids))
        if not 0 < num_tokens <= room:
            raise ValueError(f"{len(prefix)} tokens of a prefix; {room} tokens can be written")
        self._check_vocabulary((*prefix, *parameters.suppress_tokens))
        if not parameters.num_return_sequences >= 1 or request.num_targets > parameters.num_beams:
            raise ValueError(f"{parameters.num_return_sequences} sequences of {parameters.num_beams} beams")
        if parameters.num_beams > (most := min(MAX_BEAMS, self._runner.max_rows)):
            raise ValueError(f"{parameters.num_beams} beams; at most {most} can be run")
        if parameters.num_beams > 1 and (parameters.do_sample or request.stream or not parameters.num_new_tokens):
            raise ValueError("beams neither draw nor stream, and generate something")

    def _check_vocabulary(self, token_ids: Sequence[int]) -> None:
        vocabulary = self._manifest.limits.vocabulary
        if not all(0 <= token_id < vocabulary for token_id in token_ids):
            raise ValueError(f"a token outside the vocabulary of {vocabulary}")

    def submit(self, request: Request, sink: Sink) -> Handle:
        """Take a request, which must pass `check`; its events go to `sink` on the thread that steps."""
        handle = Handle(next(self._ids), request, sink, submitted=self._clock())
        self._arrived.append(handle)
        return handle

    def cancel(self, handle: Handle) -> None:
        """Give a request up: it leaves the queue or its row when the next `step` begins."""
        if not handle.has_ended:
            self._given_up.append(handle)

    def step(self) -> None:
        """One turn: drop what is over, encode one batch of newcomers, run the decoder over all rows, then small calls.

        Raises:
            RuntimeFailedError: the runtime has no more use.
        """
        self._take_in()
        self._drop_expired(self._clock())
        held = self._rows.held() if self._waiting else {}
        batch = [self._waiting[id_] for id_ in self._scheduler.next_batch(self._rows.num_free, held)]
        if batch:
            self._run(batch, started=self._clock())
            for handle in batch:
                del self._waiting[handle.id]
        num_rows = len(self._rows)
        if num_rows:
            self._decode_all()
            self._hasten()
        self.throughput.on_turn(len(batch) + num_rows, self._clock(), is_saturated=len(self._scheduler) > 0)

    def release_memory(self) -> None:
        """Return memory that only earlier requests needed to the system. Only to be called while there is no work."""
        try:
            self._runner.release_memory()
        except Exception:
            logger.exception("memory could not be released")

    # The queue

    def _take_in(self) -> None:
        # Cancellations first: whoever is in this list was submitted before, and so is among those taken in here.
        given_up = [self._given_up.popleft() for _ in range(len(self._given_up))]
        for _ in range(len(self._arrived)):
            handle = self._arrived[0]
            request = handle.request
            try:
                self.check(request)
            except ValueError:
                logger.exception("a request was not checked before it was submitted")
                self._arrived.popleft()
                self._finish(handle, Failed("internal"))
                continue
            rows = num_rows(request) if isinstance(request, GenerateRequest) else 0
            # What compares tokens has no tokens for the encoder; as a whole batch it has a turn of its own.
            tokens = self._max_batch_tokens if isinstance(request, SimilarRequest) else len(request.source_ids)
            self._scheduler.add(Waiting(handle.id, request.request_id, tokens, rows, request.deadline))
            self._waiting[handle.id] = handle
            self._arrived.popleft()
        for handle in given_up:
            self._drop_cancelled(handle)

    def _drop_cancelled(self, handle: Handle) -> None:
        if handle.has_ended:
            return
        if self._scheduler.remove(handle.id):
            del self._waiting[handle.id]
        else:
            generation = self._rows.find(handle)
            assert generation is not None, "a request that has not ended waits or runs"
            self._rows.release(generation)
        self._finish(handle, Cancelled())

    def _drop_expired(self, now: float) -> None:
        for id_ in self._scheduler.remove_expired(now):
            self._finish(self._waiting.pop(id_), Failed("deadline_exceeded"))
        for generation in self._rows.generations:
            if generation.request.deadline <= now:
                self._end(generation, Failed("deadline_exceeded"))

    # The encoder

    def _run(self, batch: Sequence[Handle], started: float) -> None:
        for handle in batch:
            handle.encode_started = started
        if isinstance(batch[0].request, SimilarRequest):
            self._compare(batch[0], batch[0].request)
        else:
            self._encode(batch)

    def _compare(self, handle: Handle, request: SimilarRequest) -> None:
        try:
            cosines = self._runner.compare(np.array(request.token_ids, np.int64)).astype(np.float32)
            if not np.isfinite(cosines).all():
                raise NotFiniteError
        except Exception:
            logger.exception("tokens could not be compared")
            self._finish(handle, Failed("internal"))
            return
        handle.encode_ended = self._clock()
        self._finish(handle, Compared(cosines, handle.timings(handle.encode_ended)))

    def _encode(self, batch: Sequence[Handle]) -> None:
        """Encode a batch and admit it; where that fails, each alone, so that one request cannot fail another."""
        is_well = self._encode_together(batch)
        if not is_well and len(batch) > 1:
            alone = [self._encode_together([handle]) for handle in batch]
            is_well = any(alone)
        if is_well:
            self._failures["encoder"].clear()
        else:
            self._note_failure("encoder", batch[0])

    def _encode_together(self, batch: Sequence[Handle]) -> bool:
        """Whether it went well; one that was alone has failed otherwise."""
        try:
            encoded = self._run_encoder(batch)
            now = self._clock()
            for handle in batch:
                handle.encode_ended = now
            num_tokens = [len(handle.source_request.source_ids) for handle in batch]
            poisoned = not_finite(self._manifest.states, encoded, num_tokens)
            newcomers = self._start_generations(batch, encoded, poisoned)
            if newcomers:
                self._rows.admit(newcomers, encoded)
        except Exception:
            logger.exception("the encoder failed on a batch of %d", len(batch))
            if len(batch) == 1:
                self._finish(batch[0], Failed("internal"))
            return False
        for index, handle in enumerate(batch):
            if isinstance(handle.request, EncodeRequest):
                self._deliver_encoded(handle, handle.request, encoded, index)
            elif index in poisoned:
                self._fail_not_finite(handle)
        return True

    def _run_encoder(self, batch: Sequence[Handle]) -> Mapping[str, Array]:
        lengths = np.array([len(handle.source_request.source_ids) for handle in batch], np.int32)  # (B,)
        ids = np.full((len(batch), lengths.max()), self._manifest.tokens.pad_id, np.int64)  # (B, S)
        for row, handle in enumerate(batch):
            ids[row, : lengths[row]] = handle.source_request.source_ids
        started = self._clock()
        encoded = self._runner.encode(ids, lengths, self._encoder_outputs(batch))
        self._tell(self._observer.on_encode, len(batch), int(lengths.sum()), ids.size, self._clock() - started)
        return encoded

    def _encoder_outputs(self, batch: Sequence[Handle]) -> tuple[str, ...]:
        """Only what some request of the batch needs, in the graph's order."""
        wanted: set[str | None] = set()
        for handle in batch:
            request = handle.source_request
            if isinstance(request, GenerateRequest):
                wanted.update(state.encoder_output for state in self._manifest.states)
            else:
                wanted.update(("hidden", "label_logprobs") if request.wants_labels else ("hidden",))
            wanted |= map_outputs(self._manifest, request.attention, ENCODER_KINDS)
        return tuple(name for name in self._manifest.encoder.outputs if name in wanted)

    def _start_generations(
        self, batch: Sequence[Handle], encoded: Mapping[str, Array], poisoned: Container[int]
    ) -> list[tuple[Generation, int]]:
        """The generations of a batch, each with its example's index; `poisoned` ones are left out."""
        started: list[tuple[Generation, int]] = []
        for index, handle in enumerate(batch):
            request = handle.request
            if isinstance(request, GenerateRequest) and index not in poisoned:
                maps = encoder_maps(self._manifest, encoded, index, request)
                kind = BeamGeneration if request.parameters.num_beams > 1 else SingleGeneration
                started.append((kind(handle, request, self._manifest, maps), index))
        return started

    def _deliver_encoded(
        self, handle: Handle, request: EncodeRequest, encoded: Mapping[str, Array], index: int
    ) -> None:
        # Copies: a view would hold the whole batch in memory until its slowest reader is done.
        hidden = encoded["hidden"][index, : len(request.source_ids)].astype(np.float32)
        labels = encoded["label_logprobs"][index].astype(np.float32) if request.wants_labels else None
        if np.isfinite(hidden).all() and (labels is None or np.isfinite(labels).all()):
            maps = encoder_maps(self._manifest, encoded, index, request)
            self._finish(handle, Encoded(hidden, handle.timings(handle.encode_ended), labels, maps))
        else:
            self._fail_not_finite(handle)

    def _fail_not_finite(self, handle: Handle) -> None:
        logger.error("the encoder gave numbers that are not finite")
        self._finish(handle, Failed("internal"))

    # The decoder

    def _decode_all(self) -> None:
        """Step all rows; if each of them fails, so do all generations."""
        if self._decode(range(len(self._rows))):
            self._failures["step"].clear()
            return
        generations = self._rows.generations
        for generation in generations:
            self._end(generation, Failed("internal"))
        self._note_failure("step", generations[0].handle)

    def _hasten(self) -> None:
        """Step a few calls of one row some more times by themselves, while large calls make every step a long one.

        A step over one row takes a fraction of the time of a step over all. So the text of a small call does not take
        many times as long beside large calls as it takes alone. The extra steps are in proportion to the rows, and so
        to the time of a step of all rows; the small calls share them. A step that fails is repeated by the next step of
        all rows.
        """
        held = self._rows.held()
        if max(held.values(), default=0) <= 1:
            return
        small = [one for one in self._rows if held[one.request.request_id] == 1][: self._reserved_rows]
        num_steps = HASTENED_STEPS * max(1, len(self._rows) // ROWS_PER_RESERVED)
        for generation in small:
            for _ in range(num_steps // len(small)):
                row = generation.rows[0]
                if not self._decode(range(row, row + 1)) or generation.handle.has_ended:
                    break

    def _decode(self, rows: range) -> bool:
        """Step some rows, which must be all rows of their generations, and deliver what comes of it.

        Returns:
            False if the step failed for every row. Then it has changed nothing and can be repeated.
        """
        started = self._clock()
        outputs = self._step(rows)
        if outputs is None:
            return False
        now = self._clock()
        self._tell(self._observer.on_step, len(rows), now - started)
        generations = self._rows.generations_of(rows)
        self._record_maps([one for one in generations if one.wants_maps], outputs, rows.start)
        scores = StepScores(outputs, rows.start)
        moves: Moves = []
        events = [(generation, self._advance(generation, scores, moves, now)) for generation in generations]
        self._rows.advance(rows, scores.next_ids, moves)
        for generation, event in events:
            if event is not None:
                self._end(generation, event)
        return True

    def _step(self, rows: range) -> Mapping[str, Array] | None:
        """Run the decoder over some rows; if that fails, over each alone, so that one request cannot fail another."""
        try:
            return self._rows.step(rows)
        except Exception:
            logger.exception("a decoder step failed with %d rows", len(rows))
        return self._rows.step_each(rows) if len(rows) > 1 else None

    def _record_maps(self, wanting: Sequence[Generation], outputs: Mapping[str, Array], first: int) -> None:
        """Record the maps of a step, whose outputs begin with those of row `first`."""
        for generation in wanting:
            generation.count_maps()
        recorders = [
            (row - first, hypothesis.maps)
            for generation in wanting
            for row, hypothesis in zip(generation.rows, generation.hypotheses(), strict=False)
        ]
        record_step(self._map_names, recorders, outputs)

    def _advance(self, generation: Generation, scores: StepScores, moves: Moves, now: float) -> Event | None:
        """Let a generation take its part of a step; its final event where it ends."""
        handle = generation.handle
        refusal = generation.map_refusal
        if refusal is not None:
            return Failed(refusal)
        try:
            targets = generation.advance(scores, moves)
        except NotFiniteError:
            logger.error("the decoder gave numbers that are not finite")
            return Failed("internal")
        except Exception:
            logger.exception("a generation could not go on")
            return Failed("internal")
        if generation.request.stream and (token := generation.new_token) is not None:
            self._tell(handle.sink, TokenEvent(token))
        if not targets:
            return None
        generation.settle(targets)
        if generation.request.parameters.num_new_tokens:
            num_forced = len(generation.request.target_prefix)
            self.throughput.on_generated(max(len(target.tokens) for target in targets) - num_forced)
        return Generated(targets, handle.timings(now))

    def _note_failure(self, graph: GraphName, handle: Handle) -> None:
        """Count a run that failed; `handle` is one of its requests. No row runs after a failed step.

        Raises:
            RuntimeFailedError: the graph has failed for too many calls in a row, and fails on a known input too.
        """
        failures = self._failures[graph]
        failures.add(handle.request.request_id)
        if len(failures) < MAX_FAILURES:
            return
        try:
            run_known_input(self._runner, graph)
        except Exception as error:
            raise RuntimeFailedError(
                f"{graph}: {MAX_FAILURES} runs failed one after another, then a known input"
            ) from error
        logger.warning(
            "%s: %d runs failed one after another; a known input runs, so the calls are at fault", graph, MAX_FAILURES
        )
        failures.clear()

    # The ends

    def _end(self, generation: Generation, event: Event) -> None:
        self._rows.release(generation)
        self._finish(generation.handle, event)

    def _finish(self, handle: Handle, event: Event) -> None:
        assert not handle.has_ended, "a request ends once"
        handle.has_ended = True
        self._scheduler.forget(handle.id)
        if event == Failed("internal"):  # the answer names the log; what went wrong stands in the line before
            logger.error("a sequence failed", extra={"fields": {"request_id": handle.request.request_id}})
        self._tell(handle.sink, event)
        self._tell(self._observer.on_finish, handle.request, event)

    @staticmethod
    def _tell(listener: Callable[..., Any], *arguments: Any) -> None:
        """Call what is not the engine's own: whatever it raises must harm no request."""
        try:
            listener(*arguments)
        except Exception:
            logger.exception("a listener failed")
