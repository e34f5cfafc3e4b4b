"""Server-sent events out of the pieces in which they arrived.

Lines end with LF or CRLF. A lone CR, which the standard also allows, no server sends.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """One event: when its last byte arrived, its name and its data."""

    arrived: float
    name: str
    data: bytes


def parse_events(parts: Iterable[tuple[float, bytes]]) -> Iterator[Event]:
    """Yield the whole events in `parts`, however they were cut; an event without its blank line is dropped."""
    rest = b""
    name, data = "message", list[bytes]()
    for arrived, part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            field, _, value = line.removesuffix(b"\r").partition(b":")
            value = value.removeprefix(b" ")
            if field == b"data":
                data.append(value)
            elif field == b"event":
                name = value.decode("utf-8", "replace")
            elif not field and not value and not line.startswith(b":"):
                if data:
                    yield Event(arrived, name, b"\n".join(data))
                name, data = "message", []
