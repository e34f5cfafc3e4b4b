"""The engine of one model: a loop that admits, encodes and decodes requests. It owns no thread."""

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np

from sightline.base.bundle import TOP_OUTPUTS
from sightline.service.engine.beam import BeamGeneration
from sightline.service.engine.checks import GraphFailures, GraphName, find_non_finite
from sightline.service.engine.contributions import with_contributions
from sightline.service.engine.encoding import encoder_outputs, label_scores, predict
from sightline.service.engine.generation import (
    ActiveRequest,
    BeamCopies,
    Generation,
    NonFiniteError,
    PromptEncoding,
    RowOwner,
    Sink,
)
from sightline.service.engine.observer import EngineObserver
from sightline.service.engine.prefill import BUDGET_S, Prefill, PrefillQueue
from sightline.service.engine.prefix_cache import PrefixCache
from sightline.service.engine.recorded_maps import Maps, encoder_maps, prompt_block
from sightline.service.engine.request import (
    Cancelled,
    Encoded,
    EncodeRequest,
    Event,
    Failed,
    Generated,
    GenerateRequest,
    Request,
    TokenEvent,
    call_of,
)
from sightline.service.engine.rows import Rows, num_rows
from sightline.service.engine.scheduler import Scheduler, WaitingSequence, share_of
from sightline.service.engine.scores import StepScores
from sightline.service.engine.single import SingleGeneration
from sightline.service.engine.throughput import Throughput
from sightline.service.runtime.runner import BLOCK_TOKENS, Array, Runner

ROWS_PER_RESERVED = 16  # one row in 16 is reserved for calls that have no row yet
# Duration of decoder steps of a single row, after which the engine looks at deadlines and the
# worker at its commands.
ALONE_S = 0.005
# Time of other work between two steps over the running rows, as a multiple of the time of a step.
WAIT_STEPS = 4
NEWEST_SHARE = 0.25  # weight of the newest duration in a moving average
EXTRA_STEPS = 3  # extra steps for small calls, per 16 running rows
# Time of extra steps for callers with one row, as a multiple of that of a step over all rows.
CALLER_TIME = 2
MAX_EXTRA_STEPS = 64  # of one caller, within this time
logger = logging.getLogger(__name__)


