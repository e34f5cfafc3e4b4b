"""Prefill: the prompts that decoder-only models still compute.

A prompt is computed in chunks between two decoder steps, so that a long prompt delays running rows
only by a limited time (docs/adr/0016). Its cuts do not change its results, as long as each chunk
has at least two tokens.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sightline.base.bundle import PREFILL_TOKENS
from sightline.service.engine.generation import Generation, PromptEncoding, RowOwner
from sightline.service.engine.prefix_cache import next_key, scope_key
from sightline.service.engine.request import MapPart
from sightline.service.runtime.runner import BLOCK_TOKENS

# Time for chunks before the next decoder step. Running rows are delayed by at most this time, or by
# one chunk if it takes longer.
BUDGET_S = 0.010


@dataclass(eq=False)
class Prefill:
    """A prompt that is being read, and the requests that wait for it.

    Several requests of one call can have the same prompt, for example the samples of one input. It
    is read once, into the first row of the first request.
    """

    owners: list[RowOwner]  # not empty
    num_read: int = 0
    num_cached: int = 0  # number of tokens read whose states came from the prefix cache
    # Keys of the prefixes read so far that end with a full block of the cache, shortest first.
    keys: list[bytes] = field(default_factory=list)
    seconds: float = 0.0  # time in the runner
    hidden: list[NDArray[Any]] = field(default_factory=list)  # (tokens, M) of each chunk; only for encode requests
    # Decoder maps (H, L, tokens, columns) of each chunk; only for requests of prompt rows.
    maps: list[NDArray[np.float32]] = field(default_factory=list)

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens to read."""
        return self.owners[0].prefill_ids

    @property
    def row(self) -> int:
        """The row that holds the states of the tokens read so far."""
        return self.owners[0].rows[0]

    @property
    def is_encoding(self) -> bool:
        """True if an encode request needs the hidden states of the prompt."""
        return isinstance(self.owners[0], PromptEncoding)

    @property
    def records_maps(self) -> bool:
        """True if generations need the attention maps of the prompt."""
        first = self.owners[0]
        return isinstance(first, Generation) and first.records_prompt

    @property
    def map_part(self) -> MapPart | None:
        """Layers and heads of the prompt's attention maps; all if None."""
        first = self.owners[0]
        return first.request.map_parts.get("decoder") if isinstance(first, Generation) else None

    @property
    def needs_outputs(self) -> bool:
        """True if outputs of the graph are needed for each token, not only states."""
        return self.is_encoding or self.records_maps

    @property
    def is_done(self) -> bool:
        return self.num_read == len(self.ids)

    def next_chunk(self) -> NDArray[np.int64]:
        """Return the tokens of the next chunk. Only a prompt of one token has a chunk of one."""
        num_left = len(self.ids) - self.num_read
        size = PREFILL_TOKENS if 2 * num_left > 3 * PREFILL_TOKENS else num_left
        return np.array(self.ids[self.num_read : self.num_read + size], np.int64)

    def next_key(self) -> bytes:
        """Return the key of the prefix that is longer by one block than that of the last key."""
        first = BLOCK_TOKENS * len(self.keys)
        block = np.array(self.ids[first : first + BLOCK_TOKENS], np.int64)
        return next_key(self.keys[-1] if self.keys else scope_key(self.owners[0].request.caller), block)

    def is_shared_with(self, owner: RowOwner) -> bool:
        """Return True if the states of this prompt can be copied to the rows of a request."""
        first = self.owners[0]
        return (
            isinstance(owner, Generation)
            and isinstance(first, Generation)
            and owner.records_prompt == first.records_prompt
            and owner.request.map_parts == first.request.map_parts
            and owner.request.request_id == first.request.request_id
            and owner.prefill_ids == self.ids
        )


class PrefillQueue:
    """The prompts that are being read.

    Chunks alternate between the oldest prompt and the one with the fewest remaining tokens, so that
    short prompts do not wait for long ones, and long ones make progress while short ones arrive.
    """

    def __init__(self) -> None:
        self._prefills: list[Prefill] = []  # oldest first
        self._oldest_is_next = False

    def __len__(self) -> int:
        return len(self._prefills)

    def add(self, owner: RowOwner) -> None:
        """Add a request that has rows: it waits for a prompt that it shares, or for its own."""
        for prefill in self._prefills:
            if prefill.is_shared_with(owner):
                prefill.owners.append(owner)
                return
        self._prefills.append(Prefill([owner]))

    def next(self) -> Prefill:
        """Return the prompt whose next chunk is to be read."""
        self._oldest_is_next = not self._oldest_is_next
        if self._oldest_is_next:
            return self._prefills[0]
        return min(self._prefills, key=lambda prefill: len(prefill.ids) - prefill.num_read)

    def remove(self, prefill: Prefill) -> None:
        self._prefills.remove(prefill)

    def find(self, owner: RowOwner) -> Prefill | None:
        return next((prefill for prefill in self._prefills if owner in prefill.owners), None)
