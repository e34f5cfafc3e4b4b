"""The door in front of one model's queue: what is held there is counted, and more than fits is refused at once."""

from types import TracebackType
from typing import Self

from service.errors import ApiError


class Door:
    """Counts the sequences, bytes and tokens of one model's calls from their admission to their end.

    Used from the event loop's thread alone. A call that meets an empty door is let in whatever its size, which has
    limits of its own: so none is refused for ever.
    """

    def __init__(self, max_sequences: int, max_bytes: int, max_tokens: int) -> None:
        """`max_sequences` and `max_tokens` count what runs as well as what waits."""
        self._max_sequences = max_sequences
        self._max_bytes = max_bytes
        self._max_tokens = max_tokens
        self.num_sequences = 0
        self.num_bytes = 0
        self.num_tokens = 0

    def reserve(self, sequences: int, num_bytes: int) -> "Reservation":
        """Take a place before anything is spent on the call.

        Raises:
            ApiError: `overloaded`.
        """
        is_full = self.num_sequences + sequences > self._max_sequences or self.num_bytes + num_bytes > self._max_bytes
        if self.num_sequences and is_full:
            raise ApiError("overloaded")
        self.num_sequences += sequences
        self.num_bytes += num_bytes
        return Reservation(self, sequences, num_bytes)

    def has_room_for(self, tokens: int) -> bool:
        return not self.num_tokens or self.num_tokens + tokens <= self._max_tokens


class Reservation:
    """A call's place; a context manager that gives it back at its end, once."""

    def __init__(self, door: Door, sequences: int, num_bytes: int) -> None:
        self._door = door
        self._sequences = sequences
        self._bytes = num_bytes
        self._tokens = 0
        self._is_released = False

    def add_tokens(self, tokens: int) -> None:
        """Count what tokenising found.

        Raises:
            ApiError: `overloaded`; the place itself is kept until `release`.
        """
        if not self._door.has_room_for(tokens):
            raise ApiError("overloaded")
        self._door.num_tokens += tokens
        self._tokens += tokens

    def release(self) -> None:
        """Give the place back; a second time does nothing."""
        if self._is_released:
            return
        self._is_released = True
        self._door.num_sequences -= self._sequences
        self._door.num_bytes -= self._bytes
        self._door.num_tokens -= self._tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
