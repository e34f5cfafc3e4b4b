"""The rows of the running batch.

A row is one position along the batch axis of the decoder graph: a slot for one hypothesis. Greedy
decoding, sampling and scoring use one row for each generation, beam search uses one row for each
beam. Row i of every input array and of every state tensor belongs to the same hypothesis. The
running rows are always 0 to n - 1 without gaps: when a row becomes free, the last row is moved into
it.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.engine.generation import ActiveRequest, BeamCopies, Generation
from service.engine.request import GenerateRequest
from service.engine.scores import TOP_OUTPUTS
from service.runtime.protocol import Int32, Int64, Runner

Array = NDArray[Any]
logger = logging.getLogger(__name__)


def num_rows(request: GenerateRequest) -> int:
    """Return the number of rows that a request needs."""
    return request.parameters.num_beams


class Rows:
    """Assigns rows of the runner's state to generations, and keeps the inputs of the next step."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._owners: list[Generation] = []  # by row
        self._generations: dict[Generation, None] = {}  # in the order of their admission
        self._token_ids = np.zeros(runner.max_rows, np.int64)  # next input token of each row
        self._lengths = np.zeros(runner.max_rows, np.int32)  # number of tokens that each row has processed
        self._source_lengths = np.zeros(runner.max_rows, np.int32)
        self._outputs: tuple[str, ...] = ()  # outputs of the next step that the generations need

    def __len__(self) -> int:
        return len(self._owners)

    @property
    def generations(self) -> list[Generation]:
        return list(self._generations)

    def generations_of(self, rows: range) -> list[Generation]:
        return list(dict.fromkeys(self._owners[rows.start : rows.stop]))

    @property
    def num_generations(self) -> int:
        return len(self._generations)

    @property
    def num_free(self) -> int:
        return self._runner.max_rows - len(self._owners)

    def rows_by_call(self) -> dict[str, int]:
        """Return the number of rows of each call."""
        return Counter(owner.request.request_id for owner in self._owners)

    def find(self, active: ActiveRequest) -> Generation | None:
        return next((one for one in self._generations if one.active_request is active), None)

    def admit(self, newcomers: Sequence[tuple[Generation, int]], encoded: Mapping[str, Array]) -> None:
        """Assign rows to new generations and initialize the states of these rows.

        Args:
            newcomers: generations, each with its index in the encoder's batch.
            encoded: outputs of the encoder.
        """
        first = len(self._owners)
        owners = [(one, index) for one, index in newcomers for _ in range(num_rows(one.request))]
        rows = slice(first, first + len(owners))
        self._runner.init_rows(first, encoded, [index for _, index in owners])
        self._token_ids[rows] = [one.decoder_prompt_ids[-1] for one, _ in owners]
        self._lengths[rows] = [len(one.decoder_prompt_ids) - 1 for one, _ in owners]
        self._source_lengths[rows] = [len(one.request.source_ids) for one, _ in owners]
        for row, (generation, _) in enumerate(owners, first):
            generation.rows.append(row)
            self._owners.append(generation)
        self._generations.update((one, None) for one, _ in newcomers)
        self._choose_outputs()

    def release(self, generation: Generation) -> None:
        """Free the rows of a generation, and move the last running rows into them."""
        for row in sorted(generation.rows, reverse=True):
            last = len(self._owners) - 1
            if row != last:
                self._move(last, row)
            del self._owners[last]
        del self._generations[generation]
        self._choose_outputs()

    def _move(self, source: int, target: int) -> None:
        self._runner.move(source, target, int(self._lengths[source]), int(self._source_lengths[source]))
        for column in (self._token_ids, self._lengths, self._source_lengths):
            column[target] = column[source]
        owner = self._owners[target] = self._owners[source]
        owner.rows[owner.rows.index(source)] = target

    def _choose_outputs(self) -> None:
        requested = TOP_OUTPUTS.union(*(generation.outputs for generation in self._generations))
        self._outputs = tuple(name for name in self._runner.manifest.decoder_graph.outputs if name in requested)

    def step(self, rows: range) -> Mapping[str, Array]:
        """Run one decoder step for some rows. `advance` must follow, with the next tokens.

        A step that raises can be repeated for all or some of its rows, see `Runner.step`.
        """
        return self._runner.step(*self._inputs(rows), self._outputs, first=rows.start)

    def step_each(self, rows: range) -> Mapping[str, Array] | None:
        """Run one decoder step for each row alone, after `step` has failed for all of them.

        Returns:
            The outputs of all rows, as `step` returns them, with NaN for rows that fail. None if
            every row fails.
        """
        by_index: dict[int, Mapping[str, Array]] = {}
        for index, row in enumerate(rows):
            try:
                outputs = self.step(range(row, row + 1))
            except Exception:
                logger.exception("a decoder step failed for one row")
            else:
                by_index[index] = {
                    name: array.copy() for name, array in outputs.items()
                }  # the next run overwrites them
        if not by_index:
            return None
        parts = {name: {index: outputs[name] for index, outputs in by_index.items()} for name in self._outputs}
        return {name: _join(arrays, len(rows)) for name, arrays in parts.items()}

    def _inputs(self, rows: range) -> tuple[Int64, Int32, Int32]:
        part = slice(rows.start, rows.stop)
        return self._token_ids[part], self._lengths[part], self._source_lengths[part]

    def advance(self, rows: range, token_ids: NDArray[np.int64], beam_copies: BeamCopies) -> None:
        """Set the next input tokens of the rows of the last step.

        Args:
            rows: rows of the step.
            token_ids: (B,), next token of each row.
            beam_copies: rows whose state is copied to other rows of the same generation. No row may
                be both a source and a target.
        """
        part = slice(rows.start, rows.stop)
        self._token_ids[part] = token_ids
        self._lengths[part] += 1
        if beam_copies:
            sources, targets = map(list, zip(*beam_copies, strict=True))
            self._runner.fork(sources, targets, int(self._lengths[sources].max()))

    def __iter__(self) -> Iterator[Generation]:
        return iter(self._generations)


def _join(parts: Mapping[int, Array], count: int) -> Array:
    """Concatenate outputs of single rows, padded to the largest size of each axis.

    Args:
        parts: outputs (1, ...) by index of the row.
        count: number of rows of the result; missing rows are NaN.
    """
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
