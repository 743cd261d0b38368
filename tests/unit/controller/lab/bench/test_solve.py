import json
from dataclasses import replace

import numpy as np
import pytest

from controller.lab.bench.peers import peer_named
from controller.lab.bench.routing import Size, bench_routing, rows_as_json
from controller.lab.bench.sample import QueueModel, sample_problem
from controller.lab.bench.solve import solve
from controller.routing.policies import UnknownPolicy
from tests.unit.controller.routing.problems import objective_of

PROBLEM = sample_problem(8, 3, 2, QueueModel.BATCHED, 5).problem


def test_report_has_the_fields_of_the_format_and_agrees_with_the_evaluator() -> None:
    report = solve(PROBLEM, "memetic", max_evaluations=5000)
    printed = json.loads(json.dumps(report.as_json()))
    assert list(printed) == [
        "policy",
        "assignment",
        "quality_loss",
        "cost_usd",
        "energy_joules",
        "completion_seconds",
        "objective",
        "lower_bound",
        "bounds",
        "evaluations",
        "decision_milliseconds",
        "seed",
    ]
    assert printed["objective"] == pytest.approx(objective_of(PROBLEM, np.array(report.assignment)))
    assert printed["lower_bound"] <= printed["objective"]
    assert np.array(printed["bounds"]).shape == (4, 2)
    assert printed["decision_milliseconds"] > 0.0


def test_policy_without_a_bound_reports_null() -> None:
    assert solve(PROBLEM, "round-robin").lower_bound is None


def test_exact_and_memetic_agree_on_a_small_batch() -> None:
    assert solve(PROBLEM, "exact").objective == pytest.approx(
        solve(PROBLEM, "memetic", max_evaluations=100_000).objective, abs=1e-7
    )


def test_request_that_goes_nowhere_is_minus_one_in_the_report() -> None:
    feasible = PROBLEM.feasible.copy()
    feasible[3] = False
    report = solve(replace(PROBLEM, feasible=feasible), "memetic", max_evaluations=1000)
    assert [r for r, d in enumerate(report.assignment) if d == -1] == [3]


def test_same_seed_and_evaluations_give_the_same_report() -> None:
    first, again = (solve(PROBLEM, "memetic", seed=7, max_evaluations=900) for _ in range(2))
    assert first.assignment == again.assignment
    assert first.evaluations == again.evaluations


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(UnknownPolicy):
        solve(PROBLEM, "memetics")
    with pytest.raises(ValueError, match="budget"):
        solve(PROBLEM, "memetic", budget_seconds=-1.0)
    with pytest.raises(ValueError, match="budget"):
        solve(PROBLEM, "memetic", budget_seconds=float("nan"))
    with pytest.raises(ValueError, match="evaluation"):
        solve(PROBLEM, "memetic", max_evaluations=-1)


def test_bench_compares_policies_and_peers_with_the_reference() -> None:
    rows = bench_routing(
        sizes=[Size(6, 3, 1)],
        queues=[QueueModel.SERIAL],
        policies=["memetic", "round-robin"],
        peers=["highs"],
        seeds=2,
        short_budget_seconds=0.02,
        reference_seconds=2.0,
    )
    by_policy = {row.policy: row for row in rows}
    assert set(by_policy) == {"memetic", "round-robin", "highs"}
    assert all(row.size == "6x3" and row.seeds == 2 and row.proven == 2 for row in rows)
    assert by_policy["memetic"].gap_percent == pytest.approx(0.0, abs=1e-6)
    assert by_policy["round-robin"].gap_percent > 0.0
    assert by_policy["memetic"].own_bound_gap_percent is not None
    assert by_policy["round-robin"].own_bound_gap_percent is None
    assert json.loads(json.dumps(rows_as_json(rows)))[0]["queue"] == "serial"


def test_peer_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(KeyError):
        peer_named("simulated-annealing")
