"""Scheduling of waiting sequences into encoder batches.

The scheduler works on plain numbers: it has no access to tensors, clocks or sockets.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TypeVar

Call = tuple[str, str]  # caller and request id
T = TypeVar("T")
# Weight of the time of a model with running rows. Beside it, a model that only encodes gets seven
# twelfths of the time.
ROWS_WEIGHT = 1.4


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


class Turns:
    """Divides the time of one thread among the models that have work.

    The model that has used the least time runs next. One that had no work gets no compensation for
    that time. If the rows of a model have waited for half of their maximum, the model also goes
    before those that have used up to that maximum less.
    """

    def __init__(self) -> None:
        self._used: dict[str, float] = {}  # weighted time in seconds by model, from a common start
        self._least = 0.0  # the least of them among the models that had work
        self._ended: dict[str, float] = {}  # end of the last turn by model
        self._turn = ("", 0.0, 1.0)  # model, start and weight of the turn that runs

    def next(self, max_waits: Mapping[str, float], now: float) -> tuple[str, float]:
        """Begin the turn of a model; return it, and the time until rows of others wait too long.

        Args:
            max_waits: the models that have work, with the longest time that their running rows
                should wait for their next step; infinite without rows.
        """
        for model in max_waits:
            self._used[model] = max(self._used.get(model, 0.0), self._least)
        self._least = min(self._used[model] for model in max_waits)
        left = {model: wait - (now - self._ended.get(model, now)) for model, wait in max_waits.items()}

        def rank(model: str) -> float:
            is_late = left[model] < max_waits[model] / 2
            return self._used[model] - (max_waits[model] if is_late else 0.0)

        model = min(max_waits, key=rank)
        self._turn = model, now, 1.0 if max_waits[model] == math.inf else ROWS_WEIGHT
        return model, max(0.0, min((left[other] for other in left if other != model), default=math.inf))

    def end(self, now: float) -> None:
        """End the turn that runs."""
        model, started, weight = self._turn
        self._used[model] += weight * (now - started)
        self._ended[model] = now


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

    def add(self, sequence: WaitingSequence) -> None:
        self._by_id[sequence.id] = sequence
        self._shares.setdefault(sequence.share, {}).setdefault(sequence.call, {})[sequence.id] = sequence

    def remove(self, id_: int) -> WaitingSequence | None:
        sequence = self._by_id.pop(id_, None)
        if sequence is not None:
            of_share = self._shares[sequence.share]
            of_call = of_share[sequence.call]
            del of_call[id_]
            if not of_call:
                del of_share[sequence.call]
            if not of_share:
                del self._shares[sequence.share]
        return sequence

    def take(self, sequence: WaitingSequence) -> None:
        """Remove a scheduled sequence; move its share and its call to the end of the order."""
        self.remove(sequence.id)
        if sequence.share in self._shares:
            of_share = self._shares[sequence.share] = self._shares.pop(sequence.share)
            if sequence.call in of_share:
                of_share[sequence.call] = of_share.pop(sequence.call)
        self._oldest_is_next = not self._oldest_is_next

    def fair_order(self, held: RowCounts) -> Iterator[WaitingSequence]:
        """Iterate over the sequences in fair order.

        Every second sequence is the oldest one. The others belong to the share with the fewest
        rows, and in it to the call with the fewest rows; among several, to the one that was served
        least recently. Therefore a small call does not wait for all sequences of a large call or of
        another caller, and a large call makes progress while small calls arrive.
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
                call = next(sequence.call for sequence in ages if sequence.id not in taken)
            else:
                shares = (share for share in self._shares if share not in ended_shares)
                share = _least(shares, lambda share: (rows.of_share.get(share, 0), 0))
                ended = ended_calls.get(share, ())
                calls = (call for call in self._shares[share] if call not in ended)
                call = _least(calls, lambda call: (rows.of_call.get(call, 0), turns.get(call, 0)))
            share = share_of(call)
            if call not in following:
                following[call] = iter(self._shares[share][call].values())
            sequence = next(following[call])
            yield sequence
            oldest_is_next = not oldest_is_next
            rows.add(call, sequence.num_rows)
            taken.add(sequence.id)
            turns[call] = len(taken)
            if sequence.id == next(reversed(self._shares[share][call])):
                ended_calls.setdefault(share, set()).add(call)
                if len(ended_calls[share]) == len(self._shares[share]):
                    ended_shares.add(share)


