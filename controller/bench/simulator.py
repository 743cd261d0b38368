"""How many queries a second the cluster simulator routes."""

import time
from typing import Any

import numpy as np

from controller.experiments.drlm import paper_scenario, scenario_of
from controller.routing.policies import policy_named, warm_up
from controller.routing.ppo.observation import DRLM_WEIGHTS
from controller.simulator.engine import Cluster
from controller.simulator.runner import simulate
from controller.simulator.scenario import Scenario
from controller.simulator.workload import poisson, workload_of
from controller.training.vector_environment import VectorEnvironment
from controller.training.worlds import paper_world


def simulator_figures(queries: int) -> dict[str, Any]:
    """Queries a second, of which only the last are routed by a serving policy.

    `engine`: events alone, each query to a node drawn beforehand. `training`: 64 simulations in
    step, likewise. `random` and `greedy-reward`: the whole way, a checked problem of every
    destination for each query.

    Args:
        queries: how many each part routes at least.
    """
    scenario = paper_scenario()
    warm_up(("random", "greedy-reward"))
    return {
        "queries": queries,
        "nodes": scenario.nodes,
        "destinations": int(scenario.node_of.size),
        "engine_queries_per_second": _engine(scenario, queries),
        "training_queries_per_second": _training(queries),
        "random_queries_per_second": _policy(scenario, "random", queries),
        "greedy_reward_queries_per_second": _policy(scenario, "greedy-reward", queries),
        "small_fleet_random_queries_per_second": _policy(_small(), "random", queries),
    }


def _engine(scenario: Scenario, queries: int) -> float:
    rng = np.random.default_rng(0)
    work = workload_of(poisson(queries, 1.0, rng), scenario.queries, rng)
    chosen = rng.integers(0, scenario.node_of.size, queries)
    node = scenario.node_of[chosen]
    predicted = scenario.seconds[work.query, scenario.model_of[chosen], scenario.kind_of_node[node]]
    real = predicted * np.exp(scenario.noise * work.luck)
    steps = list(
        zip(work.arrivals.tolist(), node.tolist(), predicted.tolist(), real.tolist(), strict=True)
    )
    cluster = Cluster(scenario.slots)
    started = time.perf_counter()
    for request, (moment, where, seconds, really) in enumerate(steps):
        cluster.advance(moment)
        cluster.send(request, where, seconds, really)
    while cluster.unfinished:
        cluster.advance(cluster.next_completion())
    return queries / (time.perf_counter() - started)


def _training(queries: int) -> float:
    size = 64
    environment = VectorEnvironment(paper_world(0), size, np.random.default_rng(0))
    rng = np.random.default_rng(1)
    model, node = np.nonzero(environment.world.layout.deployed)
    steps = max(1, -(-queries // size))
    chosen = rng.integers(0, model.size, (steps, size))
    started = time.perf_counter()
    for row in chosen:
        environment.step(model[row], node[row], np.zeros(size))
    return steps * size / (time.perf_counter() - started)


def _policy(scenario: Scenario, name: str, queries: int) -> float:
    rng = np.random.default_rng(0)
    work = workload_of(poisson(queries, 1.0, rng), scenario.queries, rng)
    policy = policy_named(name)
    started = time.perf_counter()
    simulate(scenario, work, policy, np.array(DRLM_WEIGHTS))
    return queries / (time.perf_counter() - started)


def _small() -> Scenario:
    """The paper's fleet with four nodes of it: the first of each kind but one."""
    whole = scenario_of(paper_world(0))
    kept = np.unique(whole.kind_of_node, return_index=True)[1][-4:]
    column = np.isin(whole.node_of, kept)
    return Scenario(
        node_of=np.searchsorted(kept, whole.node_of[column]),
        model_of=whole.model_of[column],
        kind_of_node=whole.kind_of_node[kept],
        node_keys=whole.node_keys[kept],
        model_keys=whole.model_keys,
        parameters_billions=whole.parameters_billions,
        slots=whole.slots[kept],
        watts=whole.watts[kept],
        usd_per_second=whole.usd_per_second[kept],
        quality=whole.quality,
        correct=whole.correct,
        seconds=whole.seconds,
        noise=whole.noise,
    )