class Engine:
    """Runs the requests of one model with continuous batching.

    New requests join the running batch between two decoder steps. `step` must always be called from
    the same thread; `submit`, `cancel`, `terminate` and the properties are thread-safe.
    The sink of each submitted request receives exactly one final event: Generated, Encoded,
    Failed or Cancelled.
    """

    def __init__(
        self,
        runner: Runner,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_batch_tokens: int = 1024,
        observer: EngineObserver | None = None,
        alone_s: float = ALONE_S,
    ) -> None:
        """Create an engine without requests.

        Args:
            clock: time in seconds; deadlines of requests refer to it.
            max_batch_tokens: maximum number of tokens in one encoder batch, padding included.
            alone_s: duration of decoder steps of a single row until `step` returns; 0 for one step.
        """
        self._runner = runner
        self._manifest = runner.manifest
        self._clock = clock
        self._observer = observer or EngineObserver()
        self._alone_s = alone_s
        self._ids = count()
        self._reserved_rows = runner.max_rows // ROWS_PER_RESERVED
        if self._manifest.is_decoder_only:
            max_batch_tokens = sys.maxsize  # prompts are computed one at a time, not in a padded batch
        self._scheduler = Scheduler(max_batch_tokens, self._reserved_rows)
        # Requests that wait or are being encoded, by id. A request is added to the next container
        # before it is removed from the previous one, so that no other thread misses it in a count.
        self._waiting: dict[int, ActiveRequest] = {}
        self._map_names: dict[str, Sequence[str]] = {maps.kind: maps.outputs for maps in self._manifest.attention}
        self._rows = Rows(runner)
        self._prefills = PrefillQueue()
        self._prefix_cache = PrefixCache(runner.num_prefix_blocks)
        self.throughput = Throughput()
        self._failures = GraphFailures(runner)
        # Other threads append to these queues without a lock: append and popleft are atomic.
        self._arrived: deque[ActiveRequest] = deque()
        self._cancelled: deque[ActiveRequest] = deque()
        self._is_terminated = False
        self._has_started = False  # the last call of `step` ended a prompt, and stepped no rows
        self._step_s = 0.0  # moving average of the duration of a step over all rows, with its extra steps
        self._token_s = 0.0  # the same for a token of an encoder batch, padding included

    @property
    def max_wait_s(self) -> float:
        """Longest time that other work should take before the next step of the running rows."""
        return WAIT_STEPS * max(ALONE_S, self._step_s) if len(self._rows) else math.inf

    @property
    def num_running(self) -> int:
        """Number of requests that have rows; a beam search counts once."""
        return self._rows.num_owners

    @property
    def num_rows_in_use(self) -> int:
        """Number of rows of decoder state that requests have."""
        return self._rows.first_free

    @property
    def num_prefix_blocks(self) -> int:
        """Number of blocks of the prefix cache."""
        return self._runner.num_prefix_blocks

    @property
    def num_prefix_blocks_in_use(self) -> int:
        """Number of blocks of the prefix cache that hold states."""
        return len(self._prefix_cache)

    @property
    def num_waiting(self) -> int:
        return len(self._arrived) + len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._arrived or self._waiting or self._rows.num_owners) and not self._is_terminated

    def submit(self, request: Request, sink: Sink) -> ActiveRequest:
        """Queue a request; one that the model cannot run fails without affecting others.

        `sink` is called with each event of the request, on the thread that calls `step`.
        """
        active = ActiveRequest(next(self._ids), request, sink, submitted=self._clock())
        self._arrived.append(active)
        return active

    def cancel(self, active: ActiveRequest) -> None:
        """Cancel a request: it leaves the queue or its rows at the start of the next `step`."""
        if not active.has_ended:
            self._cancelled.append(active)

    def step(self, limit_s: float = math.inf) -> None:
        """Run one iteration. Raises `RuntimeFailedError`.

        It drops cancelled and expired requests, encodes one batch or reads chunks of prompts, and
        steps all running rows. Small calls may get extra decoder steps, see `_run_extra_steps`.
        The batch takes about `limit_s` at most, but has at least one sequence. After the end of a
        prompt, the rows are stepped by the next call, so that the first token is delivered before.
        """
        self._accept_arrivals()
        self._drop_expired(self._clock())
        batch: list[ActiveRequest] = []
        if self._waiting:
            next_ids = self._scheduler.next_batch(self._rows.num_free, self._rows.counts(), self._tokens_in(limit_s))
            batch = [self._waiting[id_] for id_ in next_ids]
        if batch:
            self._run(batch, started=self._clock())
            for active in batch:
                del self._waiting[active.id]
        self._has_started = not self._has_started and self._read_prompts()
        num_rows = 0 if self._has_started else len(self._rows)
        if num_rows:
            started = self._clock()
            self._decode_all()
            self._run_extra_steps(self._clock() - started)
            self._step_s = _moved(self._step_s, self._clock() - started)
        self.throughput.on_turn(len(batch) + num_rows, self._clock(), is_saturated=len(self._scheduler) > 0)

    def terminate(self) -> None:
        """End the graph that runs: the requests of the step fail.

        The engine has no work from then on, although requests may still wait in it.
        """
        self._is_terminated = True
        self._runner.terminate()

    def release_memory(self) -> None:
        """Return unused memory to the system. Must only be called while there is no work."""
        try:
            self._runner.release_memory()
        except Exception:
            logger.exception("release of memory failed")

    # The queue

    def _accept_arrivals(self) -> None:
        # Read cancellations first: their requests were submitted earlier, so they arrive below.
        cancelled = [self._cancelled.popleft() for _ in range(len(self._cancelled))]
        for _ in range(len(self._arrived)):
            active = self._arrived[0]
            request = active.request
            rows = num_rows(request, self._manifest)
            if not self._fits(request, rows):
                logger.error("a use case submitted a request that does not fit the model")
                self._arrived.popleft()
                self._finish(active, Failed("internal"))
                continue
            num_tokens = len(request.source_ids)
            self._scheduler.add(WaitingSequence(active.id, call_of(request), num_tokens, rows, request.deadline))
            self._waiting[active.id] = active
            self._arrived.popleft()
        for active in cancelled:
            self._drop_cancelled(active)

    def _fits(self, request: Request, rows: int) -> bool:
        """Return False for a request that would affect others: it would wait in front of them for
        rows that do not exist, or write beyond its own.

        Use cases check the requests of clients. Any other mistake raises, and fails one request.
        """
        manifest, num_source_tokens = self._manifest, len(request.source_ids)
        fits = rows <= self._runner.max_rows and 0 < num_source_tokens <= manifest.limits.max_source_tokens
        if not isinstance(request, GenerateRequest):
            return fits
        num_new_tokens = 1 if rows > 1 else min(1, request.parameters.num_new_tokens)  # a beam search adds a token
        num_tokens = len(request.target_prefix) + num_new_tokens
        return fits and rows > 0 and 0 < num_tokens <= manifest.max_new_tokens_for(num_source_tokens)

    def _drop_cancelled(self, active: ActiveRequest) -> None:
        if active.has_ended:
            return
        if self._scheduler.remove(active.id):
            del self._waiting[active.id]
            self._finish(active, Cancelled())
        else:
            owner = self._rows.find(active)
            assert owner is not None, "an unfinished request must be waiting or running"
            self._end(owner, Cancelled())

    def _drop_expired(self, now: float) -> None:
        for id_ in self._scheduler.remove_expired(now):
            self._finish(self._waiting.pop(id_), Failed("deadline_exceeded"))
        for owner in self._rows.owners:
            if owner.request.deadline <= now:
                self._end(owner, Failed("deadline_exceeded"))

    # The encoder

    def _run(self, batch: Sequence[ActiveRequest], started: float) -> None:
        for active in batch:
            active.encode_started = started
        if self._manifest.is_decoder_only:
            for active in batch:
                self._admit_to_prefill(active)
        else:
            self._encode_batch(batch)

    def _tokens_in(self, seconds: float) -> float:
        """Return how many tokens of an encoder batch take this time; 0 until it is known."""
        if seconds == math.inf or self._manifest.is_decoder_only:  # a prompt waits for no others of a batch
            return math.inf
        return seconds / self._token_s if self._token_s else 0.0

    def _encode_batch(self, batch: Sequence[ActiveRequest]) -> None:
        """Encode a batch and admit its generations; if that fails, encode each request alone, so
        that one request cannot fail another.
        """
        started = self._clock()
        succeeded = self._try_to_encode(batch)
        if not succeeded and len(batch) > 1:
            alone = [self._try_to_encode([active]) for active in batch]
            succeeded = any(alone)
        if succeeded:
            self._failures.on_success("encoder")
            longest = max(len(active.request.source_ids) for active in batch)
            self._token_s = _moved(self._token_s, (self._clock() - started) / (len(batch) * longest))
        else:
            self._note_failure("encoder", batch[0])

    def _try_to_encode(self, batch: Sequence[ActiveRequest]) -> bool:
        """Encode a batch; return False on failure. A single request then fails."""
        try:
            encoded = self._run_encoder(batch)
            now = self._clock()
            for active in batch:
                active.encode_ended = now
            num_tokens = [len(active.request.source_ids) for active in batch]
            non_finite = find_non_finite(self._manifest.states, encoded, num_tokens)
            newcomers = self._start_generations(batch, encoded, non_finite)
            if newcomers:
                self._rows.admit(newcomers, encoded)
        except Exception:
            logger.exception("the encoder failed on a batch of %d requests", len(batch))
            if len(batch) == 1:
                self._finish(batch[0], Failed("internal"))
            return False
        for index, active in enumerate(batch):
            if isinstance(active.request, EncodeRequest):
                self._deliver_encoded(active, active.request, encoded, index)
            elif index in non_finite:
                self._fail_not_finite(active)
        return True

    def _run_encoder(self, batch: Sequence[ActiveRequest]) -> Mapping[str, Array]:
        lengths = np.array([len(active.request.source_ids) for active in batch], np.int32)  # (B,)
        ids = np.full((len(batch), lengths.max()), self._manifest.tokens.pad_id, np.int64)  # (B, S)
        for row, active in enumerate(batch):
            ids[row, : lengths[row]] = active.request.source_ids
        started = self._clock()
        requests = [active.request for active in batch]
        encoded = self._runner.run_encoder(ids, lengths, encoder_outputs(self._manifest, requests))
        self._notify(self._observer.on_encode, len(batch), int(lengths.sum()), ids.size, self._clock() - started)
        return encoded

    def _start_generations(
        self, batch: Sequence[ActiveRequest], encoded: Mapping[str, Array], non_finite: Container[int]
    ) -> list[tuple[Generation, int]]:
        """Create the generations of a batch, with their indices, except `non_finite` ones."""
        started: list[tuple[Generation, int]] = []
        for index, active in enumerate(batch):
            request = active.request
            if isinstance(request, GenerateRequest) and index not in non_finite:
                maps = encoder_maps(self._manifest, encoded, index, request)
                started.append((self._new_generation(active, request, maps), index))
        return started

    def _new_generation(self, active: ActiveRequest, request: GenerateRequest, maps: Mapping[str, Maps]) -> Generation:
        kind = BeamGeneration if request.parameters.num_beams > 1 else SingleGeneration
        return kind(active, request, self._manifest, maps)

    def _deliver_encoded(
        self, active: ActiveRequest, request: EncodeRequest, encoded: Mapping[str, Array], index: int
    ) -> None:
        # Copy: a view would keep the results of the whole batch in memory.
        hidden = encoded["hidden"][index, : len(request.source_ids)].astype(np.float32)
        try:
            labels = label_scores(self._manifest, request, encoded, index)
            predictions, largest = predict(self._runner, request, hidden)
        except Exception:
            logger.exception("the labels or predicted tokens of a request failed")
            self._finish(active, Failed("internal"))
            return
        if request.predicted or request.return_largest:
            active.encode_ended = self._clock()
        results = (hidden, labels, predictions, largest)
        if all(array is None or np.isfinite(array).all() for array in results):
            maps = encoder_maps(self._manifest, encoded, index, request)
            timings = active.timings(active.encode_ended)
            self._finish(active, Encoded(hidden, timings, labels, maps, predictions, largest))
        else:
            self._fail_not_finite(active)

    def _fail_not_finite(self, active: ActiveRequest) -> None:
        logger.error("the encoder returned values that are not finite")
        self._finish(active, Failed("internal"))

    # Prompts of decoder-only models

    def _admit_to_prefill(self, active: ActiveRequest) -> None:
        """Assign rows to a request, and add its prompt to those that are being read."""
        request = active.request
        owner: Generation | PromptEncoding
        try:
            if isinstance(request, GenerateRequest):
                owner = self._new_generation(active, request, {})
            else:
                owner = PromptEncoding(active, request)
        except Exception:
            logger.exception("a generation could not be started")
            self._finish(active, Failed("internal"))
            return
        self._rows.admit_to_prefill(owner)
        self._prefills.add(owner)

    def _read_prompts(self) -> bool:
        """Read one chunk of a prompt, and more as long as they fit `prefill.BUDGET_S`.

        Returns True if generations have started.
        """
        num_rows = len(self._rows)
        first = started = self._clock()
        while len(self._prefills):
            self._read_chunk(self._prefills.next())
            ended = self._clock()
            if (ended - first) + (ended - started) > BUDGET_S:  # the next chunk takes about as long as this one
                break
            started = ended
        return len(self._rows) > num_rows

    def _read_chunk(self, prefill: Prefill) -> None:
        """Read the next chunk of a prompt. At its end, start the requests that wait for it.

        Blocks that the prefix cache has are read first, without a run of the graph. If the run
        fails, these requests fail: all of them have the same prompt.
        """
        started = self._clock()
        if not prefill.num_read:
            for owner in prefill.owners:
                owner.active_request.encode_started = started
        if self._may_reuse_states(prefill):
            self._read_cached_blocks(prefill)
        outputs = self._run_prefill(prefill, started)
        if outputs is not None and prefill.is_done:
            self._prefills.remove(prefill)
            self._on_prompt_read(prefill, outputs, self._clock())

    def _may_reuse_states(self, prefill: Prefill) -> bool:
        return self._prefix_cache.is_enabled and not prefill.needs_outputs

    def _read_cached_blocks(self, prefill: Prefill) -> None:
        """Copy states of the next blocks of a prompt from the prefix cache until one is missing.

        This is tried before each chunk, not only once: another prompt with the same beginning may
        be read at the same time. Each of their blocks is then computed once. Two tokens remain for
        the last chunk, which returns the scores of the first new token.
        """
        while len(prefill.ids) - prefill.num_read >= BLOCK_TOKENS + 2:
            key = prefill.next_key()
            block = self._prefix_cache.find(key)
            if block is None:
                break
            self._rows.load_prefix(prefill.row, block)
            prefill.keys.append(key)
            prefill.num_read += BLOCK_TOKENS
            prefill.num_cached += BLOCK_TOKENS

    def _run_prefill(self, prefill: Prefill, started: float) -> Mapping[str, Array] | None:
        """Run the graph for the next chunk of a prompt; return None if its requests failed."""
        chunk = prefill.next_chunk()
        try:
            outputs = self._rows.prefill(prefill.row, chunk, self._prefill_outputs(prefill, len(chunk)))
        except FloatingPointError:
            self._failures.on_success("prefill")
            logger.error("the decoder returned values that are not finite for a prompt")
            self._end_all(prefill, Failed("internal"))
            return None
        except Exception:
            logger.exception("the decoder failed on a prompt")
            active = prefill.owners[0].active_request
            self._end_all(prefill, Failed("internal"))
            self._note_failure("prefill", active)
            return None
        self._failures.on_success("prefill")
        prefill.num_read += len(chunk)
        if self._prefix_cache.is_enabled:
            self._keep_blocks(prefill)
        prefill.seconds += self._clock() - started
        if prefill.is_encoding:
            prefill.hidden.append(outputs["hidden"])
        if prefill.records_maps:
            prefill.maps.append(prompt_block(self._map_names["decoder"], outputs, prefill.num_read, prefill.map_part))
        return outputs

    def _keep_blocks(self, prefill: Prefill) -> None:
        """Copy the states of full blocks that have been computed to the prefix cache."""
        while (first := BLOCK_TOKENS * len(prefill.keys)) + BLOCK_TOKENS <= prefill.num_read:
            key = prefill.next_key()
            # A prompt whose outputs are needed is computed even if its states are known.
            if self._prefix_cache.find(key) is None:
                block = self._prefix_cache.assign(key, prefill.keys)
                if block is not None:
                    self._runner.store_prefix(prefill.row, first, block)
            prefill.keys.append(key)

    def _prefill_outputs(self, prefill: Prefill, num_tokens: int) -> Sequence[str]:
        """Return the decoder outputs that the requests of a prompt need from its next chunk."""
        if prefill.is_encoding:
            return ("hidden",)
        names = set(self._map_names["decoder"]) if prefill.records_maps else set[str]()
        if prefill.num_read + num_tokens == len(prefill.ids):
            names |= TOP_OUTPUTS.union(*(owner.outputs for owner in prefill.owners if isinstance(owner, Generation)))
        return tuple(name for name in self._manifest.decoder_graph.outputs if name in names)

    def _on_prompt_read(self, prefill: Prefill, outputs: Mapping[str, Array], now: float) -> None:
        """Start the generations whose prompt has been computed, or deliver its hidden states."""
        num_tokens = len(prefill.ids)
        self._notify(self._observer.on_encode, len(prefill.owners), num_tokens, num_tokens, prefill.seconds)
        self._prefix_cache.touch(prefill.keys)
        if self._may_reuse_states(prefill):
            self._notify(self._observer.on_prefix_query, num_tokens, prefill.num_cached)
        generations = [owner for owner in prefill.owners if isinstance(owner, Generation)]
        if generations:
            for generation in generations:
                generation.num_cached_tokens = prefill.num_cached
                generation.set_prompt_maps(prefill.maps)
            self._start(generations, outputs, now)
            return
        (encoding,) = prefill.owners
        encoding.active_request.encode_ended = now
        joined = np.concatenate(prefill.hidden).astype(np.float32)
        if np.isfinite(joined).all():
            self._end(encoding, Encoded(joined, encoding.active_request.timings(now)))
        else:
            logger.error("the decoder returned values that are not finite for a prompt")
            self._end(encoding, Failed("internal"))

    def _start(self, generations: Sequence[Generation], outputs: Mapping[str, Array], now: float) -> None:
        """Start generations whose common prompt has been computed, with the outputs of its last
        chunk: its last token is their first step.
        """
        for generation in generations:
            generation.active_request.encode_ended = now
        rows = self._rows.start(generations)
        step: dict[str, Array] = {}
        for name, array in outputs.items():
            of_last = array[:, :, -1].copy() if array.ndim > 1 else array  # maps, without those of other tokens
            step[name] = np.broadcast_to(of_last, (len(rows), *of_last.shape))
        if self._rows.recording:
            self._rows.log_maps(rows, step)
        self._advance_all(rows, step, now)

    def _end_all(self, prefill: Prefill, event: Event) -> None:
        for owner in reversed(prefill.owners[:]):
            self._end(owner, event)

    # The decoder

    def _decode_all(self) -> None:
        """Step all rows. If every row fails, fail all generations."""
        if self._decode(range(len(self._rows))):
            self._failures.on_success("decoder")
            return
        generations = list(self._rows)
        for generation in generations:
            self._end(generation, Failed("internal"))
        self._note_failure("decoder", generations[0].active_request)

    def _run_extra_steps(self, seconds: float) -> None:
        """Run extra decoder steps for one row while callers, or calls, with several are running.

        A step over one row takes a fraction of the time of a step over all rows. The extra steps
        keep the latency of a small call close to its latency on an idle service. They are for
        callers that have one row, or if there are none, for calls that have one. Callers with one
        row get a time in proportion to the `seconds` of the step over all rows (docs/adr/0013).
        Without callers, the number of extra steps is proportional to that of running rows. Both are
        divided among the small calls. The next step over all rows repeats one that fails.
        """
        if len(self._rows) <= 1:
            return
        counts = self._rows.counts()
        small: list[Generation] = []
        if max(counts.of_share.values()) > 1:
            small = [generation for generation in self._rows if counts.of_share[share_of(generation.call)] == 1]
        are_callers = bool(small) and bool(small[0].call[0])
        if not small and max(counts.of_call.values()) > 1:
            small = [generation for generation in self._rows if counts.of_call[generation.call] == 1]
        del small[self._reserved_rows :]
        num_steps = EXTRA_STEPS * max(1, len(self._rows) // ROWS_PER_RESERVED)
        for generation in small:
            ends = self._clock() + CALLER_TIME * seconds / len(small)
            for _ in range(MAX_EXTRA_STEPS if are_callers else num_steps // len(small)):
                row = generation.rows[0]
                if not self._decode(range(row, row + 1)) or generation.active_request.has_ended:
                    break
                if are_callers and self._clock() >= ends:
                    break

    def _decode(self, rows: range) -> bool:
        """Run one decoder step for the rows of some generations and process its results.

        The only row of an otherwise idle engine gets further steps, see `_take_best`. Returns False
        if the step failed for every row. It has then changed nothing and can be repeated.
        """
        first = started = self._clock()
        while True:
            outputs = self._step(rows)
            if outputs is None:
                return False
            now = self._clock()
            self._notify(self._observer.on_step, len(rows), now - started)
            if self._rows.recording:
                self._rows.log_maps(rows, outputs)
            if now - first >= self._alone_s or not self._take_best(outputs):
                break
            started = now
        self._advance_all(rows, outputs, now)
        return True

    def _advance_all(self, rows: range, outputs: Mapping[str, Array], now: float) -> None:
        """Process the outputs of a step for the generations that have these rows."""
        generations = self._rows.generations_of(rows)
        num_skipping = self._rows.first_free - len(self._rows) if len(rows) == len(self._rows) else 0
        scores = StepScores(outputs, rows.start, num_skipping)
        beam_copies: BeamCopies = []
        events = [(generation, self._advance(generation, scores, beam_copies, now)) for generation in generations]
        self._rows.advance(rows, scores.next_ids, beam_copies)
        for generation, event in events:
            if event is not None:
                self._end(generation, event)

    def _take_best(self, outputs: Mapping[str, Array]) -> bool:
        """Take the most probable token of the only row if nothing else is to do.

        This is a faster form of what `_decode` does after a step. It returns False and changes
        nothing if there are several rows, if requests wait, or if the generation needs more.
        """
        if self._rows.first_free > 1 or self._arrived or self._cancelled or self._waiting:
            return False
        token_id = int(outputs["top_ids"][0, 0])
        if not next(iter(self._rows)).take_best(token_id, float(outputs["top_logprobs"][0, 0])):
            return False
        self._rows.advance_first(token_id)
        return True

    def _step(self, rows: range) -> Mapping[str, Array] | None:
        """Run the decoder for some rows; if that fails, for each row alone, so that one request
        cannot fail another.
        """
        try:
            return self._rows.step(rows)
        except Exception:
            logger.exception("a decoder step failed for %d rows", len(rows))
        return self._rows.step_each(rows) if len(rows) > 1 else None

    def _advance(self, generation: Generation, scores: StepScores, beam_copies: BeamCopies, now: float) -> Event | None:
        """Process a step's scores for one generation. Return its final event if it ends."""
        active = generation.active_request
        map_error = generation.map_error
        if map_error is not None:
            return Failed(map_error)
        try:
            targets = generation.advance(scores, beam_copies)
            token = generation.new_token if generation.request.stream else None
            if targets:
                if generation.records_maps:
                    self._rows.record(generation)
                generation.charge_targets(targets)
                if generation.request.contributions is not None:
                    targets = with_contributions(self._runner, generation.request, targets)
                    now = self._clock()
        except NonFiniteError:
            logger.error("the decoder returned values that are not finite")
            return Failed("internal")
        except Exception:
            logger.exception("a generation failed")
            return Failed("internal")
        if token is not None:
            self._notify(active.sink, TokenEvent(token))
        if not targets:
            return None
        if generation.request.parameters.num_new_tokens:
            num_prefix = len(generation.request.target_prefix)
            self.throughput.on_generated(max(len(target.tokens) for target in targets) - num_prefix)
        return Generated(targets, active.timings(now), generation.num_cached_tokens)

    def _note_failure(self, graph: GraphName, active: ActiveRequest) -> None:
        """Count a failed run of a graph, whose requests have no rows any more."""
        if not self._is_terminated:
            self._failures.add(graph, active.request.request_id, self._rows.first_free)

    # Final events

    def _end(self, owner: RowOwner, event: Event) -> None:
        prefill = self._prefills.find(owner)
        if prefill is not None:
            self._remove_from_prefill(owner, prefill)
        self._rows.release(owner)
        self._finish(owner.active_request, event)

    def _remove_from_prefill(self, owner: RowOwner, prefill: Prefill) -> None:
        is_first = owner is prefill.owners[0]
        prefill.owners.remove(owner)
        if not prefill.owners:
            self._prefills.remove(prefill)
        elif is_first:  # the next request goes on with the row that has been written
            self._rows.hand_over(owner, prefill.owners[0])

    def _finish(self, active: ActiveRequest, event: Event) -> None:
        assert not active.has_ended, "a request must end only once"
        active.has_ended = True
        self._scheduler.on_end(active.id)
        if event == Failed("internal"):  # links the request id to the error in the previous log line
            logger.error("a request failed", extra={"fields": {"request_id": active.request.request_id}})
        self._notify(active.sink, event)
        self._notify(self._observer.on_finish, active.request, event)

    @staticmethod
    def _notify(listener: Callable[..., Any], *arguments: Any) -> None:
        """Call a listener; its exceptions must not affect any request."""
        try:
            listener(*arguments)
        except Exception:
            logger.exception("a listener of the engine failed")


def _moved(average: float, newest: float) -> float:
    """Return a moving average with its next value, which is the first one if there is none."""
    return average + NEWEST_SHARE * (newest - average) if average else newest
