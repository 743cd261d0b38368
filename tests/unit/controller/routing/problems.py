"""Problems for the routing tests: drawn by Hypothesis, drawn by seed, and written by hand."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from controller.routing.evaluator import evaluate
from controller.routing.objective import bounds_of, objectives
from controller.routing.policy import UNASSIGNED
from controller.routing.problem import (
    FloatArray,
    IntArray,
    Normalisation,
    ProblemMetadata,
    RoutingProblem,
)


def random_problem(
    seed: int,
    n_requests: int,
    n_nodes: int,
    models_per_node: int = 1,
    *,
    serial: bool = False,
    normalisation: Normalisation = Normalisation.PAYOFF,
    infeasible_share: float = 0.0,
    weights: tuple[float, float, float, float] = (0.25, 0.25, 0.25, 0.25),
) -> RoutingProblem:
    """A problem with the shape of a real one: dear models are good, small nodes are slow."""
    rng = np.random.default_rng(seed)
    n_destinations = n_nodes * models_per_node
    node_of = np.repeat(np.arange(n_nodes), models_per_node)
    strength = rng.random(n_destinations)
    speed = rng.uniform(10.0, 80.0, n_destinations)
    batching = np.ones(n_destinations) if serial else rng.uniform(1.0, 8.0, n_destinations)
    tokens = np.exp(rng.normal(4.5, 0.7, n_requests))[:, None]
    difficulty = rng.normal(0.0, 1.0, n_requests)[:, None]
    latency = tokens / speed
    work = tokens / (speed * batching)
    feasible = rng.random((n_requests, n_destinations)) >= infeasible_share
    return RoutingProblem(
        quality=1.0 / (1.0 + np.exp(-(4.0 * strength - 2.0 - difficulty))),
        cost_usd=tokens * strength**2 * 1e-5,
        energy_joules=work * rng.uniform(5.0, 300.0, n_nodes)[node_of],
        work_seconds=work,
        latency_seconds=latency,
        network_seconds=rng.uniform(0.0, 0.2, n_nodes)[node_of] + tokens * 1e-4,
        node_of=node_of,
        backlog_seconds=np.where(rng.random(n_nodes) < 0.5, rng.exponential(1.0, n_nodes), 0.0),
        feasible=feasible,
        weights=np.array(weights),
        normalisation=normalisation,
        metadata=_metadata(rng, n_nodes, n_destinations),
    )


def coarse_problem(
    seed: int, n_requests: int, n_nodes: int, models_per_node: int = 1
) -> RoutingProblem:
    """A problem of small whole numbers, where ties, zeros and equal columns abound."""
    rng = np.random.default_rng(seed)
    n_destinations = n_nodes * models_per_node
    shape = (n_requests, n_destinations)
    work = rng.integers(0, 4, shape).astype(np.float64)
    weights = rng.integers(0, 3, 4) + np.array([0, 0, 0, 1])
    return RoutingProblem(
        quality=rng.integers(0, 3, shape) / 2.0,
        cost_usd=rng.integers(0, 3, shape).astype(np.float64),
        energy_joules=rng.integers(0, 3, shape).astype(np.float64),
        work_seconds=work,
        latency_seconds=work + rng.integers(0, 2, shape),
        network_seconds=rng.integers(0, 2, shape).astype(np.float64),
        node_of=np.repeat(np.arange(n_nodes), models_per_node),
        backlog_seconds=rng.integers(0, 3, n_nodes).astype(np.float64),
        feasible=rng.random(shape) < 0.8,
        weights=weights / weights.sum(),
        normalisation=list(Normalisation)[int(rng.integers(3))],
        metadata=_metadata(rng, n_nodes, n_destinations),
    )


def _metadata(rng: np.random.Generator, n_nodes: int, n_destinations: int) -> ProblemMetadata:
    model_of = rng.integers(0, 3, n_destinations)
    return ProblemMetadata(
        node_is_edge=rng.random(n_nodes) < 0.5,
        model_of=model_of,
        parameters_billions=np.array([0.6, 4.0, 20.0])[model_of],
    )


@st.composite
def problems(
    draw: st.DrawFn,
    max_requests: int = 6,
    max_nodes: int = 4,
    max_models: int = 2,
) -> RoutingProblem:
    """Small problems of both kinds."""
    seed = draw(st.integers(0, 2**32 - 1))
    n_requests = draw(st.integers(1, max_requests))
    n_nodes = draw(st.integers(1, max_nodes))
    models = draw(st.integers(1, max_models))
    if draw(st.booleans()):
        return coarse_problem(seed, n_requests, n_nodes, models)
    return random_problem(
        seed,
        n_requests,
        n_nodes,
        models,
        serial=draw(st.booleans()),
        normalisation=draw(st.sampled_from(Normalisation)),
        infeasible_share=draw(st.sampled_from([0.0, 0.3])),
    )


def objective_of(problem: RoutingProblem, assignment: IntArray) -> float:
    """J of one assignment by the evaluator."""
    terms = evaluate(problem, np.asarray(assignment)[None, :])
    return float(objectives(problem, terms, bounds_of(problem))[0])


def every_assignment(problem: RoutingProblem) -> IntArray:
    """int64[all, R]: every legal assignment."""
    choices = [
        np.flatnonzero(row).tolist() if row.any() else [UNASSIGNED] for row in problem.feasible
    ]
    return np.array(list(itertools.product(*choices)), dtype=np.int64)


def least_objective(problem: RoutingProblem) -> float:
    """The optimum, by trying everything."""
    terms = evaluate(problem, every_assignment(problem))
    return float(objectives(problem, terms, bounds_of(problem)).min())


def permuted(
    problem: RoutingProblem, rows: IntArray, columns: IntArray, **changes: Any
) -> RoutingProblem:
    """The same problem with its requests and destinations in another order."""
    pick = np.ix_(rows, columns)
    return replace(
        problem,
        quality=problem.quality[pick],
        cost_usd=problem.cost_usd[pick],
        energy_joules=problem.energy_joules[pick],
        work_seconds=problem.work_seconds[pick],
        latency_seconds=problem.latency_seconds[pick],
        network_seconds=problem.network_seconds[pick],
        node_of=problem.node_of[columns],
        feasible=problem.feasible[pick],
        metadata=ProblemMetadata(),
        **changes,
    )


def loop_terms(problem: RoutingProblem, assignment: IntArray) -> FloatArray:
    """Q, C, E, T by plain loops over the definition."""
    loss = money = energy = latest = 0.0
    for n in range(problem.n_nodes):
        here = [
            (r, int(d))
            for r, d in enumerate(assignment)
            if d != UNASSIGNED and problem.node_of[d] == n
        ]
        if here:
            work = sum(problem.work_seconds[pair] for pair in here)
            longest = max(problem.latency_seconds[pair] for pair in here)
            link = max(problem.network_seconds[pair] for pair in here)
            latest = max(latest, problem.backlog_seconds[n] + max(work, longest) + link)
        for pair in here:
            loss += 1.0 - problem.quality[pair]
            money += problem.cost_usd[pair]
            energy += problem.energy_joules[pair]
    return np.array([loss, money, energy, latest])
