"""Who is compared: policies, and how arrivals are handed to them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from controller.lab.simulator.runner import SimulatedWindow
from controller.request_manager.policy_files import policies_in
from controller.routing.baselines.one_by_one import send_each
from controller.routing.policies import policy_named
from controller.routing.policy import UNASSIGNED, Budget, Decision, RoutingPolicy
from controller.routing.ppo.policy import LearnedPolicy
from controller.routing.problem import FloatArray, IntArray, MissingMetadata, RoutingProblem

BATCH_WINDOW: Final = SimulatedWindow(seconds=2.0, most=30)
"""For the policies that decide on batches."""

EACH: Final = SimulatedWindow()
"""For the policies that decide on each arrival."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy and how arrivals are handed to it.

    Attributes:
        label: its name in the tables.
        policy: as `policy_named` knows it.
        window: how arrivals are gathered.
        is_spread: whether its choice of a model is kept and the node of it chosen by the queues.
        training_seed: of a further training of a learned policy; None is the first.
    """

    label: str
    policy: str
    window: SimulatedWindow = EACH
    is_spread: bool = False
    training_seed: int | None = None

    @property
    def heeds_weights(self) -> bool:
        """Whether what it decides depends on the weights of the objective."""
        return self.policy in ("ppo-set", "ppo-set-strangers", "memetic", "cema")

    def folder(self, artifacts: Path) -> Path:
        """Of the learned policy's artifact, in the folder of all."""
        return training_folder(artifacts, self.training_seed) / self.policy

    def trained_again(self, seed: int) -> "Contender":
        """The same policy from another training."""
        return replace(self, label=f"{self.policy} (training {seed})", training_seed=seed)


def training_folder(artifacts: Path, seed: int | None) -> Path:
    """Where the policies of a training lie; None: of the first one."""
    return artifacts if seed is None else artifacts / f"training-{seed}"


PAPER: Final = tuple(
    Contender(name, name) for name in ("random", "high-accuracy", "fastest", "routellm", "optllm")
)
"""DRLM's five."""

GREEDY: Final = Contender("greedy-reward", "greedy-reward")

LEARNED_POLICIES: Final = ("ppo", "ppo-set", "ppo-set-strangers", "ppo-flat", "ppo-plain")
"""Folders of learned policies. The first two are those that serve. `ppo-set-strangers` has never
seen the fleet; `ppo-flat` has one softmax over all pairs; `ppo-plain` is DRLM's as it is."""

SUBJECTS: Final = ("ppo", "ppo-set", "ppo-set-strangers")
"""Learned policies that all others are compared with."""

LEARNED: Final = tuple(Contender(name, name) for name in LEARNED_POLICIES)

SPREAD: Final = tuple(
    Contender(f"{name} (spread)", name, is_spread=True)
    for name in ("high-accuracy", "routellm", "optllm")
)
"""The baselines that ignore queues, with the node chosen by them: what a fair use of them does."""

SEARCHING: Final = (
    Contender("memetic (each)", "memetic"),
    Contender("memetic (window)", "memetic", BATCH_WINDOW),
    Contender("cema (window)", "cema", BATCH_WINDOW),
)

ALL: Final = (*PAPER, GREEDY, *LEARNED, *SPREAD, *SEARCHING)


def policy_of(contender: Contender, artifacts: Path | None = None) -> RoutingPolicy:
    """The policy itself.

    Args:
        contender: whose.
        artifacts: folder of the learned policies' folders. One that is not there, or cannot be
            read, leaves every decision to `greedy-reward`; `is_trained` tells.

    Raises:
        UnknownPolicy: there is none of its name.
    """
    if contender.policy in LEARNED_POLICIES:
        folder = artifacts and training_folder(artifacts, contender.training_seed)
        return LearnedPolicy(contender.policy, policies_in(folder)(contender.policy))
    policy = policy_named(contender.policy)
    return SpreadPolicy(policy) if contender.is_spread else policy


def trained(contenders: Sequence[Contender], artifacts: Path | None) -> tuple[Contender, ...]:
    """The contenders without those learned policies that the folder does not hold."""
    found = []
    for contender in contenders:
        if contender.policy in LEARNED_POLICIES:
            policy = policy_of(contender, artifacts)
            if isinstance(policy, LearnedPolicy) and not policy.is_trained:
                continue
        found.append(contender)
    return tuple(found)


class SpreadPolicy:
    """Another policy's model for each request, at the node where it would be ready soonest.

    Args:
        inner: chooses the model.
    """

    def __init__(self, inner: RoutingPolicy) -> None:
        self.inner = inner
        self.name = f"{inner.name} (spread)"

    def decide(self, problem: RoutingProblem, rng: np.random.Generator, budget: Budget) -> Decision:
        """Decide by the inner policy, then move each request.

        Raises:
            MissingMetadata: the problem does not say which destinations serve the same model.
        """
        model_of = problem.metadata.model_of
        if model_of is None:
            raise MissingMetadata(self.name, "model_of")
        first = self.inner.decide(problem, rng, budget)

        def choose(r: int, feasible: IntArray, backlog: FloatArray) -> int:
            given = int(first.assignment[r])
            if given == UNASSIGNED:
                return int(feasible[0])
            hosts = feasible[model_of[feasible] == model_of[given]]
            ready = problem.latency_seconds[r, hosts] + problem.network_seconds[r, hosts]
            return int(hosts[np.argmin(ready + backlog[problem.node_of[hosts]])])

        moved = send_each(problem, choose)
        return Decision(moved.assignment, None, first.evaluations, first.fallback_reason)
