"""What a learned policy sees of a decision; serving and training build it with the same code.

Axes: B decisions side by side, P candidates, M models, N nodes, K kinds of nodes.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from controller.routing.baselines.greedy_reward import (
    LATENCY_WEIGHT,
    QUALITY_WEIGHT,
    latency_penalty,
)
from controller.routing.problem import FloatArray, IntArray, RoutingProblem

Float32Array: TypeAlias = NDArray[np.float32]

REWARD_SCALE: Final = QUALITY_WEIGHT + LATENCY_WEIGHT
"""What DRLM's alpha and beta sum to; weights sum to 1."""

DRLM_WEIGHTS: Final = (QUALITY_WEIGHT / REWARD_SCALE, 0.0, 0.0, LATENCY_WEIGHT / REWARD_SCALE)
"""Quality, cost, energy, time of DRLM's reward."""

CANDIDATE_FEATURES: Final = (
    "quality_scaled",
    "quality",
    "latency_scaled",
    "latency_penalty",
    "reward",
    "reward_below_best",
    "log_seconds",
    "log_waiting",
    "log_slower_than_fastest",
    "node_best_quality",
    "peers_idle",
    "peers_waiting",
    "energy_scaled",
    "cost_scaled",
    "weight_quality",
    "weight_cost",
    "weight_energy",
    "weight_time",
    "fleet_idle",
    "fleet_waiting",
    "waiting_share",
)
"""Of one candidate; all without dimension, so none names a node or a model."""

_LOG_SCALE: Final = 5.0
_SAME_LOG_SECONDS: Final = 0.01


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """What may be chosen in B decisions, each array float64[B, P] unless it says otherwise.

    Attributes:
        mask: bool[B, P]; real and feasible. Other entries of the arrays mean nothing.
        quality: predicted, 0 to 1.
        seconds: predicted inference time, network included.
        waiting: predicted seconds until it can start.
        energy_joules, cost_usd: of this request there.
        fastest_seconds: the least `seconds` of the same model anywhere in the fleet.
        node_best_quality: of what the candidate's node hosts, the best for this request.
        peers_idle: share of the destinations with the same model whose node is idle.
        peers_waiting: mean log(1 + waiting) over them.
        fleet_idle, fleet_waiting: float64[B]; the same over all nodes.
        latest_seconds: float64[B]; the greatest waiting + inference of any destination, those that
            `shortlist` left out included.
        weights: float64[B, 4]; quality, cost, energy, time.
    """

    mask: NDArray[np.bool_]
    quality: FloatArray
    seconds: FloatArray
    waiting: FloatArray
    energy_joules: FloatArray
    cost_usd: FloatArray
    fastest_seconds: FloatArray
    node_best_quality: FloatArray
    peers_idle: FloatArray
    peers_waiting: FloatArray
    fleet_idle: FloatArray
    fleet_waiting: FloatArray
    latest_seconds: FloatArray
    weights: FloatArray


def scaled(values: FloatArray, mask: NDArray[np.bool_]) -> FloatArray:
    """0 to 1 over the unmasked entries of the last axis; 0 where all are equal or masked."""
    low = np.where(mask, values, np.inf).min(axis=-1, keepdims=True)
    high = np.where(mask, values, -np.inf).max(axis=-1, keepdims=True)
    return _between(values, mask, low, high)


def _between(
    values: FloatArray, mask: NDArray[np.bool_], low: FloatArray, high: FloatArray
) -> FloatArray:
    width = np.where(high > low, high - low, 1.0)
    inside = np.where(mask & (high > low), values - np.where(np.isfinite(low), low, 0.0), 0.0)
    return np.asarray(inside / width)


def candidate_features(candidates: Candidates) -> tuple[Float32Array, FloatArray]:
    """The network's input and the one-step reward of every candidate.

    The reward is DRLM's, with money and energy as further penalties: 1.1 * (w_Q quality~ - w_T
    Phi(latency~) - w_E energy~ - w_C cost~), each term scaled over the candidates. With
    `DRLM_WEIGHTS` it is the paper's.

    Returns:
        float32[B, P, len(CANDIDATE_FEATURES)] and float64[B, P]; 0 where masked.
    """
    c = candidates
    finish = c.seconds + c.waiting
    earliest = np.where(c.mask, finish, np.inf).min(axis=1, keepdims=True)
    late = _between(finish, c.mask, earliest, np.maximum(c.latest_seconds[:, None], earliest))
    penalty = latency_penalty(np.minimum(late, 1.0))
    good = scaled(c.quality, c.mask)
    joules, usd = scaled(c.energy_joules, c.mask), scaled(c.cost_usd, c.mask)
    weights = c.weights[:, None, :]  # [B, 1, 4]
    reward = REWARD_SCALE * (
        weights[..., 0] * good
        - weights[..., 1] * usd
        - weights[..., 2] * joules
        - weights[..., 3] * penalty
    )
    reward = np.where(c.mask, reward, 0.0)
    best = np.where(c.mask, reward, -np.inf).max(axis=1, keepdims=True)
    columns = (
        good,
        c.quality,
        late,
        penalty,
        reward,
        reward - best,
        np.log1p(c.seconds) / _LOG_SCALE,
        np.log1p(c.waiting) / _LOG_SCALE,
        np.log(np.maximum(c.seconds, 1e-6) / np.maximum(c.fastest_seconds, 1e-6)) / _LOG_SCALE,
        _between(
            c.node_best_quality,
            c.mask,
            np.where(c.mask, c.quality, np.inf).min(axis=1, keepdims=True),
            np.where(c.mask, c.quality, -np.inf).max(axis=1, keepdims=True),
        ),
        c.peers_idle,
        c.peers_waiting / _LOG_SCALE,
        joules,
        usd,
        *(weights[..., term] for term in range(4)),
        c.fleet_idle[:, None],
        c.fleet_waiting[:, None] / _LOG_SCALE,
        c.waiting / np.maximum(finish, 1e-9),
    )
    features = np.empty((*c.mask.shape, len(columns)), dtype=np.float32)
    with np.errstate(invalid="ignore", over="ignore"):  # masked entries hold anything
        for index, column in enumerate(columns):
            features[..., index] = column
    features[~c.mask] = 0.0
    return features, reward


