"""How many queries a second the cluster simulator routes."""

import time
from typing import Any, Final

import numpy as np

from controller.lab.simulator.engine import Cluster
from controller.lab.simulator.inputs import scenario_of, synthetic_inputs
from controller.lab.simulator.runner import SimulatedWindow, simulate
from controller.lab.simulator.scenario import Scenario
from controller.lab.simulator.scenario_file import read_scenario
from controller.lab.simulator.workload import poisson, workload_of
from controller.routing.policies import policy_named, warm_up
from controller.routing.ppo.observation import DRLM_WEIGHTS

POLICIES: Final = ("fastest", "random", "high-accuracy", "least-loaded", "greedy-reward", "optllm")
"""One decision a query."""

BATCHED: Final = ("random", "least-loaded")
"""In windows of 30."""


def simulator_figures(queries: int, scenario_name: str = "drlm", seed: int = 0) -> dict[str, Any]:
    """Queries a second, a part each; everything runs in this thread.

    `engine`: events alone, each query to a node drawn beforehand. A policy's name: the whole way,
    arrivals, a problem of every destination for each decision, the serving policy, events and the
    reward. `outside`: of the same run, what the simulator takes without the policy's own thinking.

    Args:
        queries: how many each part routes.
        scenario_name: as `read_scenario` takes it.
        seed: of arrivals, queries and luck.

    Raises:
        ScenarioError: there is no such scenario.
    """
    cluster = read_scenario(scenario_name)
    scenario = scenario_of(cluster, synthetic_inputs(cluster, seed))
    warm_up(POLICIES)
    _policy(scenario, "random", 200, seed)  # makes the scenario's tables
    engine = _engine(scenario, queries, seed)
    found: dict[str, Any] = {
        "scenario": cluster.name,
        "queries": queries,
        "nodes": scenario.nodes,
        "destinations": int(scenario.node_of.size),
        "engine_queries_per_second": engine,
    }
    rates = {}
    for name in POLICIES:
        rate, outside = _policy(scenario, name, queries, seed)
        rates[name] = rate
        found[f"{name}_queries_per_second"] = rate
        found[f"{name}_outside_queries_per_second"] = outside
    for name in BATCHED:
        rate, _ = _policy(scenario, name, queries, seed, SimulatedWindow(1e9, 30))
        found[f"{name}_windows_queries_per_second"] = rate
    found["cheapest_policy"] = max(rates, key=lambda name: rates[name])
    found["cheapest_policy_queries_per_second"] = max(rates.values())
    return found


def _engine(scenario: Scenario, queries: int, seed: int) -> float:
    rng = np.random.default_rng(seed)
    work = workload_of(poisson(queries, 1.0, rng), scenario.queries, rng)
    chosen = rng.integers(0, scenario.node_of.size, queries)
    node = scenario.node_of[chosen]
    predicted = scenario.pair_seconds[work.query, chosen]
    real = predicted * np.exp(scenario.noise * work.luck)
    steps = list(
        zip(work.arrivals.tolist(), node.tolist(), predicted.tolist(), real.tolist(), strict=True)
    )
    cluster = Cluster(scenario.slots)
    started = time.perf_counter()
    for request, (moment, where, seconds, really) in enumerate(steps):
        cluster.advance(moment)
        cluster.send(request, where, seconds, really)
    while (end := cluster.next_completion()) < float("inf"):
        cluster.advance(end)
    return queries / (time.perf_counter() - started)


def _policy(
    scenario: Scenario, name: str, queries: int, seed: int, window: SimulatedWindow | None = None
) -> tuple[float, float]:
    rng = np.random.default_rng(seed)
    work = workload_of(poisson(queries, 1.0, rng), scenario.queries, rng)
    policy = policy_named(name)
    started = time.perf_counter()
    outcome = simulate(scenario, work, policy, np.array(DRLM_WEIGHTS), window=window)
    seconds = time.perf_counter() - started
    outside = max(seconds - float(outcome.decision_seconds.sum()), 1e-9)
    return queries / seconds, queries / outside
