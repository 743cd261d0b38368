"""Routing policies side by side on sampled problems: objective, gaps and decision time."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from controller.lab.bench.peers import PEERS, peer_named
from controller.lab.bench.sample import QueueModel, sample_problem
from controller.lab.bench.solve import solve
from controller.routing.bounds import lower_bound
from controller.routing.exact import OPTIMAL_WITHIN, SolverMissing, solve_exactly
from controller.routing.policies import policy_names, warm_up
from controller.routing.policy import Budget
from controller.routing.problem import Normalisation, RoutingProblem


@dataclass(frozen=True, slots=True)
class Size:
    """R requests on D = nodes x models destinations."""

    requests: int
    nodes: int
    models_per_node: int

    @property
    def name(self) -> str:
        """R x D."""
        return f"{self.requests}x{self.nodes * self.models_per_node}"


SIZES: Final = (
    Size(10, 3, 2),
    Size(30, 11, 1),
    Size(30, 11, 2),
    Size(30, 22, 2),
    Size(30, 44, 2),
    Size(50, 11, 1),
    Size(128, 11, 1),
    Size(128, 44, 2),
    Size(128, 160, 2),
)

SMALL_BATCH: Final = 64
"""Up to this many requests the short budget is used, above it the long one."""

EXACT_UP_TO: Final = 64
"""Batches of more requests are compared with the best known instead of the exact reference."""


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One policy on one size and queue, over seeds.

    Attributes:
        gap_percent: median over seeds of J above the best known, relative to it.
        worst_gap_percent: the greatest over seeds.
        bound_gap_percent: median of how far J lies above the best lower bound of the problem.
        own_bound_gap_percent: median of how far the policy's own bound lies below the best known;
            None where it gives none.
        proven: seeds whose best known is proven optimal.
    """

    size: str
    queue: str
    policy: str
    budget_milliseconds: float
    seeds: int
    objective: float
    gap_percent: float
    worst_gap_percent: float
    bound_gap_percent: float
    own_bound_gap_percent: float | None
    decision_milliseconds_p50: float
    decision_milliseconds_p95: float
    proven: int


@dataclass(frozen=True, slots=True)
class _BenchRun:
    objective: float
    own_bound: float | None
    milliseconds: float


def bench_routing(
    sizes: Sequence[Size] = SIZES,
    queues: Sequence[QueueModel] = tuple(QueueModel),
    policies: Sequence[str] | None = None,
    peers: Sequence[str] = tuple(PEERS),
    seeds: int = 5,
    first_seed: int = 0,
    short_budget_seconds: float = 0.01,
    long_budget_seconds: float = 0.05,
    reference_seconds: float = 10.0,
    normalisation: Normalisation = Normalisation.PAYOFF,
    progress: Callable[[str], None] = lambda line: None,
) -> list[BenchRow]:
    """Measure every policy on every size.

    The best known J of a problem is the least of HiGHS within `reference_seconds` (small batches),
    a memetic search of the same length, and everything measured; its lower bound the greatest of
    HiGHS's and of `controller.routing.bounds`.

    Args:
        sizes: what is sampled.
        queues: serial, batched.
        policies: names; None takes all but `exact`.
        peers: other people's solvers; those not installed are left out, with a line that says so.
        seeds: problems of each size and queue.
        first_seed: of the problems; those from 1000 on have tuned nothing.
        short_budget_seconds: for batches of at most `SMALL_BATCH` requests.
        long_budget_seconds: for greater ones.
        reference_seconds: for each reference of each problem.
        normalisation: of the objective.
        progress: called with a line for each peer left out, and after each size and queue.
    """
    names = [name for name in policy_names() if name != "exact"] if policies is None else policies
    warm_up({"memetic", *(name for name in names if name != "exact")})
    first = sample_problem(2, 1, 2, QueueModel.SERIAL, 0).problem
    for name in peers:
        peer = peer_named(name)
        if peer is None:
            package = PEERS[name][0]
            progress(f"{name}: left out; {package} is not installed (the extra bench has it)")
        else:
            peer(first, 0.0, 0)  # what it imports at first is not counted
    rows: list[BenchRow] = []
    for size in sizes:
        for queue in queues:
            budget = short_budget_seconds if size.requests <= SMALL_BATCH else long_budget_seconds
            rows += _measure(
                size,
                queue,
                names,
                peers,
                range(first_seed, first_seed + seeds),
                budget,
                reference_seconds,
                normalisation,
            )
            progress(f"{size.name} {queue.value}: done")
    return rows


