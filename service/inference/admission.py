"""Admission control: count what calls in progress hold, and reject a call that does not fit."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain

from sightline.service.api_errors import ApiError, Limit
from sightline.service.engine.request import FailureCode
from sightline.service.engine.throughput import Throughput

REJECTIONS_PER_S = 100  # rejections beyond this rate are delayed
REJECTION_BURST = 100
MAX_REJECTION_DELAY_S = 1.0
MAX_LATER_S = 10.0  # added to the Retry-After of delayed rejections
SLICES = 4  # a call holds at most 1 / SLICES of the waiting sequences and source tokens
ADDRESS_SHARE = 3  # an address must leave 1 / ADDRESS_SHARE of what it holds free for others


@dataclass(eq=False)
class AdmissionController:
    """Counts the sequences, bytes and tokens of one model's calls in progress.

    It is used only on the event loop's thread. If no other call is in progress, a call is always
    admitted, so that no call is rejected forever; its size is limited elsewhere. A call of n
    sequences is admitted only if n - 1 places stay free after it, so that large calls leave places
    for small ones. A call counts with at most a quarter of the tokens, because the engine gets only
    a slice of its sequences at a time, and one that is alone with at most half of the sequences and
    bytes. A caller's next call is admitted only if as many sequences, bytes and tokens stay free as
    the caller has without it, so that a caller holds at most half of each limit. Without API keys,
    a client's address must leave a third as many free, and so holds at most three quarters: it may
    be that of a proxy.
    """

    max_sequences: int  # running and waiting ones
    max_bytes: int  # of their request bodies
    max_tokens: int  # of their sources
    throughput: Throughput
    max_wait_s: float  # expected wait of a new call for other calls
    # Error of admitted calls that can no longer use the engine, because the model is unloaded.
    close_code: FailureCode | None = None
    num_sequences: int = 0
    num_bytes: int = 0
    num_tokens: int = 0
    _open: "set[Reservation]" = field(default_factory=set)
    # Sums of the calls of an API key, or of an address without keys.
    _of_holder: "dict[str, Reservation]" = field(default_factory=dict)

    @property
    def num_calls(self) -> int:
        return len(self._open)

    def reserve(
        self,
        sequences: int,
        num_bytes: int,
        units: float = 0.0,
        seconds_left: float = float("inf"),
        caller: str = "",
        address: str = "",
    ) -> "Reservation":
        """Admit a call before it is tokenized, or reject it with `overloaded`.

        `units` is the estimated work of all its sequences, in units of `Throughput`.
        """
        reservation = Reservation(sequences, num_bytes, units, caller, address)
        if self._open:
            self._check(reservation, seconds_left)
        else:
            reservation.num_sequences = min(sequences, max(1, self.max_sequences // 2))
            reservation.num_bytes = min(num_bytes, max(1, self.max_bytes // 2))
        self._open.add(reservation)
        self._count(reservation)
        return reservation

    def _count(self, reservation: "Reservation", sign: int = 1) -> None:
        """Add a call to the sums of all calls and of its holder, or subtract it."""
        holder = reservation.caller or reservation.address
        own = self._of_holder.setdefault(holder, Reservation(0, 0, 0.0))
        for total in (self, own):
            total.num_sequences += sign * reservation.num_sequences
            total.num_bytes += sign * reservation.num_bytes
            total.num_tokens += sign * reservation.num_tokens
        if not (own.num_sequences or own.num_bytes or own.num_tokens):
            del self._of_holder[holder]

    def resize(
        self, reservation: "Reservation", sequences: int, units: float = 0.0, seconds_left: float = float("inf")
    ) -> None:
        """Change the sequences and the work of an admitted call, before it is tokenized again.

        The call is checked again like a new one, without its own share. Its tokens are released. If
        it is rejected, it keeps its sequences and work, and the caller must still release them.
        """
        self._open.remove(reservation)
        self._count(reservation, -1)
        reservation.num_tokens = 0
        try:
            if self._open:
                self._check(Reservation(sequences, 0, units, reservation.caller, reservation.address), seconds_left)
            else:
                sequences = min(sequences, max(1, self.max_sequences // 2))
            reservation.num_sequences, reservation.units = sequences, units
        finally:
            self._open.add(reservation)
            self._count(reservation)

    def _check(self, new: "Reservation", seconds_left: float) -> None:
        """Reject a call that does not fit, would wait too long, or would miss its deadline.

        The scheduler serves callers, or calls, in turn. Therefore each other one delays a new call
        by at most as much work as the new call has.
        """
        places, units = 2 * new.num_sequences - 1, new.units
        own = self._excess("num_sequences", places, self.max_sequences, new)
        if own is not None:
            raise queue_full(
                "waiting_sequences",
                f"{self.num_sequences} of {self.max_sequences} sequences are running or waiting{own} "
                f"(SIGHTLINE_MAX_WAITING_SEQUENCES), and a call of {new.num_sequences} needs space for {places}",
            )
        own = self._excess("num_bytes", new.num_bytes, self.max_bytes, new)
        if own is not None:
            raise queue_full(
                "waiting_bytes",
                f"{self.num_bytes} bytes of request bodies are held{own}, and {new.num_bytes} more exceed the limit of "
                f"{self.max_bytes} (16 MiB, or SIGHTLINE_MAX_BODY_BYTES if it is more)",
            )
        speed = self.throughput.units_per_s
        if speed is None or not units:
            return
        most_s = len(self._open) * units / speed
        if most_s <= self.max_wait_s and most_s + units / speed <= seconds_left:  # usual case: skip the sum
            return
        wait_s = sum(min(work, units) for work in self._work_of_others(new.caller)) / speed
        if wait_s > self.max_wait_s:
            message = (
                f"The call would wait about {wait_s:.1f} s; the limit is {self.max_wait_s:g} s "
                "(SIGHTLINE_QUEUE_TIMEOUT_S). Retry later."
            )
            raise ApiError("overloaded", message, limit="queue_time")
        if wait_s + units / speed > seconds_left:
            message = (
                f"The call would take about {wait_s + units / speed:.1f} s, but its deadline is in "
                f"{seconds_left:.1f} s. Retry later, or set a longer timeout."
            )
            raise ApiError("overloaded", message, limit="deadline")

    def _excess(self, name: str, more: int, limit: int, new: "Reservation") -> str | None:
        """Return None if `more` of the counter `name` fit into a limit, or a text for errors.

        The API key of `new` must leave as much free as it has already, or its address a part of it.
        """
        total = getattr(self, name)
        if total + more > limit:
            return ""
        holder, part = (new.caller, 1) if new.caller else (new.address, ADDRESS_SHARE)
        if holder and total + total // part + more > limit:  # otherwise it fits even if all calls are the holder's
            own = getattr(self._of_holder[holder], name) if holder in self._of_holder else 0
            if total + own // part + more > limit:
                text = "API key, and" if new.caller else "address, and a third"
                return f", {own} of them for this {text} as many must stay free"
        return None

    def _work_of_others(self, caller: str) -> Iterable[float]:
        """Return the remaining work of each other caller, and of each call of the same caller."""
        by_caller: dict[str, float] = {}
        for reservation in self._open:
            if reservation.caller and reservation.caller != caller:
                by_caller[reservation.caller] = by_caller.get(reservation.caller, 0.0) + reservation.units
        own = (
            reservation.units for reservation in self._open if not reservation.caller or reservation.caller == caller
        )
        return chain(own, by_caller.values())

    def add_tokens(self, reservation: "Reservation", tokens: int) -> None:
        """Add the source tokens of a call to its reservation, once the call is tokenized.

        Of very many, only a slice counts, so that one call does not use up the limit. The
        reservation of a call that is rejected here must still be released.
        """
        tokens = min(tokens, max(1, self.max_tokens // SLICES))
        own = self._excess("num_tokens", tokens, self.max_tokens, reservation) if self.num_tokens else None
        if own is not None:
            raise queue_full(
                "waiting_tokens",
                f"{self.num_tokens} source tokens are held{own}, and {tokens} more exceed the limit of "
                f"{self.max_tokens} (256 times SIGHTLINE_MAX_WAITING_SEQUENCES)",
            )
        self._count(reservation, -1)
        reservation.num_tokens += tokens
        self._count(reservation)

    def release(self, reservation: "Reservation") -> None:
        """Release a reservation. Does nothing if it is already released."""
        if reservation in self._open:
            self._open.remove(reservation)
            self._count(reservation, -1)


def queue_full(limit: Limit, reason: str) -> ApiError:
    return ApiError("overloaded", f"The queue is full: {reason}. Retry later.", limit=limit)


@dataclass(eq=False)
class Reservation:
    """Sequences, bytes, work and tokens of one call that count towards a model's limits."""

    num_sequences: int
    num_bytes: int
    units: float  # remaining work
    caller: str = ""  # label of an API key
    address: str = ""  # of the client
    num_tokens: int = 0


