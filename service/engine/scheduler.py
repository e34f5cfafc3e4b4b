"""Choice of the waiting sequences that the encoder takes next. Integers only: no tensor, no clock, no socket."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice


@dataclass(frozen=True)
class Waiting:
    """A sequence in the queue, as far as scheduling is concerned."""

    id: int  # rises with each arrival: the smaller, the older
    call: str  # the same for all sequences of one call
    source_tokens: int
    num_rows: int  # decoder rows it needs; 0 if it is only encoded
    expires: float  # its deadline


class _Queue:
    """Waiting sequences of one kind, by call."""

    def __init__(self) -> None:
        # Dictionaries keep the order of insertion and remove any member in constant time.
        self._by_id: dict[int, Waiting] = {}
        self._calls: dict[str, dict[int, Waiting]] = {}  # in the order of their turns
        self._oldest_is_next = False

    def __len__(self) -> int:
        return len(self._by_id)

    def heads(self) -> list[Waiting]:
        """The first sequence of each call, in the order of the calls' turns."""
        return [next(iter(of_call.values())) for of_call in self._calls.values()]

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._by_id.values())

    def add(self, one: Waiting) -> None:
        self._by_id[one.id] = one
        self._calls.setdefault(one.call, {})[one.id] = one

    def remove(self, id_: int) -> Waiting | None:
        one = self._by_id.pop(id_, None)
        if one is not None:
            of_call = self._calls[one.call]
            del of_call[id_]
            if not of_call:
                del self._calls[one.call]
        return one

    def take(self, one: Waiting) -> None:
        """Remove a sequence that goes now; its call has its next turn after all others."""
        self.remove(one.id)
        if one.call in self._calls:
            self._calls[one.call] = self._calls.pop(one.call)
        self._oldest_is_next = not self._oldest_is_next

    def in_turn(self, held: Mapping[str, int]) -> Iterator[Waiting]:
        """Iterate over the sequences in the order in which they are due.

        Every second one is the oldest. The others are of the call that holds the fewest rows, and of several such
        calls of the one whose last turn is longest ago. So a small call need not wait for all sequences of a large
        one, and a large call makes progress however many small ones arrive.

        Args:
            held: decoder rows that each call has already.
        """
        rows = dict(held)
        following = {call: iter(of_call.values()) for call, of_call in self._calls.items()}
        heads = {call: next(iterator) for call, iterator in following.items()}
        oldest_is_next = self._oldest_is_next
        while heads:
            if oldest_is_next:
                one = min(heads.values(), key=lambda head: head.id)
            else:
                one = min(heads.values(), key=lambda head: rows.get(head.call, 0))
            yield one
            oldest_is_next = not oldest_is_next
            rows[one.call] = rows.get(one.call, 0) + one.num_rows
            del heads[one.call]
            head = next(following[one.call], None)
            if head is not None:
                heads[one.call] = head


class Scheduler:
    """A queue that leaves in encoder batches and is fair between calls.

    Sequences that need rows go in the order of `_Queue.in_turn`: none is passed while it waits for its rows. Some rows
    are reserved for sequences of one row whose call holds none, so that a small call need not wait until rows are
    freed. Sequences that need no rows may pass all others. The first of each kind, whichever is older, always goes, so
    nothing starves; the rest of its batch is chosen by length.
    """

    def __init__(self, max_batch_tokens: int, reserved_rows: int = 0) -> None:
        """Begin with an empty queue.

        Args:
            max_batch_tokens: tokens of a batch at most, padding included; a longer sequence goes alone.
            reserved_rows: decoder rows for sequences of one row whose call holds none.
        """
        self._max_batch_tokens = max_batch_tokens
        self._reserved_rows = reserved_rows
        self._in_reserve: set[int] = set()  # sequences that hold a reserved row
        self._for_rows = _Queue()
        self._for_encoder = _Queue()
        self._next_expiry = float("inf")  # nothing expires before

    def __len__(self) -> int:
        return len(self._for_rows) + len(self._for_encoder)

    def add(self, waiting: Waiting) -> None:
        self._queue_of(waiting).add(waiting)
        self._next_expiry = min(self._next_expiry, waiting.expires)

    def remove(self, id_: int) -> bool:
        """Remove a sequence from the queue; False if it is not in it."""
        removed = self._for_rows.remove(id_) or self._for_encoder.remove(id_)
        return removed is not None

    def remove_expired(self, now: float) -> list[int]:
        """Remove the sequences whose deadline has passed, oldest first."""
        if now < self._next_expiry:
            return []
        waiting = [*self._for_rows, *self._for_encoder]
        expired = sorted(one.id for one in waiting if one.expires <= now)
        self._next_expiry = min((one.expires for one in waiting if one.expires > now), default=float("inf"))
        for id_ in expired:
            self.remove(id_)
        return expired

    def next_batch(self, free_rows: int, held: Mapping[str, int]) -> list[int]:
        """Remove the sequences of the next encoder call, shortest first; empty if none can go.

        Args:
            free_rows: decoder rows that are free.
            held: decoder rows that each call has already.
        """
        in_turn, in_reserve = self._that_fit(free_rows, held)
        for_rows, for_encoder = in_turn + in_reserve, list(self._for_encoder)
        heads = [*in_turn[:1], *in_reserve[:1], *islice(self._for_encoder.in_turn({}), 1)]
        if not heads:
            return []
        first = min(heads, key=lambda one: one.id)
        batch = [first]
        longest = real_tokens = first.source_tokens
        # Sorting is stable: of two that fit equally well the one that is due earlier comes first.
        for one in sorted(for_rows + for_encoder, key=lambda one: abs(one.source_tokens - first.source_tokens)):
            if one is first:
                continue
            padded_tokens = max(longest, one.source_tokens) * (len(batch) + 1)
            # At least half of what the encoder computes is real: an outlier waits for company or goes alone.
            if padded_tokens > min(self._max_batch_tokens, 2 * (real_tokens + one.source_tokens)):
                continue
            batch.append(one)
            longest = max(longest, one.source_tokens)
            real_tokens += one.source_tokens
        for one in batch:
            self._queue_of(one).take(one)
            if one in in_reserve:
                self._in_reserve.add(one.id)
        return [one.id for one in sorted(batch, key=lambda one: (one.source_tokens, one.id))]

    def _queue_of(self, one: Waiting) -> _Queue:
        return self._for_rows if one.num_rows else self._for_encoder

    def forget(self, id_: int) -> None:
        """Note that a sequence has ended, which returns its rows."""
        self._in_reserve.discard(id_)

    def _that_fit(self, free_rows: int, held: Mapping[str, int]) -> tuple[list[Waiting], list[Waiting]]:
        """The sequences that get rows now: those that are due, and those that get reserved ones."""
        in_turn: list[Waiting] = []
        if not (free_rows and len(self._for_rows)):
            return in_turn, []
        reserved = min(free_rows, self._reserved_rows - len(self._in_reserve))
        free_rows -= reserved
        for one in self._for_rows.in_turn(held) if free_rows else ():
            free_rows -= one.num_rows
            if free_rows < 0:
                break
            in_turn.append(one)
        holding = {one.call for one in in_turn}.union(held)
        heads = self._for_rows.heads() if reserved else ()
        # A search would take the reserved rows of several small calls, and hold them for long.
        in_reserve = [one for one in heads if one.num_rows == 1 and one.call not in holding]
        return in_turn, in_reserve[:reserved]
