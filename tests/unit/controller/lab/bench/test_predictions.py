import numpy as np
import pytest

from controller.lab.bench.predictions import Observation, judged, rank_correlation


def observation(predicted: float, measured: float, batch: str = "b1") -> Observation:
    return Observation(0, batch, "pi", "small", predicted, measured, 10, 20)


def test_figures_are_those_worked_by_hand() -> None:
    report = judged([observation(1.0, 1.0), observation(3.0, 2.0), observation(3.0, 4.0, "b2")], 1)
    assert report.median_error_ratio == pytest.approx(0.25)
    assert report.median_bias_ratio == pytest.approx(0.0)
    assert report.makespan_median_error_ratio == pytest.approx((0.5 + 0.25) / 2)
    assert report.rank_correlation == pytest.approx(0.8660254)
    assert (report.requests, report.failed_requests, report.batches) == (3, 1, 2)
    assert not report.is_good


def test_perfect_predictions_meet_both_targets() -> None:
    assert judged([observation(t, t) for t in (1.0, 2.0, 3.0)]).is_good


def test_nothing_to_judge_is_an_error() -> None:
    with pytest.raises(ValueError, match="no request finished"):
        judged([])


def test_rank_correlation_shares_ranks_among_ties_and_knows_its_limits() -> None:
    assert rank_correlation(np.array([1.0, 2.0]), np.array([1.0, 2.0])) is None
    assert rank_correlation(np.ones(5), np.arange(5.0)) is None
    rising = np.array([1.0, 2.0, 2.0, 9.0])
    assert rank_correlation(rising, -rising) == pytest.approx(-1.0)
