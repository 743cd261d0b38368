"""The exact reference: the assignment as a mixed-integer programme, solved by HiGHS. Offline."""

import time
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from controller.routing.bounds import ROUNDING
from controller.routing.completion import node_finish
from controller.routing.evaluator import evaluate
from controller.routing.node_loads import Costs
from controller.routing.objective import objectives, scalarise
from controller.routing.policies import policy_named
from controller.routing.policy import UNASSIGNED, Budget, Decision
from controller.routing.problem import FloatArray, IntArray, RoutingProblem

DEFAULT_SECONDS: Final = 60.0
"""Time limit when the budget names none."""

INCUMBENT_EVALUATIONS: Final = 200_000
"""What the memetic search gets for the assignment whose J cuts the programme down."""

OPTIMAL_WITHIN: Final = 1e-6
"""Gap of J that HiGHS's own tolerances leave open."""

_TOLERANCE: Final = 1e-9


class SolverMissing(RuntimeError):
    """SciPy, which brings HiGHS, is not installed."""


@dataclass(frozen=True, slots=True, eq=False)
class ExactSolution:
    """What HiGHS found.

    Attributes:
        assignment: int64[R]; the better of HiGHS's and the memetic search's.
        objective: its J.
        lower_bound: proven; equals `objective` when `is_optimal`.
        is_optimal: proven, up to `OPTIMAL_WITHIN`.
        variables: binaries left after the incumbent had cut the programme down.
        seconds: taken by HiGHS.
    """

    assignment: IntArray
    objective: float
    lower_bound: float
    is_optimal: bool
    variables: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ExactPolicy:
    """The optimum of small batches, with HiGHS's dual bound. For benchmarks, not for serving."""

    name: str = "exact"

    def decide(self, problem: RoutingProblem, rng: np.random.Generator, budget: Budget) -> Decision:
        """Solve within the budget's seconds, `DEFAULT_SECONDS` when it has none.

        Raises:
            SolverMissing: install SciPy, for example with the extra `dev`.
        """
        seconds = DEFAULT_SECONDS if budget.seconds is None else budget.seconds
        solution = solve_exactly(problem, rng, seconds)
        bound = solution.lower_bound - ROUNDING
        return Decision(solution.assignment, bound, solution.variables)


def solve_exactly(
    problem: RoutingProblem, rng: np.random.Generator, seconds: float = DEFAULT_SECONDS
) -> ExactSolution:
    """Minimise J with HiGHS.

    Variables: y[r, d] binary; z[n], the node is used; L[n] and V[n], its longest latency and
    slowest link beyond the node's least one; T. Rows: each request goes to one destination;
    sums of y of a node are at most z; T is at least offset * z + work + V, offset * z + L + V and,
    which is implied but tightens the relaxation, each request's own finish. All in units of J.

    The memetic search runs first. Pairs that no assignment of smaller J can contain are left out:
    dear or late enough that even with every other request at its cheapest J would be greater.

    Raises:
        SolverMissing: SciPy is not installed.

    Source: routing specification, section 6.
    """
    if not np.isfinite(seconds) or seconds <= 0.0:
        raise ValueError(f"the time limit must be a positive number of seconds, not {seconds}")
    costs, bounds, rows, _ = scalarise(problem)
    incumbent = (
        policy_named("memetic")
        .decide(problem, rng, Budget(seconds=None, max_evaluations=INCUMBENT_EVALUATIONS))
        .assignment
    )
    if not rows.size:
        return ExactSolution(incumbent, 0.0, 0.0, True, 0, 0.0)
    best_j = _objective(problem, incumbent, bounds)
    started = time.monotonic()
    found, dual, variables = solve_programme(costs, best_j, seconds)
    elapsed = time.monotonic() - started
    best = incumbent
    if found is not None:
        assignment = np.full(problem.n_requests, UNASSIGNED, dtype=np.int64)
        assignment[rows] = found
        found_j = _objective(problem, assignment, bounds)
        if found_j < best_j:
            best, best_j = assignment, found_j
    dual = min(dual, best_j)
    return ExactSolution(
        assignment=best,
        objective=best_j,
        lower_bound=dual,
        is_optimal=bool(best_j - dual <= OPTIMAL_WITHIN * max(1.0, abs(best_j))),
        variables=variables,
        seconds=elapsed,
    )


def _objective(problem: RoutingProblem, assignment: IntArray, bounds: FloatArray) -> float:
    return float(objectives(problem, evaluate(problem, assignment[None, :]), bounds)[0])


