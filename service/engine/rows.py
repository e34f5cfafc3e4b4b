"""The running rows: 0 to n-1 without a gap, their input arrays and their decoder state moving as one."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.engine.generation import Generation, Handle
from service.runtime.protocol import Runner

Array = NDArray[Any]


class Rows:
    """Generations in rows of the runner's state."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._start_id = runner.manifest.tokens.start_id
        self._generations: list[Generation] = []
        self._token_ids = np.zeros(runner.max_rows, np.int64)  # what each row reads next
        self._lengths = np.zeros(runner.max_rows, np.int32)  # how many tokens each row has read
        self._source_lengths = np.zeros(runner.max_rows, np.int32)
        self._min_new_tokens = np.zeros(runner.max_rows, np.int32)

    def __len__(self) -> int:
        return len(self._generations)

    def __iter__(self) -> Iterator[Generation]:
        return iter(self._generations)

    def __getitem__(self, row: int) -> Generation:
        return self._generations[row]

    @property
    def num_free(self) -> int:
        return self._runner.max_rows - len(self._generations)

    @property
    def lengths(self) -> NDArray[np.int32]:
        """(B,) tokens that each row has generated, and with the start token, has read."""
        return self._lengths[: len(self)]

    @property
    def min_new_tokens(self) -> NDArray[np.int32]:
        return self._min_new_tokens[: len(self)]

    def find(self, handle: Handle) -> int | None:
        """The row of a request; None where it has none."""
        return next((row for row, one in enumerate(self._generations) if one.handle is handle), None)

    def admit(self, generation: Generation, encoded: Mapping[str, Array], index: int) -> None:
        """Begin a generation in the first free row, from example `index` of what the encoder gave."""
        row = len(self._generations)
        self._runner.fill(row, encoded, index)
        self._token_ids[row] = self._start_id
        self._lengths[row] = 0
        self._source_lengths[row] = len(generation.request.source_ids)
        self._min_new_tokens[row] = generation.request.parameters.min_new_tokens
        self._generations.append(generation)

    def release(self, row: int) -> None:
        """Free a row; the last row moves into its place."""
        last = len(self._generations) - 1
        if row != last:
            self._runner.move(last, row)
            for column in (self._token_ids, self._lengths, self._source_lengths, self._min_new_tokens):
                column[row] = column[last]
            self._generations[row] = self._generations[last]
        del self._generations[last]

    def step(self, outputs: Sequence[str]) -> Mapping[str, Array]:
        """Run the decoder once over all rows; `advance` says what they read next."""
        n = len(self._generations)
        return self._runner.step(self._token_ids[:n], self._lengths[:n], self._source_lengths[:n], outputs)

    def advance(self, token_ids: NDArray[np.int64]) -> None:
        n = len(self._generations)
        self._token_ids[:n] = token_ids
        self._lengths[:n] += 1
