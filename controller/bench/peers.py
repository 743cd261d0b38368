"""Other people's solvers under the same time budget; each only where it is installed."""

import importlib.util
import time
from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np

from controller.routing.evaluator import evaluate
from controller.routing.exact import solve_programme
from controller.routing.objective import bounds_of, objectives, scalarise
from controller.routing.policy import UNASSIGNED
from controller.routing.problem import IntArray, RoutingProblem

Peer: TypeAlias = Callable[[RoutingProblem, float, int], tuple[float, float]]
"""(problem, budget in seconds, seed) -> (J, milliseconds taken)."""


def highs(problem: RoutingProblem, budget_seconds: float, seed: int) -> tuple[float, float]:
    """HiGHS on the mixed-integer programme, from nothing.

    Where it finds no assignment in time, J is that of the earliest-finish one, which a caller
    would have to fall back to.
    """
    del seed
    scalarised = scalarise(problem)
    started = time.perf_counter()
    found, _, _ = solve_programme(scalarised.costs, 1e6, budget_seconds)
    elapsed = time.perf_counter() - started
    return _objective(problem, scalarised.seeds[3] if found is None else found), 1e3 * elapsed


def _objective(problem: RoutingProblem, x: IntArray) -> float:
    """J of an assignment of the routable requests, int64[rows]."""
    whole = np.full((1, problem.n_requests), UNASSIGNED, dtype=np.int64)
    whole[0, problem.routable] = x
    return float(objectives(problem, evaluate(problem, whole), bounds_of(problem))[0])


PEERS: Final[dict[str, tuple[str, Peer]]] = {
    "highs": ("scipy", highs),
}
"""By name: the package that must be there, and the solver."""


def peer_named(name: str) -> Peer | None:
    """The peer, or None when its package is not installed.

    Raises:
        KeyError: no peer has the name.
    """
    package, peer = PEERS[name]
    return peer if importlib.util.find_spec(package) is not None else None
