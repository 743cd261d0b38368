"""The best quality within a mean time, against SciPy's linear programming."""

import numpy as np
import pytest
from scipy.optimize import linprog

from controller.lab.experiments.frontier import quality_bounds
from controller.lab.simulator.inputs import held_out_scenario, synthetic_inputs
from controller.lab.simulator.scenario import Scenario
from controller.lab.simulator.scenario_file import read_scenario


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    cluster = read_scenario("drlm")
    return held_out_scenario(cluster, synthetic_inputs(cluster, 0, 60))


def by_linear_programming(scenario: Scenario, limit: float) -> float:
    seconds = scenario.seconds.min(axis=2)
    queries, models = seconds.shape
    once = np.kron(np.eye(queries), np.ones(models))
    found = linprog(
        -scenario.quality.ravel() / queries,
        A_ub=seconds.reshape(1, -1) / queries,
        b_ub=[limit],
        A_eq=once,
        b_eq=np.ones(queries),
    )
    assert found.success
    return -float(found.fun)


def test_it_is_the_linear_programs_value(scenario: Scenario) -> None:
    limits = [0.8, 1.5, 4.0, 10.0]
    for bound in quality_bounds(scenario, limits):
        expected = by_linear_programming(scenario, bound.seconds)
        assert bound.quality == pytest.approx(expected, abs=1e-9)


def test_without_a_limit_it_is_the_best_model_and_below_the_fastest_nothing(
    scenario: Scenario,
) -> None:
    free, none = quality_bounds(scenario, [np.inf, 1e-6])
    assert free.quality == pytest.approx(scenario.quality.max(axis=1).mean())
    assert 0.0 <= free.score <= 1.0
    assert np.isfinite(free.seconds)
    assert np.isnan(none.quality)