def rows_as_json(rows: Sequence[BenchRow]) -> list[dict[str, Any]]:
    """Plain values."""
    return [asdict(row) for row in rows]


def _measure(
    size: Size,
    queue: QueueModel,
    names: Sequence[str],
    peers: Sequence[str],
    seeds: range,
    budget_seconds: float,
    reference_seconds: float,
    normalisation: Normalisation,
) -> list[BenchRow]:
    runs: dict[str, list[_BenchRun]] = {}
    best_known: list[float] = []
    bounds: list[float] = []
    proven = 0
    for seed in seeds:
        problem = sample_problem(
            size.requests,
            size.nodes,
            size.models_per_node,
            queue,
            seed,
            normalisation=normalisation,
        ).problem
        for name in names:
            report = solve(problem, name, budget_seconds, seed)
            runs.setdefault(name, []).append(
                _BenchRun(report.objective, report.lower_bound, report.decision_milliseconds)
            )
        for name in peers:
            peer = peer_named(name)
            if peer is None:
                continue
            objective, milliseconds = peer(problem, budget_seconds, seed)
            runs.setdefault(name, []).append(_BenchRun(objective, None, milliseconds))
        best, bound = _reference(problem, reference_seconds)
        best = min([best, *(of_policy[-1].objective for of_policy in runs.values())])
        best_known.append(best)
        bounds.append(min(bound, best))
        proven += best - bound <= OPTIMAL_WITHIN * max(1.0, abs(best))
    return [
        _row(size, queue, name, budget_seconds, of_policy, best_known, bounds, proven)
        for name, of_policy in runs.items()
    ]


def _reference(problem: RoutingProblem, seconds: float) -> tuple[float, float]:
    """The least J found and the greatest lower bound, with time to spare."""
    long_search = solve(problem, "memetic", seconds, seed=1_000_003)
    best = long_search.objective
    bound = lower_bound(problem, best, Budget(seconds=min(seconds, 2.0)))
    if problem.n_requests <= EXACT_UP_TO:
        try:
            solution = solve_exactly(problem, np.random.default_rng(0), seconds)
        except SolverMissing:
            return best, bound
        best = min(best, solution.objective)
        bound = max(bound, solution.lower_bound)
    return best, bound


def _row(
    size: Size,
    queue: QueueModel,
    name: str,
    budget_seconds: float,
    of_policy: Sequence[_BenchRun],
    best_known: Sequence[float],
    bounds: Sequence[float],
    proven: int,
) -> BenchRow:
    found = np.array([run.objective for run in of_policy])
    best, bound = np.array(best_known), np.array(bounds)
    gaps = 100.0 * (found - best) / np.abs(best)
    own = [
        100.0 * (reference - run.own_bound) / abs(reference)
        for run, reference in zip(of_policy, best_known, strict=True)
        if run.own_bound is not None
    ]
    times = np.array([run.milliseconds for run in of_policy])
    return BenchRow(
        size=size.name,
        queue=queue.value,
        policy=name,
        budget_milliseconds=1e3 * budget_seconds,
        seeds=len(of_policy),
        objective=float(np.median(found)),
        gap_percent=float(np.median(gaps)),
        worst_gap_percent=float(gaps.max()),
        bound_gap_percent=float(np.median(100.0 * (found - bound) / np.abs(best))),
        own_bound_gap_percent=float(np.median(own)) if own else None,
        decision_milliseconds_p50=float(np.median(times)),
        decision_milliseconds_p95=float(np.quantile(times, 0.95)),
        proven=proven,
    )
