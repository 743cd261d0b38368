"""Differences of paired runs."""

import math

import numpy as np
import pytest

from controller.lab.experiments.statistics import paired_difference, student_quantile


def test_the_interval_is_students() -> None:
    ours, theirs = np.array([3.0, 5.0, 4.0]), np.array([1.0, 2.0, 3.0])
    found = paired_difference(ours, theirs)
    # Differences 2, 3, 1: mean 2, deviation 1; t of 2 degrees is 4.302653.
    assert found.mean == pytest.approx(2.0)
    assert found.low == pytest.approx(2.0 - 4.302653 / math.sqrt(3.0))
    assert found.high == pytest.approx(2.0 + 4.302653 / math.sqrt(3.0))
    assert found.change == pytest.approx(1.0)
    assert found.change_low <= found.change <= found.change_high


def test_pairs_that_differ_alike_are_certain_however_runs_vary() -> None:
    theirs = np.array([1.0, 50.0, 900.0])
    found = paired_difference(theirs * 0.5, theirs)
    assert found.change == pytest.approx(-0.5)
    assert found.change_low == pytest.approx(-0.5)
    assert found.change_high == pytest.approx(-0.5)


def test_the_same_seed_resamples_the_same() -> None:
    rng = np.random.default_rng(1)
    ours, theirs = rng.random(10), rng.random(10)
    assert paired_difference(ours, theirs) == paired_difference(ours, theirs)


def test_nothing_is_certain_of_one_run_and_nothing_relative_to_nothing() -> None:
    found = paired_difference(np.array([1.0]), np.array([0.0]))
    assert math.isnan(found.low)
    assert math.isnan(found.change)
    assert math.isnan(found.change_low)


def test_runs_must_pair() -> None:
    with pytest.raises(ValueError, match="cannot be paired"):
        paired_difference(np.zeros(2), np.zeros(3))


def test_the_quantile_falls_to_the_normal_one() -> None:
    values = [student_quantile(degrees) for degrees in range(1, 200)]
    assert values == sorted(values, reverse=True)
    assert values[-1] == pytest.approx(1.97196, abs=1e-5)
    with pytest.raises(ValueError, match="two runs"):
        student_quantile(0)
