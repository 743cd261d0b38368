"""How long a learned policy takes for one new query at 64 nodes."""

import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from controller.routing.policies import policy_named
from controller.routing.policy import Budget
from controller.training.evaluation import problem_of
from controller.training.vector_environment import VectorEnvironment
from controller.training.worlds import paper_world

POLICIES: Final = ("ppo-set", "ppo", "greedy-reward")


def policy_section(decisions: int = 300) -> dict[str, Any]:
    """Milliseconds of each policy's decision on the paper's cluster, with queues in motion.

    `problem_milliseconds` is the checked problem of 1,040 destinations being built from arrays.
    """
    found: dict[str, Any] = {"destinations": 0, "decisions": decisions}
    for name in POLICIES:
        policy = policy_named(name)
        environment = VectorEnvironment(paper_world(0), 1, np.random.default_rng(0))
        built, decided, left = [], [], 0
        for _ in range(decisions):
            started = time.perf_counter()
            problem = problem_of(environment)
            between = time.perf_counter()
            decision = policy.decide(problem, np.random.default_rng(0), Budget())
            decided.append(time.perf_counter() - between)
            built.append(between - started)
            left += bool(decision.fallback_reason)
            chosen = int(decision.assignment[0])
            node, model = np.nonzero(environment.world.layout.deployed.T)
            environment.step(model[[chosen]], node[[chosen]], np.zeros(1))
        found["destinations"] = problem.n_destinations
        found[name] = {
            "decision_milliseconds_p50": float(np.median(decided) * 1e3),
            "decision_milliseconds_p95": float(np.percentile(decided, 95) * 1e3),
            "problem_milliseconds_p50": float(np.median(built) * 1e3),
            "fallback_ratio": left / decisions,
        }
    return found


def end_to_end_section(
    embed: Callable[[str], Any] | None, predict: Callable[[Any], Any] | None, decisions: int = 100
) -> dict[str, Any]:
    """Milliseconds from the prompt to the node: embedding, predictions, state, policy.

    Args:
        embed: a prompt to whatever `predict` takes; None leaves the embedding out.
        predict: classes, qualities and times of the query's (configuration, kind) pairs; None
            leaves them out, and the figures say so.
    """
    policy = policy_named("ppo-set")
    environment = VectorEnvironment(paper_world(0), 1, np.random.default_rng(0))
    rest, embedding = [], []
    for index in range(decisions):
        started = time.perf_counter()
        seen = embed(f"Question {index}: how far is the moon from the earth?") if embed else None
        embedded = time.perf_counter()
        if predict is not None:
            predict(seen)
        policy.decide(problem_of(environment), np.random.default_rng(0), Budget())
        rest.append(time.perf_counter() - embedded)
        embedding.append(embedded - started)
    return {
        "has_embedding": embed is not None,
        "has_predictions": predict is not None,
        "without_embedding_milliseconds_p50": float(np.median(rest) * 1e3),
        "milliseconds_p50": float(np.median(np.add(rest, embedding)) * 1e3),
    }