def candidates_of(
    problem: RoutingProblem, request: int, backlog_seconds: FloatArray
) -> tuple[Candidates, IntArray]:
    """The shortlisted candidates of one request, B = 1, and their destinations, int64[P].

    Destinations of the same model that would serve the request alike (as fast, with as much
    energy and money, on a node with as good a best model) differ in their wait alone, so only the
    one of least wait is kept: 1,040 destinations of the paper's cluster become 85.

    Args:
        problem: at least one destination must be feasible for the request.
        request: its row.
        backlog_seconds: float64[N], with what this batch has already sent.
    """
    feasible = np.flatnonzero(problem.feasible[request])
    node = problem.node_of[feasible]
    model_of = problem.metadata.model_of
    # Without metadata each destination counts as a model of its own.
    model = feasible if model_of is None else model_of[feasible]
    model = np.unique(model, return_inverse=True)[1]
    quality = problem.quality[request, feasible]
    seconds = (
        problem.latency_seconds[request, feasible] + problem.network_seconds[request, feasible]
    )
    waiting = backlog_seconds[node]
    energy = problem.energy_joules[request, feasible]
    cost = problem.cost_usd[request, feasible]

    models, nodes = int(model.max()) + 1, problem.n_nodes
    fastest = np.full(models, np.inf)
    np.minimum.at(fastest, model, seconds)
    best_at_node = np.zeros(nodes)
    np.maximum.at(best_at_node, node, quality)
    count = np.bincount(model, minlength=models)
    idle = np.bincount(model, weights=waiting <= 0.0, minlength=models) / count
    log_wait = np.bincount(model, weights=np.log1p(waiting), minlength=models) / count
    used = np.unique(node)

    alike = np.stack(
        [
            model.astype(np.float64),
            np.round(np.log(np.maximum(seconds, 1e-6)) / _SAME_LOG_SECONDS),
            np.round(np.log(np.maximum(energy, 1e-9)) / _SAME_LOG_SECONDS),
            np.round(np.log(np.maximum(cost, 1e-12)) / _SAME_LOG_SECONDS),
            np.round(best_at_node[node], 3),
        ]
    )
    order = np.lexsort((waiting, *alike[::-1]))  # by group, least wait first, then index
    ranked = alike[:, order]
    is_first = np.ones(order.size, dtype=np.bool_)
    is_first[1:] = (ranked[:, 1:] != ranked[:, :-1]).any(axis=0)
    kept = np.sort(order[is_first])

    def row(values: FloatArray) -> FloatArray:
        return np.asarray(values[kept][None, :], dtype=np.float64)

    return (
        Candidates(
            mask=np.ones((1, kept.size), dtype=np.bool_),
            quality=row(quality),
            seconds=row(seconds),
            waiting=row(waiting),
            energy_joules=row(energy),
            cost_usd=row(cost),
            fastest_seconds=row(fastest[model]),
            node_best_quality=row(best_at_node[node]),
            peers_idle=row(idle[model]),
            peers_waiting=row(log_wait[model]),
            fleet_idle=np.array([np.mean(backlog_seconds[used] <= 0.0)]),
            fleet_waiting=np.array([np.mean(np.log1p(backlog_seconds[used]))]),
            latest_seconds=np.array([np.max(seconds + waiting)]),
            weights=problem.weights[None, :],
        ),
        np.asarray(feasible[kept], dtype=np.int64),
    )


