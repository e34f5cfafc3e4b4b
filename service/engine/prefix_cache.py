"""Prefix cache: blocks of the runner that keep the states of prompts which have been read.

A block holds the states of `BLOCK_TOKENS` tokens. States of a token depend on the tokens before
it, so the key of a block depends on them, too (docs/adr/0016).
"""

from collections.abc import Container, Sequence
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray


def scope_key(scope: str) -> bytes:
    """Return the key of the empty prefix. Prefixes of different scopes have different keys."""
    return sha256(scope.encode()).digest()


def next_key(key: bytes, token_ids: NDArray[np.int64]) -> bytes:
    """Return the key of the prefix that is longer than that of `key` by one block."""
    return sha256(key + token_ids.tobytes()).digest()


class PrefixCache:
    """Assigns blocks to prefixes. If no block is free, the least recently used one is assigned."""

    def __init__(self, num_blocks: int) -> None:
        self.is_enabled = num_blocks > 0
        self._blocks: dict[bytes, int] = {}  # least recently used first
        self._free = list(range(num_blocks))

    def __len__(self) -> int:
        """Number of blocks in use."""
        return len(self._blocks)

    def find(self, key: bytes) -> int | None:
        """Return the block of a prefix; None if it has none."""
        return self._blocks.get(key)

    def assign(self, key: bytes, own_keys: Container[bytes]) -> int | None:
        """Return a block for a prefix that has none; the block's previous content is lost.

        `own_keys`, shorter prefixes of the same prompt, keep their blocks: the result is None if
        the least recently used block is theirs. A prompt larger than the cache keeps its beginning.
        """
        if not self._free:
            oldest = next(iter(self._blocks))
            if oldest in own_keys:
                return None
            self._free.append(self._blocks.pop(oldest))
        block = self._blocks[key] = self._free.pop()
        return block

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark the prefixes of one prompt, given shortest first, as used, the shortest last.

        A block is of no use without those before it, so the last block of a prompt goes first.
        """
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks[key] = self._blocks.pop(key)
