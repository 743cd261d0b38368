import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.engine.remote.event_stream import EventStream

BODY = (
    "\N{ZERO WIDTH NO-BREAK SPACE}: a comment\r\n"
    "event: message\r\ndata: first h\u00e9llo \U0001f30d\r\n\r\n"
    "id: 7\ndata:second\ndata: line\n\n\n"
    "data: third\r\r"
    "data: [DONE]\n"
).encode()
EVENTS = ["first h\u00e9llo \U0001f30d", "second\nline", "third", "[DONE]"]


def events_of(pieces: list[bytes]) -> list[str]:
    stream = EventStream()
    return [data for piece in pieces for data in stream.feed(piece)] + stream.finish()


@given(st.lists(st.integers(0, len(BODY)), max_size=40))
def test_events_are_the_same_wherever_the_body_is_cut(cuts: list[int]) -> None:
    """S10."""
    borders = [0, *sorted(cuts), len(BODY)]
    pieces = [BODY[a:b] for a, b in itertools.pairwise(borders)]
    assert events_of(pieces) == EVENTS


def test_event_comes_with_the_empty_line_after_it() -> None:
    stream = EventStream()
    assert stream.feed(b"data: now\n") == []
    assert stream.feed(b"\n") == ["now"]
    assert stream.finish() == []


def test_comments_alone_are_no_events() -> None:
    assert events_of([b": waiting\n\n", b": waiting\n\n", b"retry: 5\n\n"]) == []


def test_what_is_not_utf8_is_refused() -> None:
    with pytest.raises(ValueError, match="utf-8"):
        EventStream().feed(b"data: \xff\n")


def test_line_without_an_end_is_refused_before_it_fills_the_memory() -> None:
    stream = EventStream()
    for _ in range(16):
        stream.feed(b"x" * 65_536)
    with pytest.raises(ValueError, match="longer than"):
        stream.feed(b"x")