@dataclass(frozen=True, eq=False)
class Layout:
    """The fleet that a factorised policy was trained on: what its outputs stand for.

    Attributes:
        model_keys: int64[M]; `name_key` of each model.
        node_keys: int64[N]; `name_key` of each node.
        kind_of_node: int64[N]; nodes of one kind serve a model equally fast.
        choice_of_model: int64[M]; its (family, scale), the first head.
        level_of_model: int64[M]; its quantisation, the second head.
        deployed: bool[M, N].
    """

    model_keys: IntArray
    node_keys: IntArray
    kind_of_node: IntArray
    choice_of_model: IntArray
    level_of_model: IntArray
    deployed: NDArray[np.bool_]

    @property
    def kinds(self) -> int:
        """K."""
        return int(self.kind_of_node.max()) + 1

    @property
    def choices(self) -> int:
        """Outputs of the first head."""
        return int(self.choice_of_model.max()) + 1

    @property
    def levels(self) -> int:
        """Outputs of the second head."""
        return int(self.level_of_model.max()) + 1

    @cached_property
    def model_table(self) -> IntArray:
        """int64[choices, levels]; the model of each pair, -1 for none."""
        table = np.full((self.choices, self.levels), -1, dtype=np.int64)
        table[self.choice_of_model, self.level_of_model] = np.arange(self.model_keys.size)
        return table

    @cached_property
    def hosted(self) -> NDArray[np.bool_]:
        """bool[M, K]; whether any node of the kind has the model."""
        hosted = np.zeros((self.model_keys.size, self.kinds), dtype=np.bool_)
        for kind in range(self.kinds):
            hosted[:, kind] = self.deployed[:, self.kind_of_node == kind].any(axis=1)
        return hosted


@dataclass(frozen=True, slots=True, eq=False)
class LayoutObservation:
    """What the factorised policy sees of B decisions.

    Attributes:
        vector: float32[B, vector_size]; input of the shared encoder.
        mask: bool[B, M, N]; feasible pairs.
        reward: float32[B, M, N]; one-step reward of each pair, 0 where masked.
        node: float32[B, N, 2]; log waiting, and whether it is idle.
        log_seconds: float32[B, M, K]; log inference time, 0 where not deployed.
    """

    vector: Float32Array
    mask: NDArray[np.bool_]
    reward: Float32Array
    node: Float32Array
    log_seconds: Float32Array


def vector_size(layout: Layout) -> int:
    """Length of `LayoutObservation.vector`."""
    models, nodes = layout.deployed.shape
    return int(2 * models + models * layout.kinds + 2 * nodes + 4)


def queue_inputs(layout: Layout) -> tuple[slice, slice]:
    """Of the vector: the log waits of the nodes, and whether they are idle."""
    models, nodes = layout.deployed.shape
    start = models + models * layout.kinds
    return slice(start, start + 2 * nodes, 2), slice(start + 1, start + 2 * nodes, 2)


def waited_seconds(log_wait: float) -> float:
    """Seconds of a log wait as it stands in the vector."""
    return math.expm1(_LOG_SCALE * log_wait)


def layout_observation(
    layout: Layout,
    quality: FloatArray,
    seconds: FloatArray,
    waiting: FloatArray,
    mask: NDArray[np.bool_],
    weights: FloatArray,
    penalty: FloatArray | None = None,
) -> LayoutObservation:
    """Quality of each model, time of each model on each kind, use and queue of each node.

    The classes of the query enter through the qualities, which are their mixture. After the
    paper's parts the vector has the best reward that each model could bring now and the weights.

    Args:
        layout: whose axes the arrays have.
        quality: float64[B, M].
        seconds: float64[B, M, K]; anything where no node of the kind has the model.
        waiting: float64[B, N], seconds.
        mask: bool[B, M, N]; at least one True a decision.
        weights: float64[B, 4].
        penalty: float64[B, M, N] or None; energy and money, already weighed.

    Source: DRLM, state space; research notes, section 10.1.
    """
    batch, models, nodes = mask.shape
    late = seconds[:, :, layout.kind_of_node] + waiting[:, None, :]  # [B, M, N]
    flat = mask.reshape(batch, -1)
    fee = latency_penalty(scaled(late.reshape(batch, -1), flat))
    good = scaled(np.repeat(quality, nodes, axis=1), flat)
    reward = REWARD_SCALE * (weights[:, :1] * good - weights[:, 3:] * fee)
    reward = np.where(flat, reward, 0.0).reshape(batch, models, nodes)
    if penalty is not None:
        reward = reward - np.where(mask, penalty, 0.0)
    best = np.where(mask, reward, -1.0).max(axis=2)  # [B, M]
    hosted = layout.hosted
    log_seconds = np.where(hosted, np.log1p(np.where(hosted, seconds, 0.0)), 0.0) / _LOG_SCALE
    node = np.stack([np.log1p(waiting) / _LOG_SCALE, waiting <= 0.0], axis=2)
    vector = np.concatenate(
        [quality, log_seconds.reshape(batch, -1), node.reshape(batch, -1), best, weights], axis=1
    )
    return LayoutObservation(
        vector.astype(np.float32),
        mask,
        reward.astype(np.float32),
        node.astype(np.float32),
        log_seconds.astype(np.float32),
    )
