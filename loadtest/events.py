"""Parser of server-sent events with times of arrival.

Lines end with LF or CRLF. The standard also allows a lone CR, which no known server sends.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """Event with its name and data; `arrived` is the arrival time of its last byte."""

    arrived: float
    name: str
    data: bytes


def parse_events(parts: Iterable[tuple[float, bytes]]) -> Iterator[Event]:
    """Yield the complete events in `parts`; an event may be split over parts.

    An event without the final blank line is dropped.
    """
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
