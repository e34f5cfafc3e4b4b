"""The running rows: 0 to n-1 without a gap, their input arrays and their decoder state moving as one."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.engine.generation import Generation, Handle, Moves
from service.engine.request import GenerateRequest
from service.engine.scores import ALWAYS
from service.runtime.protocol import Int32, Int64, Runner

Array = NDArray[Any]
logger = logging.getLogger(__name__)


def num_rows(request: GenerateRequest) -> int:
    """How many rows a request runs in."""
    return request.parameters.num_beams


class Rows:
    """Generations in rows of the runner's state."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._owners: list[Generation] = []  # by row
        self._generations: dict[Generation, None] = {}  # in the order of their admission
        self._token_ids = np.zeros(runner.max_rows, np.int64)  # what each row reads next
        self._lengths = np.zeros(runner.max_rows, np.int32)  # how many tokens each row has read
        self._source_lengths = np.zeros(runner.max_rows, np.int32)
        self._outputs: tuple[str, ...] = ()  # what the generations need of the next step

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

    def held(self) -> dict[str, int]:
        """Rows by the calls that their generations belong to."""
        return Counter(owner.request.request_id for owner in self._owners)

    def find(self, handle: Handle) -> Generation | None:
        return next((one for one in self._generations if one.handle is handle), None)

    def admit(self, newcomers: Sequence[tuple[Generation, int]], encoded: Mapping[str, Array]) -> None:
        """Begin generations in the first free rows, each from its example of what the encoder gave."""
        first = len(self._owners)
        owners = [(one, index) for one, index in newcomers for _ in range(num_rows(one.request))]
        rows = slice(first, first + len(owners))
        self._runner.fill(first, encoded, [index for _, index in owners])
        self._token_ids[rows] = [one.beginning[-1] for one, _ in owners]
        self._lengths[rows] = [len(one.beginning) - 1 for one, _ in owners]
        self._source_lengths[rows] = [len(one.request.source_ids) for one, _ in owners]
        for row, (generation, _) in enumerate(owners, first):
            generation.rows.append(row)
            self._owners.append(generation)
        self._generations.update((one, None) for one, _ in newcomers)
        self._choose_outputs()

    def release(self, generation: Generation) -> None:
        """Free a generation's rows; the last rows move into their places."""
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
        wanted = ALWAYS.union(*(generation.outputs for generation in self._generations))
        self._outputs = tuple(name for name in self._runner.manifest.decoder.outputs if name in wanted)

    def step(self, rows: range) -> Mapping[str, Array]:
        """Run the decoder once over some of the rows; `advance` says what they read next.

        A step that raises can be repeated, over any of its rows too; see `Runner.step`.
        """
        return self._runner.step(*self._inputs(rows), self._outputs, first=rows.start)

    def step_each(self, rows: range) -> Mapping[str, Array] | None:
        """Run the decoder once over each row by itself, after `step` has failed for all of them.

        Returns:
            The outputs of all rows, as `step` returns them; those of a row that fails alone are NaN. None if every row
            fails.
        """
        given: dict[int, Mapping[str, Array]] = {}
        for place, row in enumerate(rows):
            try:
                outputs = self.step(range(row, row + 1))
            except Exception:
                logger.exception("a decoder step failed for one row alone")
            else:
                given[place] = {name: array.copy() for name, array in outputs.items()}  # the next run overwrites them
        if not given:
            return None
        parts = {name: {place: outputs[name] for place, outputs in given.items()} for name in self._outputs}
        return {name: _joined(arrays, len(rows)) for name, arrays in parts.items()}

    def _inputs(self, rows: range) -> tuple[Int64, Int32, Int32]:
        part = slice(rows.start, rows.stop)
        return self._token_ids[part], self._lengths[part], self._source_lengths[part]

    def advance(self, rows: range, token_ids: NDArray[np.int64], moves: Moves) -> None:
        """Set what rows that have just been stepped read next, some of them with the state of another.

        Args:
            rows: those of the step.
            token_ids: (B,).
            moves: rows of one generation each; none is both a source and a target.
        """
        part = slice(rows.start, rows.stop)
        self._token_ids[part] = token_ids
        self._lengths[part] += 1
        if moves:
            sources, targets = map(list, zip(*moves, strict=True))
            self._runner.branch(sources, targets, int(self._lengths[sources].max()))

    def __iter__(self) -> Iterator[Generation]:
        return iter(self._generations)


def _joined(parts: Mapping[int, Array], count: int) -> Array:
    """Outputs of single rows, (1, ...), as one array (count, ...) that is as wide as the widest of them."""
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
