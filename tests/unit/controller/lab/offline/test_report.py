"""Accuracy of predictions and quality by class, against plain definitions."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from controller.lab.offline.report import (
    Prediction,
    accuracy,
    class_table,
    kendall,
    report,
    report_as_json,
    spearman,
    wilson,
)
from tests.unit.controller.lab.offline.rows import measurement

SMALL = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=2, max_size=40)


def prediction(predicted: float, measured: float, node: str = "pi", batch: str = "b") -> Prediction:
    return Prediction(node, "small", batch, predicted, measured)


@given(SMALL)
def test_rank_correlations_are_those_of_scipy(pairs: list[tuple[int, int]]) -> None:
    first, second = np.array(pairs, dtype=np.float64).T
    if len(set(first)) == 1 or len(set(second)) == 1:
        assert spearman(first, second) is None
        assert kendall(first, second) is None
        return
    assert spearman(first, second) == pytest.approx(stats.spearmanr(first, second)[0])
    assert kendall(first, second) == pytest.approx(stats.kendalltau(first, second)[0])


def test_one_request_has_no_rank_correlation() -> None:
    found = accuracy([(1.0, 2.0)])
    assert found is not None
    assert (found.spearman, found.kendall) == (None, None)
    assert found.median_error_ratio == 0.5
    assert accuracy([]) is None


def test_errors_are_shares_of_what_came_and_bias_has_a_sign() -> None:
    found = accuracy([(0.9, 1.0), (1.6, 2.0), (4.4, 4.0)])
    assert found is not None
    assert found.requests == 3
    assert found.median_error_ratio == pytest.approx(0.1)
    assert found.bias_ratio == pytest.approx(-0.1)
    assert found.spearman == pytest.approx(1.0)
    assert found.kendall == pytest.approx(1.0)


def test_wilson_interval_of_a_known_case() -> None:
    # 5 of 10: 0.2366 to 0.7634 (Wilson, 1927)
    assert wilson(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=5e-5)
    assert wilson(0.0, 20)[0] == 0.0
    assert wilson(1.0, 20)[1] == 1.0
    with pytest.raises(ValueError, match="nothing"):
        wilson(0.5, 0)


def test_classes_and_models_are_counted_apart_and_ungraded_answers_not_at_all() -> None:
    rows = [
        measurement(question_class="maths", model="a", score_ratio=1.0),
        measurement(question_class="maths", model="a", score_ratio=0.0),
        measurement(question_class="maths", model="b", score_ratio=1.0),
        measurement(question_class="art", model="a", score_ratio=None),
    ]
    table = class_table(rows)
    assert [(row.question_class, row.model, row.graded, row.mean_score_ratio) for row in table] == [
        ("maths", "a", 2, 0.5),
        ("maths", "b", 1, 1.0),
    ]


def test_batches_are_judged_by_their_last_finish() -> None:
    timings = [
        prediction(1.0, 1.0, "pi", "b1"),
        prediction(2.0, 4.0, "vm", "b1"),
        prediction(3.0, 3.0, "pi", "b2"),
    ]
    found = report(timings, [])
    assert found.makespans is not None
    assert found.makespans.requests == 2
    assert found.makespans.bias_ratio == pytest.approx(-0.25)
    assert list(found.destinations) == ["pi/small", "vm/small"]
    assert json.loads(json.dumps(report_as_json(found)))["requests"]["requests"] == 3


def test_joules_are_compared_where_both_are_known() -> None:
    both = Prediction("pi", "small", "b", 1.0, 1.0, predicted_joules=3.0, measured_joules=2.0)
    unmeasured = Prediction("vm", "small", "b", 1.0, 1.0, predicted_joules=9.0)
    found = report([both, unmeasured], [])
    assert found.energy is not None
    assert (found.energy.requests, found.energy.bias_ratio) == (1, pytest.approx(0.5))
    assert [*found.destination_energy] == ["pi/small"]
    assert report([unmeasured], []).energy is None
