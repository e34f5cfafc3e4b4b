"""The rows of the running batch.

A row is one position along the batch axis of the decoder graph: a slot for one hypothesis. Greedy
decoding, sampling and scoring use one row for each generation, beam search uses one row for each
beam. Row i of every input array and of every state tensor belongs to the same hypothesis. The
running rows are always 0 to n - 1 without gaps: the last row is moved into one that becomes free.

The rows after them belong to requests of decoder-only models whose prompts are still being read
(prefill). They are not stepped.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from sightline.base.bundle import TOP_OUTPUTS, VOCABULARY_OUTPUTS, Manifest
from sightline.service.engine.generation import ActiveRequest, BeamCopies, Generation, RowOwner
from sightline.service.engine.recorded_maps import StepLog
from sightline.service.engine.request import GenerateRequest, Request
from sightline.service.engine.scheduler import RowCounts
from sightline.service.runtime.runner import BLOCK_TOKENS, Array, Int32, Int64, Runner

logger = logging.getLogger(__name__)


def num_rows(request: Request, manifest: Manifest) -> int:
    if isinstance(request, GenerateRequest):
        return request.parameters.num_beams
    return int(manifest.is_decoder_only)


class Rows:
    """Assigns rows of the runner's state to requests, and keeps the inputs of the next step."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._owners: list[RowOwner] = []  # by row: running rows, then rows in prefill
        # In the order of their admission:
        self._running: dict[Generation, None] = {}
        self._in_prefill: dict[RowOwner, None] = {}
        self._num_running = 0  # number of running rows
        self._token_ids = np.zeros(runner.max_rows, np.int64)  # next input token of each row
        self._lengths = np.zeros(runner.max_rows, np.int32)  # number of tokens that each row has processed
        self._source_lengths = np.zeros(runner.max_rows, np.int32)  # without hidden source tokens
        self._whole = np.zeros(runner.max_rows, np.bool_)  # rows that need scores of the whole vocabulary
        self.recording: list[Generation] = []  # running generations that record attention maps
        self._recording_now: list[Generation] = []  # those of them that cannot wait
        self._log = StepLog({maps.kind: maps.outputs for maps in runner.manifest.attention})
        self._outputs: tuple[str, ...] = ()  # outputs of the next step that the generations need

    def __len__(self) -> int:
        """Number of running rows."""
        return self._num_running

    def __iter__(self) -> Iterator[Generation]:
        """Iterate over the running generations."""
        return iter(self._running)

    @property
    def owners(self) -> list[RowOwner]:
        """All requests that have rows, running or in prefill."""
        return [*self._running, *self._in_prefill]

    def generations_of(self, rows: range) -> list[Generation]:
        return list(dict.fromkeys(cast(Sequence[Generation], self._owners[rows.start : rows.stop])))

    @property
    def num_owners(self) -> int:
        return len(self._running) + len(self._in_prefill)

    @property
    def first_free(self) -> int:
        """Index of the first row without an owner."""
        return len(self._owners)

    @property
    def num_free(self) -> int:
        return self._runner.max_rows - len(self._owners)

    def counts(self) -> RowCounts:
        """Return the number of rows of each caller and each call."""
        counts = RowCounts()
        for owner in self.owners:
            counts.add(owner.call, len(owner.rows))
        return counts

    def find(self, active: ActiveRequest) -> RowOwner | None:
        return next((owner for owner in self.owners if owner.active_request is active), None)

    def admit(self, newcomers: Sequence[tuple[Generation, int]], encoded: Mapping[str, Array]) -> None:
        """Assign rows to new generations and initialize the states of these rows.

        Each generation has its index in the encoder's batch. If the decoder has several start
        tokens, the rows read all but the last.
        """
        first = len(self._owners)
        # The first step of a search may need one row only. Its other rows come last and join later.
        owners = [newcomer for newcomer in newcomers for _ in range(newcomer[0].num_first_rows)]
        num_first = len(owners)
        for newcomer in newcomers:
            generation, _ = newcomer
            num_others = num_rows(generation.request, self._runner.manifest) - generation.num_first_rows
            owners += [newcomer] * num_others
        rows = slice(first, first + len(owners))
        visible = {
            index: new.request.visible_source_tokens for new, index in newcomers if new.request.hidden_source_tokens
        }
        self._runner.init_rows(first, encoded, [index for _, index in owners], visible)
        self._source_lengths[rows] = [generation.request.num_visible_source_tokens for generation, _ in owners]
        *start_ids, last_id = self._runner.manifest.tokens.start_ids
        for length, token_id in enumerate(start_ids):
            self._token_ids[rows], self._lengths[rows] = token_id, length
            self._runner.step(*self._inputs(range(rows.start, rows.stop)), sorted(TOP_OUTPUTS), first=first)
        self._token_ids[rows], self._lengths[rows] = last_id, len(start_ids)
        for row, (generation, _) in enumerate(owners, first):
            generation.rows.append(row)
            self._owners.append(generation)
            self._whole[row] = generation.needs_vocabulary
        for generation, _ in newcomers:
            self._running[generation], generation.num_logged = None, len(self._log)
        self._num_running = first + num_first
        self._choose_outputs()

    def admit_to_prefill(self, owner: RowOwner) -> None:
        """Assign rows to a request of a decoder-only model. They are not stepped before `start`."""
        for _ in range(num_rows(owner.request, self._runner.manifest)):
            row = len(self._owners)
            owner.rows.append(row)
            self._owners.append(owner)
            self._lengths[row] = 0
            self._source_lengths[row] = len(owner.request.source_ids)
        self._in_prefill[owner] = None

    def prefill(self, row: int, token_ids: Int64, outputs: Sequence[str]) -> Mapping[str, Array]:
        """Read the next tokens of a prompt in a row. If that raises, it can be repeated."""
        length = self._num_read(row)
        arrays = self._runner.prefill(row, token_ids, length, outputs)
        self._lengths[row] += len(token_ids)
        return arrays

    def load_prefix(self, row: int, block: int) -> None:
        """Copy a block of the prefix cache to a row, as if the row had read its tokens."""
        self._runner.load_prefix(block, row, self._num_read(row))
        self._lengths[row] += BLOCK_TOKENS

    def _num_read(self, row: int) -> int:
        """Return the number of tokens that a row in prefill has read; initialize it if 0."""
        length = int(self._lengths[row])
        if not length:
            self._runner.init_rows(row, {}, [0])
        return length

    def start(self, generations: Sequence[Generation]) -> range:
        """Add generations with the same prompt to the running ones, and return their rows.

        The prompt has been read in the first row of the first generation. Its states are copied to
        the other rows. `advance` must follow, as after a step that reads the last token.
        """
        first_row = self._num_running
        for generation in generations:
            for index in range(len(generation.rows)):
                self._exchange(generation.rows[index], self._num_running)
                self._num_running += 1
            del self._in_prefill[generation]
            self._running[generation], generation.num_logged = None, len(self._log)
        rows = range(first_row, self._num_running)
        num_read = len(generations[0].prefill_ids)
        self._lengths[rows.start : rows.stop] = num_read - 1
        others = rows[1:]
        if others:
            self._runner.fork([first_row] * len(others), others, [slice(num_read)] * len(others))
        self._choose_outputs()
        return rows

    def hand_over(self, owner: RowOwner, successor: RowOwner) -> None:
        """Exchange the first rows of two requests in prefill, without their states."""
        first, second = owner.rows[0], successor.rows[0]
        owner.rows[0], successor.rows[0] = second, first
        self._owners[first], self._owners[second] = successor, owner

    def release(self, owner: RowOwner) -> None:
        """Free the rows of a request, and move other rows into them so that no gap remains."""
        self._step_all_rows()
        for row in sorted(owner.rows, reverse=True):
            if row < self._num_running:
                self._num_running -= 1
                self._move(self._num_running, row)
                row = self._num_running
            self._move(len(self._owners) - 1, row)
            del self._owners[-1]
        if owner in self._in_prefill:
            del self._in_prefill[owner]
        else:
            del self._running[cast(Generation, owner)]
            self._choose_outputs()

    def _move(self, source: int, target: int) -> None:
        """Move a row to a row that has become free."""
        if source == target:
            return
        self._runner.move(source, target, int(self._lengths[source]), int(self._source_lengths[source]))
        for column in (self._token_ids, self._lengths, self._source_lengths, self._whole):
            column[target] = column[source]
        owner = self._owners[target] = self._owners[source]
        if owner in self.recording:  # not a request in prefill, whose row others had before
            self.record(owner)
        owner.rows[owner.rows.index(source)] = target

    def log_maps(self, rows: range, outputs: Mapping[str, Array]) -> None:
        """Keep the maps of a step for the generations that record them."""
        is_full = self._log.append(rows, outputs)
        for generation in self.recording if is_full else self._recording_now:
            if generation.rows[0] in rows:
                generation.charge_step()
            self.record(generation)
        if is_full:
            self._log.clear()
            for generation in self.recording:
                generation.num_logged = 0

    def record(self, generation: Generation) -> None:
        """Move the logged maps of a generation to its recorders."""
        for row, hypothesis in zip(generation.rows, generation.hypotheses(), strict=False):
            hypothesis.maps.extend(self._log, row, generation.num_logged)
        generation.num_logged = len(self._log)

    def _exchange(self, first: int, second: int) -> None:
        """Exchange two rows in prefill. States of a row that has read nothing are not copied."""
        if first == second:
            return
        read = int(self._lengths[first]), int(self._lengths[second])
        if all(read):
            self._runner.swap(first, second, max(read))
        elif read[0]:
            self._runner.move(first, second, read[0], int(self._source_lengths[first]))
        elif read[1]:
            self._runner.move(second, first, read[1], int(self._source_lengths[second]))
        for column in (self._lengths, self._source_lengths):
            column[[first, second]] = column[[second, first]]
        owners = self._owners[first], self._owners[second]
        indices = owners[0].rows.index(first), owners[1].rows.index(second)
        owners[0].rows[indices[0]], owners[1].rows[indices[1]] = second, first
        self._owners[first], self._owners[second] = owners[1], owners[0]

    def _choose_outputs(self) -> None:
        ended, self.recording = self.recording, [one for one in self._running if one.records_maps]
        self._recording_now = [generation for generation in self.recording if not generation.may_record_later]
        if ended and not self.recording:
            self._log.clear()
        requested = TOP_OUTPUTS.union(*(generation.outputs for generation in self._running))
        self._outputs = tuple(name for name in self._runner.manifest.decoder_graph.outputs if name in requested)

    def step(self, rows: range) -> Mapping[str, Array]:
        """Run one decoder step for some rows. `advance` must follow, with the next tokens.

        A step that raises can be repeated for all or some of its rows, see `Runner.step`.
        """
        whole, outputs = self._whole[rows.start : rows.stop], self._outputs
        if not (self._runner.manifest.is_decoder_only or whole.any()):
            outputs = tuple(name for name in outputs if name not in VOCABULARY_OUTPUTS)
        return self._runner.step(*self._inputs(rows), outputs, first=rows.start, whole=whole)

    def step_each(self, rows: range) -> Mapping[str, Array] | None:
        """Run one decoder step for each row alone, after `step` has failed for all of them.

        Returns outputs as from `step`, with NaN for rows that fail; None if all fail.
        """
        by_index: dict[int, Mapping[str, Array]] = {}
        for index, row in enumerate(rows):
            try:
                outputs = self.step(range(row, row + 1))
            except Exception:
                logger.exception("a decoder step failed for one row")
            else:
                # Copies, because the next run overwrites the arrays.
                by_index[index] = {name: array.copy() for name, array in outputs.items()}
        if not by_index:
            return None
        parts: dict[str, dict[int, Array]] = {}
        for index, outputs in by_index.items():
            for name, array in outputs.items():
                parts.setdefault(name, {})[index] = array
        return {name: _join(arrays, len(rows)) for name, arrays in parts.items()}

    def _inputs(self, rows: range) -> tuple[Int64, Int32, Int32]:
        part = slice(rows.start, rows.stop)
        return self._token_ids[part], self._lengths[part], self._source_lengths[part]

    def advance_first(self, token_id: int) -> None:
        """Advance the first row with its next input token."""
        self._token_ids[0] = token_id
        self._lengths[0] += 1

    def advance(self, rows: range, token_ids: Int64, beam_copies: BeamCopies) -> None:
        """Set the next input tokens of the rows of the last step, and of rows after them.

        `beam_copies`, made after the step, are between rows of one generation. No row may be both a
        source and a target.
        """
        self._token_ids[rows.start : rows.start + len(token_ids)] = token_ids
        self._lengths[rows.start : rows.stop] += 1
        if beam_copies:
            sources, targets, positions = map(list, zip(*beam_copies, strict=True))
            self._runner.fork(sources, targets, positions)
            self._lengths[targets] = self._lengths[sources]  # a target may have skipped the step
        self._step_all_rows()

    def _step_all_rows(self) -> None:
        """Include rows that were to skip a step. A decoder-only model has none."""
        if not self._runner.manifest.is_decoder_only:
            self._num_running = len(self._owners)


def _join(parts: Mapping[int, Array], count: int) -> Array:
    """Concatenate outputs (1, ...) of rows, padded to the largest sizes; missing rows are NaN."""
    some = next(iter(parts.values()))
    widest = np.max([part.shape[1:] for part in parts.values()], axis=0)
    joined = np.zeros((count, *widest), some.dtype)
    for row in range(count):
        if row in parts:
            part: tuple[Any, ...] = (row, *map(slice, parts[row].shape[1:]))
            joined[part] = parts[row][0]
        elif np.issubdtype(some.dtype, np.floating):
            joined[row] = np.nan
    return joined
