import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.profiler.answer_length import TYPICAL_ANSWER_TOKENS, AnswerLengths


def test_prior_holds_until_something_was_answered() -> None:
    curve = AnswerLengths().curve
    assert curve.median_tokens == pytest.approx(TYPICAL_ANSWER_TOKENS, rel=0.5)


def test_answers_that_were_cut_off_would_have_been_longer() -> None:
    lengths = AnswerLengths()
    for _ in range(40):
        lengths.observe(32, True)
    assert lengths.curve.median_tokens > 64.0


def test_brief_model_is_found_out() -> None:
    lengths = AnswerLengths()
    for tokens in (8, 9, 10, 11, 12) * 8:
        lengths.observe(tokens, False)
    assert 9.0 <= lengths.curve.median_tokens <= 11.0


def test_cut_and_whole_answers_together_give_the_share_that_goes_on() -> None:
    """Half end at 10 tokens; of those that go on, all reached their limit of 50."""
    lengths = AnswerLengths()
    for _ in range(32):
        lengths.observe(10, False)
        lengths.observe(50, True)
    shares = dict(zip(lengths.curve.tokens, lengths.curve.survival, strict=True))
    assert shares[10.0] == pytest.approx(0.5, abs=0.05)
    assert shares[32.0] == pytest.approx(0.5, abs=0.05)


@given(st.lists(st.tuples(st.integers(-3, 20_000), st.booleans()), max_size=100))
def test_curve_starts_at_one_and_never_rises(answers: list[tuple[int, bool]]) -> None:
    lengths = AnswerLengths()
    for tokens, was_cut in answers:
        lengths.observe(tokens, was_cut)
    curve = lengths.curve
    assert curve.tokens[0] == 0.0
    assert curve.survival[0] == 1.0
    assert list(curve.tokens) == sorted(set(curve.tokens))
    assert list(curve.survival) == sorted(curve.survival, reverse=True)
    assert curve.survival[-1] >= 0.0


def test_no_more_than_a_sixteenth_of_the_answers_is_left_out() -> None:
    lengths = AnswerLengths()
    for seen in range(1, 64):
        lengths.observe(1000, False)
        fresh = AnswerLengths()
        for _ in range(seen):
            fresh.observe(1000, False)
        if seen < 16:
            assert lengths.curve == fresh.curve
        # The share that goes on beyond 512 tells how many answers the curve has seen.
        assert lengths.curve.survival[-5] == pytest.approx(fresh.curve.survival[-5], rel=0.1)
    before = lengths.curve
    for _ in range(5):
        lengths.observe(10, False)
    assert lengths.curve is not before
    assert lengths.curve is lengths.curve
