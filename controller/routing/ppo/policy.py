"""Learned policies as routing policies, with a fall-back for what they were not trained on."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import numpy as np

from controller.routing.baselines.greedy_reward import GreedyRewardPolicy
from controller.routing.policy import UNASSIGNED, Budget, Decision, FallbackCause
from controller.routing.ppo.artifact import FindArtifact, NoArtifact, PolicyArtifact
from controller.routing.ppo.network import factorised_choice, flat_choice, set_logits
from controller.routing.ppo.observation import (
    Float32Array,
    Layout,
    candidate_features,
    candidates_of,
    layout_observation,
)
from controller.routing.problem import BoolArray, FloatArray, IntArray, RoutingProblem

RANGE_MARGIN: Final = 0.25
"""An input may leave the range of the training by this share of the range's width, and by
`ABSOLUTE_MARGIN`."""

ABSOLUTE_MARGIN: Final = 0.25


SERVED_ARCHITECTURES: Final[Mapping[str, tuple[str, ...]]] = {
    "ppo": ("factorised", "flat"),
    "ppo-set": ("set",),
}
"""Of the policies that operators can choose."""


class OutOfRange(Exception):
    """The policy was not trained on anything like this; the text says what is different."""


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
        columns = match_layout(artifact.layout, problem)
        return partial(_choose_pair, problem, artifact, artifact.layout, columns)

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


def check_range(inputs: Float32Array, lowest: Float32Array, highest: Float32Array) -> None:
    """Pass if no input is far outside what the training saw.

    Args:
        inputs: float32[..., inputs].

    Raises:
        OutOfRange: with the first input that is.
    """
    slack = RANGE_MARGIN * (highest - lowest) + ABSOLUTE_MARGIN
    flat = inputs.reshape(-1, inputs.shape[-1])
    low, high = flat.min(axis=0), flat.max(axis=0)
    outside = (low < lowest - slack) | (high > highest + slack)
    if outside.any():
        index = int(np.argmax(outside))
        raise OutOfRange(
            f"input {index} lies in {low[index]:.3g}..{high[index]:.3g}, trained were "
            f"{lowest[index]:.3g}..{highest[index]:.3g}"
        )


def match_layout(layout: Layout, problem: RoutingProblem) -> tuple[IntArray, IntArray, IntArray]:
    """The layout's model int64[D] and node int64[D] of each column, and node int64[N].

    By the keys of the names. A problem without keys must have exactly the trained columns: node
    after node, the models of each in the layout's order.

    Raises:
        OutOfRange: a node or model is unknown, or the columns cannot be matched.
    """
    keys, nodes = problem.metadata.model_key, problem.metadata.node_key
    if keys is None or nodes is None:
        node_of, model_of = np.nonzero(layout.deployed.T)
        if problem.n_nodes != layout.node_keys.size or not np.array_equal(node_of, problem.node_of):
            raise OutOfRange("the problem names neither nodes nor models, and is no trained fleet")
        return model_of, node_of, np.arange(layout.node_keys.size)
    usable = problem.feasible.any(axis=0)
    model_at = _positions(layout.model_keys, keys)
    node_at = _positions(layout.node_keys, nodes)
    stranger = usable & ((model_at < 0) | (node_at[problem.node_of] < 0))
    if stranger.any():
        column = int(np.argmax(stranger))
        what = "model" if model_at[column] < 0 else "node"
        raise OutOfRange(f"a {what} that the policy was not trained on can take requests")
    return model_at, node_at[problem.node_of], node_at


def _positions(known: IntArray, keys: IntArray) -> IntArray:
    """Index of each key among the known ones, -1 where it is not."""
    order = np.argsort(known)
    at = np.minimum(np.searchsorted(known[order], keys), known.size - 1)
    found = order[at]
    return np.where(known[found] == keys, found, -1)


def _choose_pair(
    problem: RoutingProblem,
    artifact: PolicyArtifact,
    layout: Layout,
    columns: tuple[IntArray, IntArray, IntArray],
    request: int,
    backlog: FloatArray,
) -> tuple[int, int]:
    model_of, node_of, node_at = columns
    models, nodes = layout.deployed.shape
    feasible = np.flatnonzero(problem.feasible[request])
    m, n = model_of[feasible], node_of[feasible]
    kind = layout.kind_of_node[n]
    mask: BoolArray = np.zeros((1, models, nodes), dtype=np.bool_)
    mask[0, m, n] = True
    quality = np.zeros((1, models))
    quality[0, m] = problem.quality[request, feasible]
    took = problem.latency_seconds[request, feasible] + problem.network_seconds[request, feasible]
    seconds, count = np.zeros((1, models, layout.kinds)), np.zeros((models, layout.kinds))
    np.add.at(seconds[0], (m, kind), took)
    np.add.at(count, (m, kind), 1.0)
    seconds[0] /= np.maximum(count, 1.0)
    waiting = np.zeros((1, nodes))
    waiting[0, node_at[node_at >= 0]] = backlog[node_at >= 0]
    weights = problem.weights[None, :]
    seen = layout_observation(layout, quality, seconds, waiting, mask, weights)
    check_range(seen.vector[0], artifact.lowest, artifact.highest)
    if artifact.architecture == "flat":
        model, node = flat_choice(artifact.weights, seen)
    else:
        model, node = factorised_choice(artifact.weights, layout, seen)
    return int(feasible[np.flatnonzero((m == model) & (n == node))[0]]), int(feasible.size)
