import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.domain.batch import Weights

shares = st.floats(0.0, 1e6)


@given(shares, shares, shares, shares)
def test_weights_keep_their_proportions_and_sum_to_one(
    quality: float, cost: float, energy: float, time: float
) -> None:
    given_weights = (quality, cost, energy, time)
    total = sum(given_weights)
    if total == 0:
        with pytest.raises(ValueError, match="above 0"):
            Weights.scaled(*given_weights)
        return
    weights = Weights.scaled(*given_weights).as_tuple()
    assert math.isclose(sum(weights), 1.0, rel_tol=1e-9)
    assert weights == pytest.approx([value / total for value in given_weights])


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", range(4))
def test_weight_that_is_negative_or_not_finite_is_refused(bad: float, position: int) -> None:
    values = [1.0, 1.0, 1.0, 1.0]
    values[position] = bad
    with pytest.raises(ValueError, match="finite and not negative"):
        Weights.scaled(*values)


def test_weights_too_large_to_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        Weights.scaled(1e308, 1e308, 1e308, 1e308)
