import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np
import pytest

from controller.routing import policies
from controller.routing.policies import (
    ENTRY_POINT_GROUP,
    BrokenPolicy,
    UnknownPolicy,
    policy_named,
    policy_names,
)
from controller.routing.policy import Budget, Decision
from controller.routing.problem import RoutingProblem
from tests.unit.controller.routing.problems import random_problem


@dataclass(frozen=True)
class FirstFeasiblePolicy:
    """What a package of somebody else would bring."""

    name: str = "first-feasible"

    def decide(self, problem: RoutingProblem, rng: np.random.Generator, budget: Budget) -> Decision:
        first = problem.feasible.argmax(axis=1)
        return Decision(np.where(problem.routable, first, -1).astype(np.int64))


def offer(monkeypatch: pytest.MonkeyPatch, name: str, loaded: Any) -> None:
    class Entry:
        group = ENTRY_POINT_GROUP

        def __init__(self) -> None:
            self.name = name

        def load(self) -> Any:
            if isinstance(loaded, Exception):
                raise loaded
            return loaded

    def entry_points(*, group: str) -> tuple[Entry, ...]:
        return (Entry(),) if group == ENTRY_POINT_GROUP else ()

    monkeypatch.setattr(metadata, "entry_points", entry_points)


def test_every_listed_policy_can_be_had_under_its_name() -> None:
    for name in policy_names():
        assert policy_named(name).name == name


def test_unknown_policy_lists_the_names_and_the_nearest() -> None:
    with pytest.raises(UnknownPolicy) as caught:
        policy_named("round_robbin")
    assert caught.value.nearest == "round-robin"
    assert caught.value.known == policy_names()
    assert "memetic" in str(caught.value)


def test_name_like_no_other_gets_no_suggestion() -> None:
    with pytest.raises(UnknownPolicy) as caught:
        policy_named("")
    assert caught.value.nearest is None


def test_policy_of_another_package_is_found_by_its_entry_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offer(monkeypatch, "first-feasible", FirstFeasiblePolicy)
    assert "first-feasible" in policy_names()
    policy = policy_named("first-feasible")
    problem = random_problem(0, 3, 2)
    decision = policy.decide(problem, np.random.default_rng(0), Budget())
    assert decision.assignment.tolist() == [0, 0, 0]


def test_policy_of_another_package_cannot_take_the_name_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offer(monkeypatch, "round-robin", FirstFeasiblePolicy)
    assert policy_names().count("round-robin") == 1
    assert policy_named("round-robin").name == "round-robin"


@pytest.mark.parametrize("loaded", [ImportError("no such module"), object])
def test_policy_that_does_not_load_is_reported_as_broken(
    monkeypatch: pytest.MonkeyPatch, loaded: Any
) -> None:
    offer(monkeypatch, "torn", loaded)
    with pytest.raises(BrokenPolicy, match="torn"):
        policy_named("torn")


def test_warm_up_runs_every_built_in_policy_that_serves() -> None:
    policies.warm_up()


def test_contract_and_formulation_are_imported_without_numba() -> None:
    code = (
        "import sys\n"
        "from controller.routing import feasibility, formulation, policies, policy, problem\n"
        "from controller.routing import completion, evaluator\n"
        "policies.policy_names(); policies.policy_named('round-robin')\n"
        "sys.exit('numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
