"""A policy of somebody else's distribution, installed beside ours, from its entry point on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from controller.routing.policies import policy_named, policy_names
from controller.routing.policy import Budget
from controller.routing.problem import save_problem
from tests.unit.controller.routing.problems import random_problem

MODULE = """
import numpy as np

from controller.routing.policy import Budget, Decision
from controller.routing.problem import RoutingProblem


class FirstFeasiblePolicy:
    name = "first-feasible"

    def decide(self, problem: RoutingProblem, rng: np.random.Generator, budget: Budget) -> Decision:
        first = problem.feasible.argmax(axis=1)
        return Decision(np.where(problem.routable, first, -1).astype(np.int64))
"""

METADATA = "Metadata-Version: 2.1\nName: somebodys-routing\nVersion: 1.0\n"

ENTRY_POINTS = """
[pointsman.policies]
first-feasible = somebodys_routing.policies:FirstFeasiblePolicy
broken = somebodys_routing.absent:Policy
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the distribution as an installer leaves it."""
    package = tmp_path / "somebodys_routing"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "policies.py").write_text(MODULE)
    info = tmp_path / "somebodys_routing-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return tmp_path


def test_installed_policy_is_listed_and_decides(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(site))
    assert {"first-feasible", "broken"} <= set(policy_names())
    problem = random_problem(4, 5, 3, infeasible_share=0.4)
    decision = policy_named("first-feasible").decide(problem, np.random.default_rng(0), Budget())
    expected = [int(np.argmax(row)) if row.any() else -1 for row in problem.feasible]
    assert decision.assignment.tolist() == expected


def test_command_solves_with_the_installed_policy(site: Path, tmp_path: Path) -> None:
    file = tmp_path / "batch.npz"
    save_problem(random_problem(4, 5, 3), file)
    code = "from controller.cli import main; main()"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            code,
            "lab",
            "solve",
            str(file),
            "--policy",
            "first-feasible",
            "--json",
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *sys.path])},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["policy"] == "first-feasible"
    assert report["assignment"] == [0] * 5
    assert report["lower_bound"] is None
