"""Learned policies as routing policies, with a fall-back for what they were not trained on."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from controller.routing.baselines.greedy_reward import GreedyRewardPolicy
from controller.routing.policy import UNASSIGNED, Budget, Decision, FallbackCause
from controller.routing.ppo.artifact import FindArtifact, NoArtifact, PolicyArtifact
from controller.routing.ppo.network import factorised_choice, flat_choice, set_logits
from controller.routing.ppo.observation import (
    Layout,
    candidate_features,
    candidates_of,
    layout_observation,
)
from controller.routing.ppo.training_range import (
    FleetMatch,
    OutOfRange,
    check_range,
    check_strangers,
    match_layout,
    vector_in_range,
)
from controller.routing.problem import BoolArray, FloatArray, RoutingProblem

SERVED_ARCHITECTURES: Final[Mapping[str, tuple[str, ...]]] = {
    "ppo": ("factorised", "flat"),
    "ppo-set": ("set",),
}
"""Of the policies that operators can choose."""


class LearnedPolicy:
    """A learned policy over a batch, request by request, each seeing the earlier ones' load.

    A request that is outside what the policy was trained on is sent by `greedy-reward`; the
    decision says how many were and why.

    Args:
        name: as operators know it.
        artifact: what decides; without one all requests fall back.
    """

    def __init__(self, name: str, artifact: PolicyArtifact | NoArtifact) -> None:
        self.name = name
        self._greedy = GreedyRewardPolicy()
        self._artifact = artifact

    @property
    def is_trained(self) -> bool:
        """Whether there is an artifact to decide with."""
        return isinstance(self._artifact, PolicyArtifact)

    def decide(self, problem: RoutingProblem, rng: np.random.Generator, budget: Budget) -> Decision:
        """Assign in one pass; the budget is never needed."""
        if isinstance(self._artifact, NoArtifact):
            return self._fall_back(problem, FallbackCause.NO_ARTIFACT, self._artifact.reason)
        try:
            choose = self._chooser(problem, self._artifact)
        except OutOfRange as error:
            return self._fall_back(problem, FallbackCause.UNKNOWN_FLEET, str(error))
        assignment = np.full(problem.n_requests, UNASSIGNED, dtype=np.int64)
        backlog = problem.backlog_seconds.copy()
        reasons: list[str] = []
        scored = 0
        for r in np.flatnonzero(problem.routable):
            try:
                chosen, seen = choose(int(r), backlog)
            except OutOfRange as error:
                reasons.append(str(error))
                chosen, seen = self._greedily(problem, int(r), backlog), 1
            assignment[r] = chosen
            scored += seen
            backlog[problem.node_of[chosen]] += problem.work_seconds[r, chosen]
        if not reasons:
            return Decision(assignment, evaluations=scored)
        return Decision(
            assignment,
            evaluations=scored,
            fallback_reason=f"{len(reasons)} of {problem.n_requests} requests by "
            f"{self._greedy.name}: {reasons[0]}",
            fallbacks={FallbackCause.OUT_OF_RANGE: len(reasons)},
        )

    def _fall_back(self, problem: RoutingProblem, cause: FallbackCause, why: str) -> Decision:
        whole = self._greedy.decide(problem, np.random.default_rng(0), Budget())
        return Decision(
            whole.assignment,
            evaluations=whole.evaluations,
            fallback_reason=f"{self.name} left it to {self._greedy.name}: {why}",
            fallbacks={cause: int(problem.routable.sum())},
        )

    def _chooser(
        self, problem: RoutingProblem, artifact: PolicyArtifact
    ) -> Callable[[int, FloatArray], tuple[int, int]]:
        if artifact.layout is None:
            return partial(_choose_candidate, problem, artifact)
        match = match_layout(artifact.layout, problem)
        check_strangers(match, problem)
        return partial(_choose_pair, problem, artifact, artifact.layout, match)

    def _greedily(self, problem: RoutingProblem, request: int, backlog: FloatArray) -> int:
        candidates, destinations = candidates_of(problem, request, backlog)
        return int(destinations[np.argmax(candidate_features(candidates)[1][0])])


def served_policy(name: str, find: FindArtifact) -> LearnedPolicy:
    """The learned policy of that name; one of another architecture is not taken for it.

    Args:
        name: one of `SERVED_ARCHITECTURES`.
        find: gives its artifact.
    """
    artifact = find(name)
    if isinstance(artifact, PolicyArtifact):
        fitting = SERVED_ARCHITECTURES[name]
        if artifact.architecture not in fitting:
            artifact = NoArtifact(
                f"the artifact of {name} holds a {artifact.architecture} policy, not a "
                f"{' or '.join(fitting)} one; train {name}"
            )
    return LearnedPolicy(name, artifact)


def _choose_candidate(
    problem: RoutingProblem, artifact: PolicyArtifact, request: int, backlog: FloatArray
) -> tuple[int, int]:
    candidates, destinations = candidates_of(problem, request, backlog)
    features, reward = candidate_features(candidates)
    check_range(features[0], artifact.lowest, artifact.highest)
    logits = set_logits(
        artifact.weights, features, candidates.mask, np.asarray(reward, dtype=np.float32)
    )
    return int(destinations[np.argmax(logits[0])]), int(destinations.size)


def _choose_pair(
    problem: RoutingProblem,
    artifact: PolicyArtifact,
    layout: Layout,
    match: FleetMatch,
    request: int,
    backlog: FloatArray,
) -> tuple[int, int]:
    models, nodes = layout.deployed.shape
    feasible = np.flatnonzero(problem.feasible[request])
    m, n = match.model_of[feasible], match.column_node[feasible]
    mask: BoolArray = np.zeros((1, models, nodes), dtype=np.bool_)
    mask[0, m, n] = True
    quality = np.zeros((1, models))
    quality[0, m] = problem.quality[request, feasible]
    took = problem.latency_seconds[request, feasible] + problem.network_seconds[request, feasible]
    pair, pairs = m * layout.kinds + layout.kind_of_node[n], models * layout.kinds
    count = np.maximum(np.bincount(pair, minlength=pairs), 1)
    seconds = np.bincount(pair, took, minlength=pairs) / count
    waiting = np.zeros((1, nodes))
    known = match.node_at >= 0
    waiting[0, match.node_at[known]] = backlog[known]
    seen = layout_observation(
        layout,
        quality,
        seconds.reshape(1, models, layout.kinds),
        waiting,
        mask,
        problem.weights[None, :],
    )
    vector = vector_in_range(layout, seen.vector[0], artifact.lowest, artifact.highest)
    seen = replace(seen, vector=vector[None, :])
    if artifact.architecture == "flat":
        model, node = flat_choice(artifact.weights, seen)
    else:
        model, node = factorised_choice(artifact.weights, layout, seen)
    return int(feasible[np.flatnonzero((m == model) & (n == node))[0]]), int(feasible.size)
