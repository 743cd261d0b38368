import itertools

from hypothesis import given
from hypothesis import strategies as st

from edge_agent.engine.answer_text import AnswerText

ALPHABET = "ab€🐦"


def cut(data: bytes, places: list[int]) -> list[bytes]:
    borders = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in itertools.pairwise(borders)]


@given(
    text=st.text(ALPHABET, max_size=40),
    stop=st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3),
    places=st.lists(st.integers(0, 1000), max_size=40),
)
def test_what_is_shown_does_not_depend_on_where_the_tokens_end(
    text: str, stop: list[str], places: list[int]
) -> None:
    """S10, and stop strings across the borders of tokens."""
    answer = AnswerText(stop)
    shown = ""
    for piece in cut(text.encode(), places):
        shown += answer.feed(piece)
        assert text.startswith(shown)
        assert not any(s in shown for s in stop)
    if not answer.is_stopped:
        shown += answer.finish()
        assert shown == text
    else:
        assert any(text[len(shown) :].startswith(s) for s in stop)
    assert not any(s in shown for s in stop)


def test_a_character_is_shown_only_when_its_last_byte_has_come() -> None:
    """S10."""
    answer = AnswerText()
    pieces = [bytes([byte]) for byte in "🐦!".encode()]
    assert [answer.feed(piece) for piece in pieces] == ["", "", "", "🐦", "!"]


def test_a_character_that_is_never_completed_is_dropped() -> None:
    answer = AnswerText()
    assert answer.feed("ok €".encode()[:-1]) == "ok "
    assert answer.finish() == ""


def test_text_that_cannot_become_a_stop_string_is_not_held_back() -> None:
    answer = AnswerText(["\n\n", "END"])
    assert answer.feed(b"one\n") == "one"
    assert answer.feed(b"two E") == "\ntwo "
    assert answer.feed(b"N") == ""
    assert answer.feed(b"Z") == "ENZ"


def test_the_earliest_of_several_stop_strings_counts() -> None:
    answer = AnswerText(["later", "soon"])
    assert answer.feed(b"not soon but later") == "not "
    assert answer.is_stopped
    assert answer.feed(b"more") == ""
    assert answer.finish() == ""


def test_bytes_that_are_no_text_become_replacement_characters() -> None:
    answer = AnswerText()
    assert answer.feed(b"a\xffb") == "a\N{REPLACEMENT CHARACTER}b"
