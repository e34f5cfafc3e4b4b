"""Admission: what calls in progress hold is counted, and a call that does not fit is refused at once."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from service.engine.throughput import Throughput
from service.errors import ApiError

REFUSALS_PER_S = 500  # more refusals are delayed
REFUSALS_AT_ONCE = 100
MAX_REFUSAL_DELAY_S = 1.0


class AdmissionController:
    """Counts the sequences, bytes and tokens of one model's calls from their admission to their end.

    It belongs to the event loop's thread. A call that arrives when no other is in progress is admitted whatever its
    size, which has limits of its own: so no call is refused for ever. A large call must leave as much room as it takes:
    so the calls that fill the queue leave room for small ones.
    """

    def __init__(
        self, max_sequences: int, max_bytes: int, max_tokens: int, throughput: Throughput, max_wait_s: float
    ) -> None:
        """Set the limits.

        Args:
            max_sequences: sequences that run or wait.
            max_bytes: bytes of their request bodies.
            max_tokens: their source tokens.
            throughput: measured speed of the model's engine.
            max_wait_s: longest time that the other calls in progress may be expected to delay a new one, in seconds.
        """
        self._max_sequences = max_sequences
        self._max_bytes = max_bytes
        self._max_tokens = max_tokens
        self.throughput = throughput
        self._max_wait_s = max_wait_s
        self._open: set[Reservation] = set()
        self.num_sequences = 0
        self.num_bytes = 0
        self.num_tokens = 0

    def reserve(
        self, sequences: int, num_bytes: int, units: float = 0.0, seconds_left: float = float("inf")
    ) -> "Reservation":
        """Admit a call before anything is spent on it.

        Args:
            sequences: of the call.
            num_bytes: of its body.
            units: estimated work of all its sequences, see `Throughput`.
            seconds_left: until its deadline.

        Raises:
            ApiError: `overloaded`.
        """
        if self._open:
            if self.num_sequences + 2 * sequences - 1 > self._max_sequences:
                raise ApiError("overloaded")
            if self.num_bytes + num_bytes > self._max_bytes:
                raise ApiError("overloaded")
            self._check_time(units, seconds_left)
        reservation = Reservation(sequences, num_bytes, units)
        self._open.add(reservation)
        self.num_sequences += sequences
        self.num_bytes += num_bytes
        return reservation

    def _check_time(self, units: float, seconds_left: float) -> None:
        """Refuse a call that would wait too long or could not finish in time.

        Calls take turns, so each of the others delays a new call by no more work than the new call has itself.
        """
        speed = self.throughput.units_per_s
        if speed is None or not units:
            return
        most_s = len(self._open) * units / speed
        if most_s <= self._max_wait_s and most_s + units / speed <= seconds_left:  # the usual case, without a sum
            return
        wait_s = sum(min(one.units, units) for one in self._open) / speed
        if wait_s > self._max_wait_s:
            message = (
                f"The call would wait about {wait_s:.1f} s; at most {self._max_wait_s:g} s are accepted "
                "(SIGHTLINE_QUEUE_TIMEOUT_S). Retry later."
            )
            raise ApiError("overloaded", message)
        if wait_s + units / speed > seconds_left:
            message = (
                f"The call would take about {wait_s + units / speed:.1f} s, and has {seconds_left:.1f} s left. "
                "Retry later, or allow it more time."
            )
            raise ApiError("overloaded", message)

    def add_tokens(self, reservation: "Reservation", tokens: int) -> None:
        """Count the source tokens that tokenization found.

        Raises:
            ApiError: `overloaded`; the reservation itself is kept until its release.
        """
        if self.num_tokens and self.num_tokens + tokens > self._max_tokens:
            raise ApiError("overloaded")
        self.num_tokens += tokens
        reservation.num_tokens += tokens

    def release(self, reservation: "Reservation") -> None:
        """Release a reservation; a second time does nothing."""
        if reservation in self._open:
            self._open.remove(reservation)
            self.num_sequences -= reservation.num_sequences
            self.num_bytes -= reservation.num_bytes
            self.num_tokens -= reservation.num_tokens


@dataclass(eq=False)
class Reservation:
    """A call's share of one model's limits."""

    num_sequences: int
    num_bytes: int
    units: float  # work that is left
    num_tokens: int = 0


class RefusalPace:
    """Spreads refusals over time if there are very many.

    Clients that repeat a refused call at once would otherwise use up the processor, and delay health checks and the
    calls that were admitted.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = 0.0  # when the next refusal may be sent

    def delay_s(self) -> float:
        """Count a refusal, and return the seconds after which it may be sent."""
        now = self._clock()
        self._next = max(self._next, now - REFUSALS_AT_ONCE / REFUSALS_PER_S)
        self._next = min(self._next + 1 / REFUSALS_PER_S, now + MAX_REFUSAL_DELAY_S)
        return max(0.0, self._next - now)


class ResponseMemory:
    """Bytes that the responses of all calls take together, until their clients have read them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_bytes = 0
        self.lock = threading.Lock()  # responses with attention maps grow on the engine's thread


@dataclass(eq=False)
class ResponseReservation:
    """The bytes that one call's response takes: those that are certain at once, and more as it grows."""

    memory: ResponseMemory
    num_reserved: int = 0
    num_used: int = 0
    is_released: bool = False

    def reserve(self, num_bytes: int) -> None:
        """Reserve bytes that the response is certain to take.

        Raises:
            ApiError: `overloaded`.
        """
        memory = self.memory
        with memory.lock:
            # A response that is alone always fits: it has a limit of its own.
            fits = memory.num_bytes <= self.num_reserved or memory.num_bytes + num_bytes <= memory.limit
            if fits and not self.is_released:
                memory.num_bytes += num_bytes
                self.num_reserved += num_bytes
        if not fits:
            message = (
                f"The responses in progress leave no room for one of {num_bytes} bytes; all together may take "
                f"{self.memory.limit} bytes (SIGHTLINE_MAX_RESPONSE_BYTES). Retry later."
            )
            raise ApiError("overloaded", message)

    def use(self, num_bytes: int) -> bool:
        """Use bytes as the response grows, the reserved ones first; False if there is no room for more."""
        with self.memory.lock:
            if self.is_released:  # the client has left: the engine drops the request before its next step
                return True
            self.num_used += num_bytes
            missing, memory = self.num_used - self.num_reserved, self.memory
            if missing > 0:
                if memory.num_bytes > self.num_reserved and memory.num_bytes + missing > memory.limit:
                    return False
                memory.num_bytes += missing
                self.num_reserved += missing
            return True

    def release(self) -> None:
        with self.memory.lock:
            self.is_released = True
            self.memory.num_bytes -= self.num_reserved
            self.num_reserved = 0