def _least(candidates: Iterable[T], rank: Callable[[T], tuple[int, int]]) -> T:
    """Return the first candidate with the lowest rank, without a look at those after one of the
    rank (0, 0), which no other is below.
    """
    best, lowest = None, None
    for candidate in candidates:
        its = rank(candidate)
        if lowest is None or its < lowest:
            best, lowest = candidate, its
            if its == (0, 0):
                break
    assert best is not None
    return best


class Scheduler:
    """A queue of sequences that is fair between callers and calls, drained in encoder batches.

    Sequences that need decoder rows are scheduled in the order of `_Queue.fair_order`; none
    overtakes another that waits for rows. Some rows are reserved for sequences with one row whose
    call has no row yet, so that a small call does not wait until rows are released. At least half
    of them are for callers that have no row at all. Encode-only sequences can overtake all others.
    Each batch contains the older of the first sequences of both kinds, so that no sequence starves.
    The rest of the batch is chosen by length.
    """

    def __init__(self, max_batch_tokens: int, reserved_rows: int = 0) -> None:
        """Create an empty queue, with `reserved_rows` decoder rows for calls without rows.

        A sequence that is longer than `max_batch_tokens`, padding included, is a batch of its own.
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
        expired = sorted(seq.id for seq in waiting if seq.deadline <= now)
        self._next_expiry = min((seq.deadline for seq in waiting if seq.deadline > now), default=float("inf"))
        for id_ in expired:
            self.remove(id_)
        return expired

    def next_batch(self, free_rows: int, held: RowCounts, most_tokens: float = math.inf) -> list[int]:
        """Remove the next encoder batch; return its ids, shortest sequence first, or none.

        It has at most `most_tokens`, padding included, but always one sequence.
        """
        most_tokens = min(most_tokens, self._max_batch_tokens)
        in_turn, in_reserve = self._select_fitting(free_rows, held)
        for_rows, for_encoder = in_turn + in_reserve, list(self._encode_queue)
        heads = [*in_turn[:1], *in_reserve[:1], *islice(self._encode_queue.fair_order(RowCounts()), 1)]
        if not heads:
            return []
        first = min(heads, key=lambda head: head.id)
        batch = [first]
        longest = real_tokens = first.source_tokens
        # Sorting is stable: of two sequences that fit equally well, the first in fair order wins.
        for sequence in sorted(for_rows + for_encoder, key=lambda seq: abs(seq.source_tokens - first.source_tokens)):
            if sequence is first:
                continue
            padded_tokens = max(longest, sequence.source_tokens) * (len(batch) + 1)
            # At most half of a batch may be padding: very different lengths need several batches.
            if padded_tokens > min(most_tokens, 2 * (real_tokens + sequence.source_tokens)):
                continue
            batch.append(sequence)
            longest = max(longest, sequence.source_tokens)
            real_tokens += sequence.source_tokens
        for sequence in batch:
            self._queue_of(sequence).take(sequence)
            if sequence in in_reserve:
                self._reserved_ids.add(sequence.id)
        return [sequence.id for sequence in sorted(batch, key=lambda sequence: (sequence.source_tokens, sequence.id))]

    def _queue_of(self, sequence: WaitingSequence) -> _Queue:
        return self._decode_queue if sequence.num_rows else self._encode_queue

    def on_end(self, id_: int) -> None:
        """Release the reserved row of a sequence that has ended, if it has one."""
        self._reserved_ids.discard(id_)

    def _select_fitting(self, free_rows: int, held: RowCounts) -> tuple[list[WaitingSequence], list[WaitingSequence]]:
        """Return the sequences that fit the free rows, and those that fit the reserved rows."""
        in_turn: list[WaitingSequence] = []
        reserved = min(free_rows, self._reserved_rows - len(self._reserved_ids))
        free_rows -= reserved
        for sequence in self._decode_queue.fair_order(held) if free_rows else ():
            free_rows -= sequence.num_rows
            if free_rows < 0:
                break
            in_turn.append(sequence)
        holding = held.copy()
        for sequence in in_turn:
            holding.add(sequence.call, sequence.num_rows)
        in_reserve: list[WaitingSequence] = []
        own_reserve = reserved - (self._reserved_rows + 1) // 2  # rows for callers that have others
        for sequence in self._decode_queue.heads() if reserved else ():
            # Beam searches get no reserved rows: one would block the rows of several small calls.
            if len(in_reserve) == reserved:
                break
            if sequence.num_rows > 1 or holding.of_call[sequence.call]:
                continue
            if holding.of_share[sequence.share]:
                if own_reserve <= 0:
                    continue
                own_reserve -= 1
            in_reserve.append(sequence)
            holding.add(sequence.call, 1)
        return in_turn, in_reserve
