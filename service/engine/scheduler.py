"""Scheduling of waiting sequences into encoder batches.

The scheduler works on plain numbers: it has no access to tensors, clocks or sockets.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TypeVar

Call = tuple[str, str]  # caller and request id
T = TypeVar("T")


@dataclass(frozen=True)
class WaitingSequence:
    """The properties of a waiting sequence that matter for scheduling."""

    id: int  # increases with each arrival
    call: Call  # equal for all sequences of one call
    source_tokens: int
    num_rows: int  # number of decoder rows that it needs; 0 for encode-only sequences
    deadline: float

    @property
    def share(self) -> str:
        return share_of(self.call)


def share_of(call: Call) -> str:
    """Return the owner of a call among whom rows and turns are divided equally: its caller, or the
    call itself if it has none.
    """
    caller, request_id = call
    return caller or request_id


@dataclass(frozen=True)
class RowCounts:
    """Number of decoder rows that each share and each call has."""

    of_share: Counter[str] = field(default_factory=Counter)
    of_call: Counter[Call] = field(default_factory=Counter)

    def add(self, call: Call, num_rows: int) -> None:
        self.of_share[share_of(call)] += num_rows
        self.of_call[call] += num_rows

    def copy(self) -> "RowCounts":
        return RowCounts(self.of_share.copy(), self.of_call.copy())


class _Queue:
    """Waiting sequences of one kind, grouped by share and call."""

    def __init__(self) -> None:
        # Dictionaries keep the insertion order and remove any element in constant time. Shares, and
        # calls within a share, are in round-robin order.
        self._by_id: dict[int, WaitingSequence] = {}
        self._shares: dict[str, dict[Call, dict[int, WaitingSequence]]] = {}
        self._oldest_is_next = False

    def __len__(self) -> int:
        return len(self._by_id)

    def heads(self) -> Iterator[WaitingSequence]:
        """Iterate over the first sequence of each call in round-robin order."""
        calls = chain.from_iterable(of_share.values() for of_share in self._shares.values())
        return (next(iter(of_call.values())) for of_call in calls)

    def __iter__(self) -> Iterator[WaitingSequence]:
        return iter(self._by_id.values())

    def add(self, one: WaitingSequence) -> None:
        self._by_id[one.id] = one
        self._shares.setdefault(one.share, {}).setdefault(one.call, {})[one.id] = one

    def remove(self, id_: int) -> WaitingSequence | None:
        one = self._by_id.pop(id_, None)
        if one is not None:
            of_share = self._shares[one.share]
            of_call = of_share[one.call]
            del of_call[id_]
            if not of_call:
                del of_share[one.call]
            if not of_share:
                del self._shares[one.share]
        return one

    def take(self, one: WaitingSequence) -> None:
        """Remove a scheduled sequence; move its share and its call to the end of the order."""
        self.remove(one.id)
        if one.share in self._shares:
            of_share = self._shares[one.share] = self._shares.pop(one.share)
            if one.call in of_share:
                of_share[one.call] = of_share.pop(one.call)
        self._oldest_is_next = not self._oldest_is_next

    def fair_order(self, held: RowCounts) -> Iterator[WaitingSequence]:
        """Iterate over the sequences in fair order.

        Every second sequence is the oldest one. The others belong to the share with the fewest
        rows, and in it to the call with the fewest rows; among several, to the one that was served
        least recently. Therefore a small call does not wait for all sequences of a large call or of
        another caller, and a large call makes progress while small calls arrive.

        Args:
            held: the decoder rows that shares and calls have now.
        """
        # A step takes a few of hundreds of sequences. Only these are visited, and the shares and
        # calls before them that have rows already.
        rows = held.copy()
        ages = iter(self._by_id.values())
        following: dict[Call, Iterator[WaitingSequence]] = {}
        taken: set[int] = set()
        turns: dict[Call, int] = {}  # turn in which each call was last served; earlier ones come first
        ended_shares: set[str] = set()
        ended_calls: dict[str, set[Call]] = {}
        oldest_is_next = self._oldest_is_next
        while len(taken) < len(self._by_id):
            if oldest_is_next:
                call = next(one.call for one in ages if one.id not in taken)
            else:
                shares = (share for share in self._shares if share not in ended_shares)
                share = _least(shares, lambda share: (rows.of_share.get(share, 0), 0))
                ended = ended_calls.get(share, ())
                calls = (call for call in self._shares[share] if call not in ended)
                call = _least(calls, lambda call: (rows.of_call.get(call, 0), turns.get(call, 0)))
            share = share_of(call)
            if call not in following:
                following[call] = iter(self._shares[share][call].values())
            one = next(following[call])
            yield one
            oldest_is_next = not oldest_is_next
            rows.add(call, one.num_rows)
            taken.add(one.id)
            turns[call] = len(taken)
            if one.id == next(reversed(self._shares[share][call])):
                ended_calls.setdefault(share, set()).add(call)
                if len(ended_calls[share]) == len(self._shares[share]):
                    ended_shares.add(share)


def _least(candidates: Iterable[T], rank: Callable[[T], tuple[int, int]]) -> T:
    """Return the first candidate with the lowest rank, without a look at those after one of the
    rank (0, 0), which no other is below.
    """
    best, lowest = None, None
    for one in candidates:
        its = rank(one)
        if lowest is None or its < lowest:
            best, lowest = one, its
            if its == (0, 0):
                break
    assert best is not None
    return best


class Scheduler:
    """A queue of sequences that is fair between callers and calls, drained in encoder batches.

    Sequences that need decoder rows are scheduled in the order of `_Queue.fair_order`; none
    overtakes another that waits for rows. Some rows are reserved for sequences with one row whose
    call has no row yet, so that a small call does not wait until rows are released. At least half
    of them are for callers that have no row at all. Encode-only
    sequences can overtake all others. Each batch contains the older of the first sequences of both
    kinds, so that no sequence starves. The rest of the batch is chosen by length.
    """

    def __init__(self, max_batch_tokens: int, reserved_rows: int = 0) -> None:
        """Create an empty queue.

        Args:
            max_batch_tokens: maximum number of tokens in a batch, padding included. A longer
                sequence is a batch of its own.
            reserved_rows: number of decoder rows that are reserved for calls without rows.
        """
        self._max_batch_tokens = max_batch_tokens
        self._reserved_rows = reserved_rows
        self._reserved_ids: set[int] = set()  # ids of sequences in reserved rows
        self._decode_queue = _Queue()
        self._encode_queue = _Queue()
        self._next_expiry = float("inf")  # no deadline is earlier

    def __len__(self) -> int:
        return len(self._decode_queue) + len(self._encode_queue)

    def add(self, waiting: WaitingSequence) -> None:
        self._queue_of(waiting).add(waiting)
        self._next_expiry = min(self._next_expiry, waiting.deadline)

    def remove(self, id_: int) -> bool:
        """Remove a sequence from the queue; return False if it is not in the queue."""
        removed = self._decode_queue.remove(id_) or self._encode_queue.remove(id_)
        return removed is not None

    def remove_expired(self, now: float) -> list[int]:
        """Remove the sequences whose deadline has passed, oldest first."""
        if now < self._next_expiry:
            return []
        waiting = [*self._decode_queue, *self._encode_queue]
        expired = sorted(one.id for one in waiting if one.deadline <= now)
        self._next_expiry = min((one.deadline for one in waiting if one.deadline > now), default=float("inf"))
        for id_ in expired:
            self.remove(id_)
        return expired

    def next_batch(self, free_rows: int, held: RowCounts) -> list[int]:
        """Remove the sequences of the next encoder batch from the queue.

        Args:
            free_rows: number of free decoder rows.
            held: the decoder rows that shares and calls have now.

        Returns:
            Ids of the sequences, shortest first; empty if none can be scheduled.
        """
        in_turn, in_reserve = self._select_fitting(free_rows, held)
        for_rows, for_encoder = in_turn + in_reserve, list(self._encode_queue)
        heads = [*in_turn[:1], *in_reserve[:1], *islice(self._encode_queue.fair_order(RowCounts()), 1)]
        if not heads:
            return []
        first = min(heads, key=lambda one: one.id)
        batch = [first]
        longest = real_tokens = first.source_tokens
        # Sorting is stable: of two sequences that fit equally well, the first in fair order wins.
        for one in sorted(for_rows + for_encoder, key=lambda one: abs(one.source_tokens - first.source_tokens)):
            if one is first:
                continue
            padded_tokens = max(longest, one.source_tokens) * (len(batch) + 1)
            # At most half of a batch may be padding: a sequence of a very different length goes
            # into another batch.
            if padded_tokens > min(self._max_batch_tokens, 2 * (real_tokens + one.source_tokens)):
                continue
            batch.append(one)
            longest = max(longest, one.source_tokens)
            real_tokens += one.source_tokens
        for one in batch:
            self._queue_of(one).take(one)
            if one in in_reserve:
                self._reserved_ids.add(one.id)
        return [one.id for one in sorted(batch, key=lambda one: (one.source_tokens, one.id))]

    def _queue_of(self, one: WaitingSequence) -> _Queue:
        return self._decode_queue if one.num_rows else self._encode_queue

    def on_end(self, id_: int) -> None:
        """Release the reserved row of a sequence that has ended, if it has one."""
        self._reserved_ids.discard(id_)

    def _select_fitting(self, free_rows: int, held: RowCounts) -> tuple[list[WaitingSequence], list[WaitingSequence]]:
        """Return the sequences that fit the free rows, and those that fit the reserved rows."""
        in_turn: list[WaitingSequence] = []
        if not (free_rows and len(self._decode_queue)):
            return in_turn, []
        reserved = min(free_rows, self._reserved_rows - len(self._reserved_ids))
        free_rows -= reserved
        for one in self._decode_queue.fair_order(held) if free_rows else ():
            free_rows -= one.num_rows
            if free_rows < 0:
                break
            in_turn.append(one)
        holding = held.copy()
        for one in in_turn:
            holding.add(one.call, one.num_rows)
        in_reserve: list[WaitingSequence] = []
        own_reserve = reserved - (self._reserved_rows + 1) // 2  # rows for callers that have others
        for one in self._decode_queue.heads() if reserved else ():
            # Beam searches get no reserved rows: one would block the rows of several small calls.
            if len(in_reserve) == reserved:
                break
            if one.num_rows > 1 or holding.of_call[one.call]:
                continue
            if holding.of_share[one.share]:
                if own_reserve <= 0:
                    continue
                own_reserve -= 1
            in_reserve.append(one)
            holding.add(one.call, 1)
        return in_turn, in_reserve
