"""The decode loop of one model: admit, encode, step, emit. It has no thread and knows no socket."""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.engine.attention import encoder_map, record_step
from service.engine.generation import Generation, Handle, Sink, start_generation
from service.engine.observer import EngineObserver, NullObserver
from service.engine.request import (
    Cancelled,
    Encoded,
    Event,
    Failed,
    GenerateRequest,
    Request,
    TokenEvent,
)
from service.engine.rows import Rows
from service.engine.sampling import pick_tokens
from service.engine.scheduler import Scheduler, Waiting
from service.runtime.protocol import Runner

Array = NDArray[Any]
logger = logging.getLogger(__name__)


class Engine:
    """Runs requests on one runner, new ones joining between two decoder steps.

    `step` belongs to one thread; `check`, `submit`, `cancel` and the properties may be used from any. Every request
    that was submitted ends with exactly one of Generated, Encoded, Failed and Cancelled at its sink.
    """

    def __init__(
        self,
        runner: Runner,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_batch_tokens: int = 4096,
        queue_timeout_s: float = 5.0,
        observer: EngineObserver | None = None,
    ) -> None:
        """`max_batch_tokens` bounds one encoder call, padding included; deadlines are read on `clock`."""
        self._runner = runner
        self._manifest = runner.manifest
        self._clock = clock
        self._queue_timeout_s = queue_timeout_s
        self._observer = observer or NullObserver()
        self._ids = count()
        self._scheduler = Scheduler(max_batch_tokens)
        # What waits or is being encoded, by id. A request is in its next place before it leaves the last, so that no
        # other thread ever sees it nowhere.
        self._waiting: dict[int, Handle] = {}
        self._rows = Rows(runner)
        # The two ways in from other threads: appending to a deque and emptying it from the left need no lock.
        self._arrived: deque[Handle] = deque()
        self._given_up: deque[Handle] = deque()

    @property
    def num_running(self) -> int:
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        return len(self._arrived) + len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._arrived or self._waiting or len(self._rows))

    def check(self, request: Request) -> None:
        """Raise ValueError where this model cannot run a request."""
        limits = self._manifest.limits
        if not 0 < len(request.source_ids) <= limits.max_source_tokens:
            raise ValueError(f"{len(request.source_ids)} source tokens; 1 to {limits.max_source_tokens} can be read")
        if isinstance(request, GenerateRequest):
            target = request.forced_target
            if target is not None:
                if not 0 < len(target) <= limits.max_target_tokens:
                    raise ValueError(f"{len(target)} target tokens; 1 to {limits.max_target_tokens} can be forced")
                if not all(0 <= token_id < limits.vocabulary for token_id in target):
                    raise ValueError(f"a target token outside the vocabulary of {limits.vocabulary}")
            missing = request.attention - {attention.kind for attention in self._manifest.attention}
            if missing:
                raise ValueError(f"{self._manifest.name} has no attention maps of kind {', '.join(sorted(missing))}")

    def submit(self, request: Request, sink: Sink) -> Handle:
        """Take a request; its events go to `sink` on the thread that steps.

        Raises:
            ValueError: from `check`.
        """
        self.check(request)
        handle = Handle(next(self._ids), request, sink, submitted=self._clock())
        self._arrived.append(handle)
        return handle

    def cancel(self, handle: Handle) -> None:
        """Give a request up: it leaves the queue or its row when the next `step` begins."""
        if not handle.has_ended:
            self._given_up.append(handle)

    def step(self) -> None:
        """One turn: drop what is over, encode one batch of newcomers, run the decoder once over all rows."""
        self._take_in()
        self._drop_expired(self._clock())
        batch = [self._waiting[id_] for id_ in self._scheduler.next_batch(self._rows.num_free)]
        if batch:
            self._encode(batch, started=self._clock())
            for handle in batch:
                del self._waiting[handle.id]
        if len(self._rows):
            self._decode()

    # The queue

    def _take_in(self) -> None:
        # Cancellations first: whoever is in this list was submitted before, and so is among those taken in here.
        given_up = [self._given_up.popleft() for _ in range(len(self._given_up))]
        for _ in range(len(self._arrived)):
            handle = self._arrived[0]
            request = handle.request
            expires = min(request.deadline, handle.submitted + self._queue_timeout_s)
            num_rows = int(isinstance(request, GenerateRequest))
            self._scheduler.add(Waiting(handle.id, len(request.source_ids), num_rows, expires))
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
            row = self._rows.find(handle)
            assert row is not None, "a request that has not ended waits or runs"
            self._rows.release(row)
        self._finish(handle, Cancelled())

    def _drop_expired(self, now: float) -> None:
        for id_ in self._scheduler.remove_expired(now):
            handle = self._waiting.pop(id_)
            is_late = handle.request.deadline <= now
            self._finish(handle, Failed("deadline_exceeded" if is_late else "queue_timeout"))
        late = [row for row, generation in enumerate(self._rows) if generation.request.deadline <= now]
        for row in reversed(late):
            self._end_row(row, Failed("deadline_exceeded"))

    # The encoder

    def _encode(self, batch: Sequence[Handle], started: float) -> None:
        """Encode a batch and admit it; where that fails, each alone, so that one request cannot fail another."""
        for handle in batch:
            handle.encode_started = started
        try:
            encoded = self._run_encoder(batch)
        except Exception:
            logger.exception("the encoder failed on a batch of %d", len(batch))
            if len(batch) == 1:
                self._finish(batch[0], Failed("internal"))
            else:
                for handle in batch:
                    self._encode([handle], started)
            return
        now = self._clock()
        for index, handle in enumerate(batch):
            handle.encode_ended = now
            try:
                self._deliver_encoded(handle, encoded, index)
            except Exception:
                logger.exception("a request could not use what the encoder gave")
                self._finish(handle, Failed("internal"))

    def _run_encoder(self, batch: Sequence[Handle]) -> Mapping[str, Array]:
        lengths = np.array([len(handle.request.source_ids) for handle in batch], np.int32)  # (B,)
        ids = np.full((len(batch), lengths.max()), self._manifest.tokens.pad_id, np.int64)  # (B, S)
        for row, handle in enumerate(batch):
            ids[row, : lengths[row]] = handle.request.source_ids
        started = self._clock()
        encoded = self._runner.encode(ids, lengths, self._encoder_outputs(batch))
        self._tell(self._observer.on_encode, len(batch), int(lengths.sum()), ids.size, self._clock() - started)
        return encoded

    def _encoder_outputs(self, batch: Sequence[Handle]) -> tuple[str, ...]:
        """Only what some request of the batch needs, in the graph's order."""
        wanted: set[str | None] = set()
        for handle in batch:
            if isinstance(handle.request, GenerateRequest):
                wanted.update(state.encoder_output for state in self._manifest.states)
                if "encoder" in handle.request.attention:
                    wanted.update(self._manifest.attention_of("encoder").outputs)
            else:
                wanted.add("hidden")
        return tuple(name for name in self._manifest.encoder.outputs if name in wanted)

    def _deliver_encoded(self, handle: Handle, encoded: Mapping[str, Array], index: int) -> None:
        """Begin a generation with what the encoder gave, or answer with it."""
        request = handle.request
        source_tokens = len(request.source_ids)
        if isinstance(request, GenerateRequest):
            wants_map = "encoder" in request.attention
            maps = encoder_map(self._manifest, encoded, index, source_tokens) if wants_map else None
            self._rows.admit(start_generation(handle, request, self._manifest, maps), encoded, index)
            return
        # A copy: a view would hold the whole batch in memory until its slowest reader is done.
        hidden = encoded["hidden"][index, :source_tokens].astype(np.float32)
        if np.isfinite(hidden).all():
            self._finish(handle, Encoded(hidden, handle.timings(handle.encode_ended)))
        else:
            logger.error("the encoder gave numbers that are not finite")
            self._finish(handle, Failed("internal"))

    # The decoder

    def _decode(self) -> None:
        wanted = frozenset[str]().union(*(generation.outputs for generation in self._rows))
        names = tuple(name for name in self._manifest.step.outputs if name in wanted)
        started = self._clock()
        try:
            outputs = self._rows.step(names)
        except Exception:
            logger.exception("a decoder step failed with %d rows", len(self._rows))
            for row in reversed(range(len(self._rows))):
                self._end_row(row, Failed("internal"))
            return
        now = self._clock()
        self._tell(self._observer.on_step, len(self._rows), now - started)
        record_step(self._manifest, [generation.maps for generation in self._rows], outputs)
        ids, logprobs = pick_tokens(
            outputs,
            [generation.picker for generation in self._rows],
            self._rows.lengths,
            self._rows.min_new_tokens,
            self._manifest.tokens.end_id,
        )
        self._rows.advance(ids)
        self._emit(ids, logprobs, now)

    def _emit(self, ids: NDArray[np.int64], logprobs: NDArray[np.float64], now: float) -> None:
        """Give each generation its token and end those that are done."""
        is_sound = np.isfinite(logprobs).tolist()
        if not all(is_sound):
            logger.error("the decoder gave numbers that are not finite in %d rows", is_sound.count(False))
        ended: list[tuple[int, Event]] = []
        for row, (generation, token_id, logprob) in enumerate(
            zip(self._rows, ids.tolist(), logprobs.tolist(), strict=True)
        ):
            event = self._advance(generation, token_id, logprob, now) if is_sound[row] else Failed("internal")
            if event is not None:
                ended.append((row, event))
        # From the last, so that the row that moves into a gap is never one that has ended.
        for row, event in reversed(ended):
            self._end_row(row, event)

    def _advance(self, generation: Generation, token_id: int, logprob: float, now: float) -> Event | None:
        """The final event of a generation that this token ends."""
        try:
            reason = generation.take(token_id, logprob)
        except Exception:
            logger.exception("a stop condition failed")
            return Failed("internal")
        if generation.request.stream:
            self._tell(generation.handle.sink, TokenEvent(generation.last_token))
        return None if reason is None else generation.result(reason, now)

    # The ends

    def _end_row(self, row: int, event: Event) -> None:
        handle = self._rows[row].handle
        self._rows.release(row)
        self._finish(handle, event)

    def _finish(self, handle: Handle, event: Event) -> None:
        assert not handle.has_ended, "a request ends once"
        handle.has_ended = True
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
