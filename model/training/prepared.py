"""Data of a run as the trainer needs it."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from model.data.examples import Examples
from model.data.records import Record


class PreparedData(Protocol):
    """Tokenizer and encoded examples of a run."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def train(self) -> Examples: ...

    @property
    def dev(self) -> Examples: ...

    @property
    def dev_records(self) -> Sequence[Record]:
        """Records for `Task.evaluate`; if there are none, only the loss is computed."""
        ...

    @property
    def digest(self) -> str:
        """Digest of the examples, with which a run can be resumed."""
        ...


def check_sizes(split: str, sizes: NDArray[np.int32], max_positions: int) -> None:
    """Check that a split has examples and that the model can read them.

    Args:
        split: name of the split.
        sizes: (N, K), numbers of tokens of each example, see `Task.sizes`.
        max_positions: positions of the model.

    Raises:
        ValueError: there is no example, or one is too long.
    """
    if not len(sizes):
        raise ValueError(f"there is no example of {split}; add examples")
    longest = int(sizes.max())
    if longest > max_positions:
        raise ValueError(
            f"an example of {split} has {longest} tokens, but max_positions of the model is {max_positions}; set "
            f"max_length_tokens to {max_positions} to skip longer examples"
        )
