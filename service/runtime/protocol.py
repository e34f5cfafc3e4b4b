"""The wall between the engine and what runs a bundle's graphs.

A runner owns the rows of decoder state. Rows 0 to n-1 run; the engine fills a row when a sequence is admitted, moves
the last row into the place of one that ends, and copies one over another where a beam branches.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from service.bundle import Manifest, State

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Array = NDArray[Any]


def states_alike(states: Sequence[State]) -> list[list[State]]:
    """The states by shape and kind: those of one list can lie in one array, and move at once."""
    kinds: dict[tuple[Any, ...], list[State]] = {}
    for state in states:
        kinds.setdefault((state.shape, state.dtype, state.output is None), []).append(state)
    return list(kinds.values())


class Runner(Protocol):
    """Runs one bundle. Called from one thread only."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def max_rows(self) -> int: ...

    def encode(self, source_ids: Int64, source_lengths: Int32, outputs: Sequence[str]) -> Mapping[str, Array]:
        """Run the encoder.

        Args:
            source_ids: (B, S), padded on the right.
            source_lengths: (B,).
            outputs: names among `manifest.encoder.outputs`.

        Returns:
            The outputs by name; the caller may keep them. They may have one position of padding more than the ids.
        """
        ...

    def compare(self, token_ids: Int64) -> Array:
        """(N, V): the cosine of each token's embedding and every token's; of a bundle that has the graph for it.

        Args:
            token_ids: (N,).
        """
        ...

    def fill(self, first: int, encoded: Mapping[str, Array], examples: Sequence[int]) -> None:
        """Make rows the beginnings of sequences: their states from what `encode` gave, or zeros.

        Args:
            first: the first of as many rows as there are examples.
            encoded: what `encode` gave.
            examples: which of its examples each row begins from.
        """
        ...

    def move(self, source: int, target: int, target_tokens: int, source_tokens: int) -> None:
        """Copy all states of row `source`, which has read so many tokens of a target, over those of row `target`."""
        ...

    def branch(self, sources: Sequence[int], targets: Sequence[int], target_tokens: int) -> None:
        """Copy what steps change of rows `sources`, which have read at most so many tokens, over rows `targets`.

        The two rows of each pair have the same source; no row is both a source and a target.
        """
        ...

    def step(
        self, token_ids: Int64, lengths: Int32, source_lengths: Int32, outputs: Sequence[str], *, first: int = 0
    ) -> Mapping[str, Array]:
        """Read one token in each of rows `first` to `first + B - 1` and update their states.

        A step that raises may be repeated for any of its rows with the same arguments, and then gives what it would
        have given: it has changed nothing but the position that the repeated step writes again.

        Args:
            token_ids: (B,) the token that each row reads.
            lengths: (B,) how many target tokens each row has read before.
            source_lengths: (B,).
            outputs: names among `manifest.step.outputs`, states excepted.
            first: the first row.

        Returns:
            The outputs by name, row first. Attention maps are the caller's to keep, the others are valid until the next
            call.
        """
        ...

    def release_memory(self) -> None:
        """Return memory that only earlier calls needed to the system. No row runs; states of rows are lost."""
        ...