class RejectionPacer:
    """Delays rejections if there are very many.

    Otherwise clients that retry a rejected call immediately would occupy the CPU, and delay health
    checks and admitted calls. But a rejection that is delayed holds its connection: clients that
    send without waiting for responses would open more, up to the limit of connections, and each of
    them would cost more than an immediate rejection. So their number is limited, too.
    """

    def __init__(self, max_delayed: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`max_delayed` rejections may be delayed at the same time; others are sent at once."""
        self._max_delayed = max_delayed
        self._clock = clock
        self._next = 0.0  # time at which the next rejection may be sent
        self._num_delayed = 0

    async def wait(self) -> int:
        """Delay a rejection, and return how many seconds later than usual its client should retry,
        so that the calls of clients that do so do not exceed the rate.
        """
        now = self._clock()
        self._next = max(self._next, now - REJECTION_BURST / REJECTIONS_PER_S)
        self._next = min(self._next + 1 / REJECTIONS_PER_S, now + MAX_REJECTION_DELAY_S + MAX_LATER_S)
        ahead = self._next - now
        delay = min(ahead, MAX_REJECTION_DELAY_S)
        if delay > 0 and self._num_delayed < self._max_delayed:
            self._num_delayed += 1
            try:
                await asyncio.sleep(delay)
            finally:
                self._num_delayed -= 1
        return int(max(0.0, ahead - delay))


class ResponseMemory:
    """Memory that the responses of all calls hold until their clients have read them.

    A response that is alone may have any size, which is limited elsewhere. It counts with at most
    three quarters of the limit, so that it leaves space for others.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.max_counted = limit - limit // 4  # of one response
        self.num_bytes = 0
        self.lock = threading.Lock()  # the engine's thread reserves memory for attention maps


@dataclass(eq=False)
class ResponseReservation:
    """Memory of one call's response, reserved in advance and as the response grows."""

    memory: ResponseMemory
    num_reserved: int = 0
    num_counted: int = 0  # of them, in the memory of all responses
    num_used: int = 0
    is_released: bool = False

    def reserve(self, num_bytes: int) -> None:
        """Reserve bytes that the response will certainly need, or reject it with `overloaded`."""
        memory = self.memory
        with memory.lock:
            size, others = self.num_reserved + num_bytes, memory.num_bytes - self.num_counted
            # A response that counts as much as possible was alone when it grew so large.
            fits = not others or others + size <= memory.limit or self.num_counted >= memory.max_counted
            if fits and not self.is_released:
                self.num_reserved, self.num_counted = size, min(size, memory.max_counted)
                memory.num_bytes = others + self.num_counted
        if not fits:
            message = (
                f"The responses in progress leave too little memory for {num_bytes} more bytes; all responses "
                f"together may hold {self.memory.limit} bytes (an eighth of SIGHTLINE_MEMORY_BYTES). Retry later."
            )
            raise ApiError("overloaded", message, limit="response_bytes")

    def use(self, num_bytes: int) -> bool:
        """Use bytes as the response grows, reserved ones first; return False at the limit."""
        with self.memory.lock:
            if self.is_released:  # the call has ended: the engine drops the request before its next step
                return True
            self.num_used += num_bytes
            missing = self.num_used - self.num_reserved
        try:
            if missing > 0:
                self.reserve(missing)
        except ApiError:
            return False
        return True

    def release(self) -> None:
        with self.memory.lock:
            self.is_released = True
            self.memory.num_bytes -= self.num_counted
            self.num_reserved = self.num_counted = 0
