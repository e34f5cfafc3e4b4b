"""Interface between the engine and the runtime that executes a bundle's graphs.

A runner owns the rows of decoder state (`sightline.service.engine.rows` defines a row). Rows 0 to n
- 1 are running. The engine initializes a row when a sequence is admitted, moves the last row into a
row that becomes free, and copies rows when beams are forked.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sightline.base.bundle import Manifest, State
from sightline.base.errors import UsageError

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Bools = NDArray[np.bool_]
Array = NDArray[Any]


BLOCK_TOKENS = 8  # number of tokens whose states are in one block of the prefix cache


class RuntimeUnavailableError(UsageError):
    """The requested provider cannot be used. The message states the reason."""


def group_states(states: Sequence[State]) -> list[list[State]]:
    """Group states of equal shape, type and mutability, so that each group can share one array."""
    kinds: dict[tuple[Any, ...], list[State]] = {}
    for state in states:
        kinds.setdefault((state.shape, state.dtype, state.output is None), []).append(state)
    return list(kinds.values())


class Runner(Protocol):
    """Executes the graphs of one bundle.

    All methods except `terminate` must be called from the same thread.
    """

    @property
    def manifest(self) -> Manifest: ...

    @property
    def max_rows(self) -> int: ...

    @property
    def num_prefix_blocks(self) -> int:
        """Number of blocks for `store_prefix`; 0 if the runner has none.

        A block holds the states of `BLOCK_TOKENS` consecutive tokens of a row.
        """
        ...

    def run_encoder(self, source_ids: Int64, source_lengths: Int32, outputs: Sequence[str]) -> Mapping[str, Array]:
        """Run the encoder on ids (B, S), padded on the right, and lengths (B,).

        The outputs may have one more position of padding. The caller may keep them.
        """
        ...

    def predict(self, hidden: Array) -> Array:
        """Return the logits (N, V) of all tokens at positions with float32 `hidden` (N, M).

        A row does not depend on the others. The bundle needs the graph `predict`.
        """
        ...

    def measure_contributions(self, method: str, source_ids: Int64, target_ids: Int64) -> Mapping[str, Array]:
        """Return the outputs of the graph of contributions for a method, by kind of attention.

        The ids are those of a source (1, S) and of the inputs of the decoder (1, T).
        """
        ...

    def init_rows(
        self,
        first: int,
        encoded: Mapping[str, Array],
        examples: Sequence[int],
        visible: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """Initialize the states of consecutive rows from encoder outputs, or with zeros.

        Args:
            encoded: result of `run_encoder`; empty for a decoder-only model.
            examples: for each row, the index of its sequence in the encoder's batch.
            visible: ascending indices of the source tokens that the states keep, by the index of a
                sequence in the encoder's batch. The source of these rows is as long as this list in
                later calls. Other sequences keep all tokens.
        """
        ...

    def prefill(self, row: int, token_ids: Int64, length: int, outputs: Sequence[str] = ()) -> Mapping[str, Array]:
        """Process tokens (S,) in a row of a decoder-only model and update its states in place.

        The row has processed `length` tokens before. A call that raises can be repeated with the
        same arguments and the same results. `outputs` names outputs of the decoder graph, without
        states. The results have no batch axis: `hidden` (S, M), attention maps (H, L, S, columns),
        scores of the token after the last one, (V,) or (K,). The caller may keep them.

        The cuts of a prompt do not change a bit of its results if each call has at least two
        tokens. A single token is computed by another kernel.

        Raises `FloatingPointError` if a new value of a state is NaN or infinite.
        """
        ...

    def store_prefix(self, row: int, first_token: int, block: int) -> None:
        """Copy the states of `BLOCK_TOKENS` tokens of a row to a block, from `first_token` on."""
        ...

    def load_prefix(self, block: int, row: int, first_token: int) -> None:
        """Copy a block to the states of a row, from `first_token` on."""
        ...

    def swap(self, first: int, second: int, target_tokens: int) -> None:
        """Exchange the states of two rows of a decoder-only model, up to `target_tokens` tokens."""
        ...

    def move(self, source: int, target: int, target_tokens: int, source_tokens: int) -> None:
        """Copy all states of row `source`, which has processed `target_tokens`, to row `target`."""
        ...

    def fork(self, sources: Sequence[int], targets: Sequence[int], positions: Sequence[slice]) -> None:
        """Copy the states that steps change from rows `sources` to rows `targets`.

        Rows of a pair must have the same source, and no row may be both a source and a target. Of
        each pair, `positions` of the target axis are copied. At earlier positions the two rows must
        be equal, later ones are not in use.
        """
        ...

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
        """Process one token in each of the rows `first` to `first + B - 1` and update their states.

        If a step raises, it can be repeated for all or some of its rows with the same arguments and
        the same results: it has only changed positions that the repeated step writes again.

        The arrays are (B,); `lengths` are the numbers of target tokens processed before. Rows of
        `whole` do not use a shortlist; None stands for all rows if `outputs` has scores of the
        whole vocabulary, else for none. Only these rows have such scores. `outputs` names outputs
        of the decoder graph, without states. The first axis of each is the batch; attention maps
        are (B, H, L, columns). They are valid until the next call.
        """
        ...

    def release_memory(self) -> None:
        """Return unused memory to the system. The states of all rows are lost, blocks are kept."""
        ...

    def terminate(self) -> None:
        """Make the running call raise before the next operator of its graph, and all later calls.

        Any thread may call it. The runner cannot be used any more.
        """
        ...
