import pytest

from sightline.loadtest.events import Event, parse_events

STREAM = 'data: {"text": "Mädchen"}\n\n: keep-alive\n\nevent: error\ndata: a\ndata: b\n\ndata: [DONE]\n\n'.encode()
EVENTS = [("message", '{"text": "Mädchen"}'.encode()), ("error", b"a\nb"), ("message", b"[DONE]")]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_events_are_complete_with_any_split_of_their_bytes(size: int, line_end: bytes) -> None:
    stream = STREAM.replace(b"\n", line_end)
    parts = [(float(i), stream[i : i + size]) for i in range(0, len(stream), size)]
    assert [(event.name, event.data) for event in parse_events(parts)] == EVENTS


def test_an_event_arrives_with_the_piece_that_ends_it() -> None:
    parts = [(1.0, b"data: a\n"), (2.0, b"\ndata: b\n\nda"), (3.0, b"ta: c\n\n")]
    assert list(parse_events(parts)) == [
        Event(2.0, "message", b"a"),
        Event(2.0, "message", b"b"),
        Event(3.0, "message", b"c"),
    ]


def test_an_event_without_its_blank_line_is_dropped() -> None:
    assert list(parse_events([(0.0, b"data: a\n\ndata: b\n")])) == [Event(0.0, "message", b"a")]
