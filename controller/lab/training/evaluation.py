"""Judging routing policies, as they serve, on the vectorised environment's fleets."""

import time
from dataclasses import dataclass

import numpy as np

from controller.lab.training.vector_environment import Traffic, VectorEnvironment, World
from controller.routing.baselines.greedy_reward import rewards as rewards_of
from controller.routing.policy import Budget, RoutingPolicy
from controller.routing.ppo.observation import DRLM_WEIGHTS
from controller.routing.problem import ProblemMetadata, RoutingProblem


@dataclass(frozen=True, slots=True)
class Judged:
    """Means over all queries of all runs; `reward_error` is the standard error over runs."""

    reward: float
    reward_error: float
    quality: float
    inference_seconds: float
    waiting_seconds: float
    decision_milliseconds: float
    fallback_ratio: float


def problem_of(environment: VectorEnvironment) -> RoutingProblem:
    """The decision that an environment of size 1 waits for; columns node after node."""
    world, layout = environment.world, environment.world.layout
    node_of, model_of = np.nonzero(layout.deployed.T)
    kind = layout.kind_of_node[node_of]
    query = int(environment.query[0])
    seconds = world.seconds[query, model_of, kind][None, :]
    return RoutingProblem(
        quality=world.quality[query, model_of][None, :],
        cost_usd=seconds * world.usd_per_second[kind],
        energy_joules=seconds * world.watts[kind],
        work_seconds=seconds,
        latency_seconds=seconds,
        network_seconds=np.zeros_like(seconds),
        node_of=node_of,
        backlog_seconds=environment.waits()[0],
        feasible=environment.up[0, node_of][None, :],
        weights=np.array(environment.weights[0]),
        metadata=ProblemMetadata(
            model_of=model_of,
            slots=world.slots[kind],
            parameters_billions=world.parameters_billions[model_of],
            node_key=layout.node_keys,
            model_key=layout.model_keys[model_of],
        ),
    )


def judge(
    policy: RoutingPolicy,
    world: World,
    requests: int,
    rate: float,
    runs: int,
    seed: int = 1000,
    down_ratio: float = 0.0,
) -> Judged:
    """Send queries one by one, as DRLM does; the same seeds give every policy the same arrivals."""
    rewards, right, waited, took, thought = [], [], [], [], []
    fallbacks = 0
    for run in range(runs):
        rng = np.random.default_rng((seed, run))
        traffic = Traffic(rates=(rate, rate), down_ratio=down_ratio)
        environment = VectorEnvironment(world, 1, rng, traffic)
        environment.weights[:] = DRLM_WEIGHTS
        gained = 0.0
        for _ in range(requests):
            problem = problem_of(environment)
            started = time.perf_counter()
            decision = policy.decide(problem, rng=np.random.default_rng(run), budget=Budget())
            thought.append(time.perf_counter() - started)
            fallbacks += bool(decision.fallback_reason)
            chosen = int(decision.assignment[0])
            node = int(problem.node_of[chosen])
            model = int(np.nonzero(world.layout.deployed.T)[1][chosen])
            gained += _reward(problem, chosen)
            found = environment.step(np.array([model]), np.array([node]), np.zeros(1))
            right.append(float(found.correct[0]))
            waited.append(float(found.waiting[0]))
            took.append(float(found.seconds[0]))
        rewards.append(gained / requests)
    return Judged(
        reward=float(np.mean(rewards)),
        reward_error=float(np.std(rewards) / np.sqrt(runs)),
        quality=float(np.mean(right)),
        inference_seconds=float(np.mean(took)),
        waiting_seconds=float(np.mean(waited)),
        decision_milliseconds=float(np.median(thought) * 1e3),
        fallback_ratio=fallbacks / (runs * requests),
    )


def _reward(problem: RoutingProblem, chosen: int) -> float:
    """DRLM's reward of the chosen destination among all feasible ones."""
    feasible = np.flatnonzero(problem.feasible[0])
    gained = rewards_of(
        problem.quality[0, feasible],
        problem.latency_seconds[0, feasible] + problem.backlog_seconds[problem.node_of[feasible]],
    )
    return float(gained[np.flatnonzero(feasible == chosen)[0]])
