"""Admission: what calls in progress hold is counted, and a call that does not fit is refused at once."""

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

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
        self._throughput = throughput
        self._max_wait_s = max_wait_s
        self._open: set[Reservation] = set()
        self.num_sequences = 0
        self.num_bytes = 0
        self.num_tokens = 0

    @property
    def throughput(self) -> Throughput:
        return self._throughput

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
        reservation = Reservation(self, sequences, num_bytes, units)
        self._open.add(reservation)
        self.num_sequences += sequences
        self.num_bytes += num_bytes
        return reservation

    def _check_time(self, units: float, seconds_left: float) -> None:
        """Refuse a call that would wait too long or could not finish in time.

        Calls take turns, so each of the others delays a new call by no more work than the new call has itself.
        """
        speed = self._throughput.units_per_s
        if speed is None or not units:
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

    def has_room_for(self, tokens: int) -> bool:
        return not self.num_tokens or self.num_tokens + tokens <= self._max_tokens

    def close(self, reservation: "Reservation") -> None:
        self._open.discard(reservation)


class Reservation:
    """A call's share of one model's limits; a context manager that releases it at its end, once."""

    def __init__(self, controller: AdmissionController, sequences: int, num_bytes: int, units: float) -> None:
        self._controller = controller
        self._sequences = sequences
        self._bytes = num_bytes
        self._tokens = 0
        self._is_released = False
        self.units = units  # work that is left

    def add_tokens(self, tokens: int) -> None:
        """Count the source tokens that tokenising found.

        Raises:
            ApiError: `overloaded`; the reservation itself is kept until `release`.
        """
        if not self._controller.has_room_for(tokens):
            raise ApiError("overloaded")
        self._controller.num_tokens += tokens
        self._tokens += tokens

    def finish(self, units: float) -> None:
        """Note that a sequence has ended; `units` is its work."""
        self.units -= units

    def release(self) -> None:
        """Release everything; a second time does nothing."""
        if self._is_released:
            return
        self._is_released = True
        self._controller.close(self)
        self._controller.num_sequences -= self._sequences
        self._controller.num_bytes -= self._bytes
        self._controller.num_tokens -= self._tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


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


class ResponseReservation:
    """The bytes that one call's response takes: those that are certain at once, and more as it grows."""

    def __init__(self, memory: ResponseMemory) -> None:
        self._memory = memory
        self._reserved = 0
        self._used = 0
        self._is_released = False

    def reserve(self, num_bytes: int) -> None:
        """Reserve bytes that the response is certain to take.

        Raises:
            ApiError: `overloaded`.
        """
        with self._memory.lock:
            fits = self._take(num_bytes)
        if not fits:
            message = (
                f"The responses in progress leave no room for one of {num_bytes} bytes; all together may take "
                f"{self._memory.limit} bytes (SIGHTLINE_MAX_RESPONSE_BYTES). Retry later."
            )
            raise ApiError("overloaded", message)

    def use(self, num_bytes: int) -> bool:
        """Use bytes as the response grows, the reserved ones first; False if there is no room for more."""
        with self._memory.lock:
            self._used += num_bytes
            return self._used <= self._reserved or self._take(self._used - self._reserved)

    def _take(self, num_bytes: int) -> bool:
        if self._is_released:  # the client has left: the engine drops the request before its next step
            return True
        memory = self._memory
        # A response that is alone always fits: it has a limit of its own.
        if memory.num_bytes > self._reserved and memory.num_bytes + num_bytes > memory.limit:
            return False
        memory.num_bytes += num_bytes
        self._reserved += num_bytes
        return True

    def release(self) -> None:
        with self._memory.lock:
            self._is_released = True
            self._memory.num_bytes -= self._reserved
            self._reserved = 0
