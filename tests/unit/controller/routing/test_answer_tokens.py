import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.domain.answer_length import AnswerLengthCurve
from controller.routing.answer_tokens import FleetAnswerLengths, expected_answer_tokens, lengths_of
from tests.unit.controller.routing.clusters import destination


def _integral(curve: AnswerLengthCurve, limit: float) -> float:
    """Mean length within a limit: the area under the curve up to it."""
    ends = [*curve.tokens[1:], float("inf")]
    return sum(
        share * max(0.0, min(end, limit) - start)
        for start, end, share in zip(curve.tokens, ends, curve.survival, strict=True)
    )


@st.composite
def _curve(draw: st.DrawFn) -> AnswerLengthCurve:
    steps = draw(st.lists(st.integers(1, 400), max_size=6))
    shares = draw(st.lists(st.floats(0.0, 1.0), min_size=len(steps), max_size=len(steps)))
    tokens = np.cumsum([0, *steps])
    return AnswerLengthCurve(
        tuple(map(float, tokens)), (1.0, *sorted(map(float, shares), reverse=True))
    )


_FLEETS = st.lists(st.lists(st.none() | _curve(), min_size=4, max_size=4), min_size=1, max_size=4)
_LIMITS = st.lists(st.sampled_from((1.0, 7.0, 64.0, 400.0, 8192.0)), min_size=1, max_size=5)


@given(_FLEETS, _LIMITS)
def test_lengths_are_the_area_under_each_destinations_curve(
    fleets: list[list[AnswerLengthCurve | None]], limits: list[float]
) -> None:
    """One fleet after the other, as its curves come and change."""
    last = None
    for curves in fleets:
        destinations = [
            destination("a", f"model-{at}", answer_lengths=curve) for at, curve in enumerate(curves)
        ]
        last = lengths_of(destinations, last)
        mean, median = last.within(np.array(limits))
        fresh_mean, fresh_median = lengths_of(destinations).within(np.array(limits))
        assert (mean.tolist(), median.tolist()) == (fresh_mean.tolist(), fresh_median.tolist())
        for r, limit in enumerate(limits):
            for d, curve in enumerate(curves):
                if curve is None:
                    known = expected_answer_tokens(np.array(limit))
                    assert (mean[r, d], median[r, d]) == (known, known)
                else:
                    assert mean[r, d] == pytest.approx(_integral(curve, limit))
                    assert median[r, d] == min(limit, curve.median_tokens)


def test_a_curve_that_moved_leaves_the_others_to_the_last_bit() -> None:
    first, second = (AnswerLengthCurve((0.0, 10.0 + at), (1.0, 0.3)) for at in range(2))
    longer = AnswerLengthCurve((0.0, 4.0, 9.0, 30.0), (1.0, 0.8, 0.55, 0.1))
    limits = np.array([5.0, 100.0])

    def told(last: FleetAnswerLengths | None, *curves: AnswerLengthCurve) -> FleetAnswerLengths:
        named = zip("xyz", curves, strict=False)
        return lengths_of([destination("a", x, answer_lengths=curve) for x, curve in named], last)

    original = told(None, first, second)
    before, _ = original.within(limits)
    moved = told(original, longer, second)
    after, median = moved.within(limits)
    assert after[:, 1].tolist() == before[:, 1].tolist()
    assert median[:, 0].tolist() == [5.0, 30.0]
    shifted, _ = told(moved, second, longer).within(limits)
    assert shifted.tolist() == after[:, ::-1].tolist()