def solve_programme(
    costs: Costs, cutoff: float, seconds: float
) -> tuple[IntArray | None, float, int]:
    """Give the programme to HiGHS.

    Args:
        costs: the weighed problem.
        cutoff: J above which no assignment is wanted; a great number wants all.
        seconds: time limit.

    Returns:
        The assignment of the rows of `costs`, or None when HiGHS has none; the dual bound; how
        many binaries there were.

    Raises:
        SolverMissing: SciPy is not installed.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    except ImportError as error:
        raise SolverMissing(
            "the policy 'exact' needs SciPy, which is not installed; "
            "install it, or the extra pointsman[dev]"
        ) from error

    n_requests = costs.cost.shape[0]
    n_nodes = costs.backlog.size
    weight = costs.time_weight
    alone = weight * node_finish(
        costs.backlog[costs.node_of], costs.work, costs.latency, costs.network
    )  # [R, D]: what the pair's own finish adds to J
    allowed = np.isfinite(costs.cost)
    cheapest = np.where(allowed, costs.cost, np.inf).min(axis=1)
    soonest = float(np.where(allowed, alone, np.inf).min(axis=1).max())
    room = cutoff - costs.constant - float(cheapest.sum()) + _TOLERANCE  # what T may cost
    kept = allowed & (alone <= room)
    dearer = np.where(allowed, costs.cost, np.inf) - cheapest[:, None]
    kept &= dearer + np.maximum(soonest, alone) <= room

    r, d = np.nonzero(kept)
    n = costs.node_of[d]
    pairs = r.size
    y = np.arange(pairs)
    z, longest, link = (pairs + k * n_nodes + np.arange(n_nodes) for k in range(3))
    last = pairs + 3 * n_nodes
    work = weight * costs.work[r, d]
    latency = weight * costs.latency[r, d]
    network = weight * costs.network[r, d]
    least_network = np.full(n_nodes, np.inf)
    np.minimum.at(least_network, n, network)
    least_network = np.where(np.isfinite(least_network), least_network, 0.0)
    offset = weight * costs.backlog + least_network

    matrix = _Rows()
    one_each = matrix.block(n_requests, 1.0, 1.0)
    matrix.put(one_each + r, y, 1.0)
    nodes = np.arange(n_nodes)
    loaded = matrix.block(n_nodes, -np.inf, 0.0)
    matrix.put(loaded + n, y, work)
    matrix.put(loaded + nodes, z, offset)
    matrix.put(loaded + nodes, link, 1.0)
    matrix.put(loaded + nodes, np.full(n_nodes, last), -1.0)
    sequence = matrix.block(n_nodes, -np.inf, 0.0)
    matrix.put(sequence + nodes, z, offset)
    matrix.put(sequence + nodes, longest, 1.0)
    matrix.put(sequence + nodes, link, 1.0)
    matrix.put(sequence + nodes, np.full(n_nodes, last), -1.0)
    own = matrix.block(n_requests, -np.inf, 0.0)
    matrix.put(own + r, y, alone[r, d])
    matrix.put(own + np.arange(n_requests), np.full(n_requests, last), -1.0)

    # One row for each request and node that still meet.
    meetings, place = np.unique(r * n_nodes + n, return_inverse=True)
    at = meetings % n_nodes
    count = meetings.size
    used = matrix.block(count, -np.inf, 0.0)
    matrix.put(used + place, y, 1.0)
    matrix.put(used + np.arange(count), z[at], -1.0)
    runs = matrix.block(count, -np.inf, 0.0)
    matrix.put(runs + place, y, latency)
    matrix.put(runs + np.arange(count), longest[at], -1.0)
    sends = matrix.block(count, -np.inf, 0.0)
    matrix.put(sends + place, y, network - least_network[n])
    matrix.put(sends + np.arange(count), link[at], -1.0)

    columns = last + 1
    objective = np.zeros(columns)
    objective[y] = costs.cost[r, d]
    objective[last] = 1.0
    upper = np.full(columns, np.inf)
    upper[y] = upper[z] = 1.0
    lower = np.zeros(columns)
    lower[last] = min(soonest, room)
    upper[last] = max(room, lower[last])
    integral = np.zeros(columns)
    integral[y] = 1.0
    data, rows, cols, row_lower, row_upper = matrix.finish()
    result: Any = milp(
        objective,
        constraints=LinearConstraint(
            csr_array((data, (rows, cols)), shape=(row_lower.size, columns)), row_lower, row_upper
        ),
        bounds=Bounds(lower, upper),
        integrality=integral,
        options={"time_limit": seconds, "mip_rel_gap": 1e-7},
    )
    dual = -np.inf if result.mip_dual_bound is None else float(result.mip_dual_bound)
    if result.status == 2:  # infeasible: nothing is better than the incumbent
        return None, cutoff, pairs
    dual = max(dual + costs.constant, costs.constant + float(cheapest.sum()) + soonest)
    if result.x is None:
        return None, dual, pairs
    assignment = np.full(n_requests, UNASSIGNED, dtype=np.int64)
    chosen = result.x[:pairs] > 0.5
    assignment[r[chosen]] = d[chosen]
    if (assignment == UNASSIGNED).any():
        return None, dual, pairs
    return assignment, dual, pairs


class _Rows:
    """Collects the rows of a sparse matrix, block by block."""

    def __init__(self) -> None:
        self._data: list[FloatArray] = []
        self._rows: list[IntArray] = []
        self._columns: list[IntArray] = []
        self._lower: list[FloatArray] = []
        self._upper: list[FloatArray] = []
        self._size = 0

    def block(self, count: int, lower: float, upper: float) -> int:
        """Append rows with these bounds; returns the first's index."""
        first = self._size
        self._size += count
        self._lower.append(np.full(count, lower))
        self._upper.append(np.full(count, upper))
        return first

    def put(self, rows: IntArray, columns: IntArray, values: FloatArray | float) -> None:
        """Add entries."""
        self._rows.append(np.asarray(rows, dtype=np.int64))
        self._columns.append(np.asarray(columns, dtype=np.int64))
        self._data.append(np.broadcast_to(np.asarray(values, dtype=np.float64), rows.shape))

    def finish(self) -> tuple[FloatArray, IntArray, IntArray, FloatArray, FloatArray]:
        """Data, rows, columns, and the rows' bounds."""
        return (
            np.concatenate(self._data),
            np.concatenate(self._rows),
            np.concatenate(self._columns),
            np.concatenate(self._lower),
            np.concatenate(self._upper),
        )
