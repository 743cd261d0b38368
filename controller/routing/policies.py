"""Every routing policy by the name that operators use.

Other packages add theirs through the entry-point group `pointsman.policies`: the entry's name is
the policy's name, its object a callable without arguments that returns a `RoutingPolicy`.
"""

import difflib
import importlib
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any, Final

import numpy as np

from controller.routing.policy import Budget, RoutingPolicy
from controller.routing.ppo.artifact import FindArtifact, no_artifact
from controller.routing.problem import Normalisation, ProblemMetadata, RoutingProblem

ENTRY_POINT_GROUP: Final = "pointsman.policies"

_LEARNED: Final = "served_policy"
"""What makes each learned policy, of its name and its artifact."""

# By module and attribute, not by object: most policies import Numba, and naming them must not.
_BUILT_IN: Final[dict[str, tuple[str, str]]] = {
    "memetic": ("memetic.algorithm", "MemeticPolicy"),
    "cema": ("memetic.paper", "CemaPolicy"),
    "round-robin": ("baselines.round_robin", "RoundRobinPolicy"),
    "least-loaded": ("baselines.least_loaded", "LeastLoadedPolicy"),
    "random": ("baselines.uniform", "RandomPolicy"),
    "cloud-only": ("baselines.placement", "cloud_only"),
    "edge-only": ("baselines.placement", "edge_only"),
    "high-accuracy": ("baselines.high_accuracy", "HighAccuracyPolicy"),
    "fastest": ("baselines.fastest", "FastestPolicy"),
    "uniroute": ("baselines.uniroute", "UniRoutePolicy"),
    "uniroute-fair": ("baselines.uniroute", "uniroute_fair"),
    "routellm": ("baselines.routellm", "RouteLlmPolicy"),
    "optllm": ("baselines.optllm", "OptLlmPolicy"),
    "greedy-reward": ("baselines.greedy_reward", "GreedyRewardPolicy"),
    "ppo": ("ppo.policy", _LEARNED),
    "ppo-set": ("ppo.policy", _LEARNED),
    "exact": ("exact", "ExactPolicy"),
}

SERVING_POLICIES: Final = tuple(name for name in _BUILT_IN if name != "exact")
"""Ours but for the offline reference, which needs SciPy and may take a minute."""


class UnknownPolicy(LookupError):
    """No policy has this name.

    Attributes:
        name: what was asked for.
        known: the names there are.
        nearest: the known name most like it, or None.
    """

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        matches = difflib.get_close_matches(name.lower().replace("_", "-"), known, n=1)
        self.name = name
        self.known = known
        self.nearest = matches[0] if matches else None
        hint = f" Did you mean {self.nearest!r}?" if self.nearest else ""
        super().__init__(f"No policy is named {name!r}.{hint} Known: {', '.join(known)}.")


class BrokenPolicy(RuntimeError):
    """A policy of another package cannot be loaded or does not keep the contract's shape."""


def policy_names() -> tuple[str, ...]:
    """The names that `policy_named` knows: ours first, then those of other packages, sorted."""
    theirs = sorted(entry.name for entry in _entry_points() if entry.name not in _BUILT_IN)
    return (*_BUILT_IN, *theirs)


def policy_named(name: str, find: FindArtifact = no_artifact) -> RoutingPolicy:
    """The policy of that name, with its default settings.

    A name of ours cannot be taken over by another package.

    Args:
        name: as `policy_names` has it.
        find: gives the artifacts of learned policies; without one they leave every request to their
            fall-back.

    Raises:
        UnknownPolicy: no policy has the name; the error lists those there are.
        BrokenPolicy: another package offers the name, but loading it fails.
    """
    if name in _BUILT_IN:
        module, attribute = _BUILT_IN[name]
        factory = getattr(importlib.import_module(f"controller.routing.{module}"), attribute)
        policy: RoutingPolicy = factory(name, find) if attribute == _LEARNED else factory()
        return policy
    for entry in _entry_points():
        if entry.name == name:
            return _load(entry.name, entry.load)
    raise UnknownPolicy(name, policy_names())


def warm_up(names: Iterable[str] = SERVING_POLICIES) -> None:
    """Compile everything that these policies use, or read it from the cache.

    Takes up to a minute the first time on a machine and under a second later. Call it before
    the first batch, or that batch waits for the compiler.
    """
    problem = RoutingProblem(
        quality=np.array([[0.9, 0.5], [0.8, 0.4], [0.7, 0.6]]),
        cost_usd=np.array([[2.0, 1.0], [2.0, 1.0], [2.0, 1.0]]),
        energy_joules=np.array([[3.0, 1.0], [3.0, 1.0], [3.0, 1.0]]),
        work_seconds=np.array([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]]),
        latency_seconds=np.array([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]]),
        network_seconds=np.full((3, 2), 0.1),
        node_of=np.array([0, 1]),
        backlog_seconds=np.zeros(2),
        feasible=np.ones((3, 2), dtype=np.bool_),
        weights=np.full(4, 0.25),
        normalisation=Normalisation.PAYOFF,
        metadata=ProblemMetadata(node_is_edge=np.array([True, False]), model_of=np.array([0, 1])),
    )
    budget = Budget(seconds=None, max_evaluations=50)
    for name in names:
        policy_named(name).decide(problem, np.random.default_rng(0), budget)


def _entry_points() -> tuple[metadata.EntryPoint, ...]:
    return tuple(metadata.entry_points(group=ENTRY_POINT_GROUP))


def _load(name: str, load: Callable[[], Any]) -> RoutingPolicy:
    try:
        policy = load()()
    except Exception as error:  # whatever a stranger's module raises, the controller goes on
        raise BrokenPolicy(f"policy {name!r} of another package does not load: {error}") from error
    if not callable(getattr(policy, "decide", None)) or not hasattr(policy, "name"):
        raise BrokenPolicy(f"policy {name!r} of another package has no name or no decide()")
    loaded: RoutingPolicy = policy
    return loaded
