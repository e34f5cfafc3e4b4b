"""Which waiting requests the encoder takes next. Integers only: no tensor, no clock, no socket."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Waiting:
    """A request in the queue, as far as scheduling is concerned."""

    id: int  # rises with each arrival: the smaller, the older
    source_tokens: int
    num_rows: int  # decoder rows it needs; 0 for one that only encodes
    expires: float  # when it has waited too long


class Scheduler:
    """A first-in, first-out queue that leaves in encoder batches.

    Requests that need rows keep their order: none passes one that waits for rows. Requests that need none may pass
    them. The oldest request that can go always goes, so nothing starves; what fills its batch is chosen by length.
    """

    def __init__(self, max_batch_tokens: int) -> None:
        """`max_batch_tokens` bounds a batch's tokens, padding included; a longer request goes alone."""
        self._max_batch_tokens = max_batch_tokens
        # Dictionaries keep the order of arrival and give up any member at once.
        self._for_rows: dict[int, Waiting] = {}
        self._for_encoder: dict[int, Waiting] = {}
        self._next_expiry = float("inf")  # nothing expires before

    def __len__(self) -> int:
        return len(self._for_rows) + len(self._for_encoder)

    def add(self, waiting: Waiting) -> None:
        queue = self._for_rows if waiting.num_rows else self._for_encoder
        queue[waiting.id] = waiting
        self._next_expiry = min(self._next_expiry, waiting.expires)

    def remove(self, id_: int) -> bool:
        """Take a request out of the queue; False where it is not in it."""
        removed = self._for_rows.pop(id_, None) or self._for_encoder.pop(id_, None)
        return removed is not None

    def remove_expired(self, now: float) -> list[int]:
        """Take out, oldest first, the requests that have waited too long."""
        if now < self._next_expiry:
            return []
        waiting = [*self._for_rows.values(), *self._for_encoder.values()]
        expired = sorted(one.id for one in waiting if one.expires <= now)
        self._next_expiry = min((one.expires for one in waiting if one.expires > now), default=float("inf"))
        for id_ in expired:
            self.remove(id_)
        return expired

    def next_batch(self, free_rows: int) -> list[int]:
        """Take out the requests of the next encoder call, shortest first; empty where none can go."""
        candidates = self._candidates(free_rows)
        if not candidates:
            return []
        oldest = min(candidates, key=lambda one: one.id)
        batch = [oldest]
        longest = real_tokens = oldest.source_tokens
        # Sorting is stable: of two that fit equally well the older comes first.
        for one in sorted(candidates, key=lambda one: abs(one.source_tokens - oldest.source_tokens)):
            if one is oldest:
                continue
            padded_tokens = max(longest, one.source_tokens) * (len(batch) + 1)
            # At least half of what the encoder computes is real: an outlier waits for company or goes alone.
            if padded_tokens > min(self._max_batch_tokens, 2 * (real_tokens + one.source_tokens)):
                continue
            batch.append(one)
            longest = max(longest, one.source_tokens)
            real_tokens += one.source_tokens
        for one in batch:
            self.remove(one.id)
        return [one.id for one in sorted(batch, key=lambda one: (one.source_tokens, one.id))]

    def _candidates(self, free_rows: int) -> list[Waiting]:
        """What could go now: the head of the queue for rows as far as the rows reach, and all that need none."""
        candidates = list(self._for_encoder.values())
        for one in self._for_rows.values():
            free_rows -= one.num_rows
            if free_rows < 0:
                break
            candidates.append(one)
        return candidates
