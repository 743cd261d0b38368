"""Times the whole decision of DRLM for one new query, from its text to a node.

The fleet is the paper's, 64 nodes and all its placements, as a live controller's snapshot; the
parts are those that serve: embedding model, fitted predictors, formulation, learned policy.
"""

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import numpy as np

from controller.domain.cluster import (
    Calibration,
    ClusterSnapshot,
    Destination,
    NetworkPath,
    Node,
    NodeKind,
    NodeState,
    PowerProfile,
    TokenPrice,
)
from controller.domain.request import InferenceRequest, Sampling
from controller.ids import ModelName, NodeId, RequestId
from controller.predictors.class_conditioned import ClassConditioned
from controller.predictors.embedding import EmbeddingBackend
from controller.predictors.fitted import FittedPredictors
from controller.request_manager.estimates import combined
from controller.routing.formulation import formulate
from controller.routing.policy import Budget, RoutingPolicy
from controller.routing.ppo.observation import DRLM_WEIGHTS
from controller.simulator.cluster import ClusterDescription

_MAX_TOKENS: Final = 256
_PARTS: Final = ("embedding", "predictions", "state", "policy")
_SUBJECTS: Final = ("sheep", "goats", "apples", "boats", "letters", "stamps", "lamps", "bricks")


def decision_section(
    embedding: EmbeddingBackend,
    fitted: FittedPredictors,
    policy: RoutingPolicy,
    cluster: ClusterDescription,
    repeats: int = 300,
) -> dict[str, Any]:
    """Milliseconds of each part and of the whole for one new query, on one core.

    Every query is a text that was not seen before, and nodes have work waiting that differs from
    query to query. `total` is the whole; `without_embedding` is what is left when the embedding is
    taken away.

    Args:
        embedding: embeds each text anew.
        fitted: on the placements of the cluster.
        policy: decides one request.
        cluster: the fleet.
        repeats: queries that are timed, after a few that are not.
    """
    conditioned = ClassConditioned(fitted)
    snapshot = snapshot_of(cluster)
    limits = np.full(1, float(_MAX_TOKENS))
    rng = np.random.default_rng(0)
    found: dict[str, list[float]] = {name: [] for name in _PARTS}
    fallbacks: Counter[str] = Counter()
    with _one_core():
        for at in range(-5, repeats):  # the first ones compile
            asked, busy = _request(at), _with_backlog(snapshot, rng)
            moments = [time.perf_counter()]
            embedded = embedding.embed([asked.text])
            moments.append(time.perf_counter())
            told = conditioned.predict([asked.text], embedded, limits, busy)
            estimates = combined([asked], busy, None, told)
            moments.append(time.perf_counter())
            batch = formulate(
                [asked],
                busy,
                DRLM_WEIGHTS,
                quality=estimates.quality,
                output_tokens=estimates.output_tokens,
                median_tokens=estimates.median_tokens,
                inference_seconds=estimates.inference_seconds,
                class_quality=estimates.class_quality,
            )
            moments.append(time.perf_counter())
            decision = policy.decide(batch.problem, rng, Budget())
            moments.append(time.perf_counter())
            if at >= 0:
                fallbacks[decision.fallback_reason] += 1
                for name, seconds in zip(_PARTS, np.diff(moments), strict=True):
                    found[name].append(float(seconds))
    total = np.sum([found[name] for name in _PARTS], axis=0)
    figures: dict[str, Any] = {
        "nodes": len(snapshot.nodes),
        "destinations": len(snapshot.destinations),
        "queries": repeats,
        "predicted_destinations": sum(not gap for gap in told.gaps_of_destinations),
        "policy": policy.name,
        "fallbacks": {reason: count for reason, count in fallbacks.items() if reason},
    }
    for name in _PARTS:
        figures |= percentiles(name, np.array(found[name]))
    return {
        **figures,
        **percentiles("without_embedding", total - np.array(found["embedding"])),
        **percentiles("total", total),
    }


def percentiles(name: str, seconds: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float]:
    """Median and 95th percentile in milliseconds, under names that say so."""
    return {
        f"{name}_milliseconds_p50": float(np.median(seconds) * 1e3),
        f"{name}_milliseconds_p95": float(np.percentile(seconds, 95) * 1e3),
    }


@contextmanager
def _one_core() -> Iterator[None]:
    """Keep this process on one core, where the system can."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _request(number: int) -> InferenceRequest:
    subject = _SUBJECTS[number % len(_SUBJECTS)]
    text = (
        f"A farmer has {17 + number} {subject}, and all but {9 + number} get lost. Then he buys "
        "twice as many as are left, while his neighbour, who owns twelve more, sells a third of "
        f"them. How many {subject} do both have now?"
    )
    return InferenceRequest(
        RequestId(f"query-{number}"), text, sampling=Sampling(max_tokens=_MAX_TOKENS)
    )


def _with_backlog(snapshot: ClusterSnapshot, rng: np.random.Generator) -> ClusterSnapshot:
    """The fleet with a third of its nodes at work."""
    waits = rng.exponential(5.0, len(snapshot.nodes)) * (rng.random(len(snapshot.nodes)) < 1 / 3)
    nodes = [
        replace(node, backlog_seconds=float(seconds))
        for node, seconds in zip(snapshot.nodes, waits, strict=True)
    ]
    return replace(snapshot, nodes=tuple(nodes))


def snapshot_of(cluster: ClusterDescription) -> ClusterSnapshot:
    """A described cluster as a live controller would see it; its calibrations are made up."""
    groups = [cluster.groups[at] for at in cluster.group_of_node]
    nodes = [
        Node(
            NodeId(name),
            NodeKind.EDGE,
            NodeState.READY,
            PowerProfile(group.idle_watts, group.active_watts),
            NetworkPath(0.005, 1e8, 1e8),
            0.0,
            0,
            device=cluster.devices[group.device],
        )
        for name, group in zip(cluster.node_names, groups, strict=True)
    ]
    destinations = []
    for at, model in zip(*cluster.destinations, strict=True):
        placed = cluster.models[model]
        configuration = placed.configuration
        rate = 1e10 / placed.read_bytes * groups[at].speed_ratio
        destinations.append(
            Destination(
                nodes[at].node_id,
                ModelName(configuration.name),
                configuration.family,
                configuration.billions,
                f"Q{configuration.quantisation_bits}_0",
                4096,
                groups[at].slots,
                True,
                Calibration(5.0 * rate, rate, rate),
                TokenPrice(),
                0.5,
                "prior",
                0,
                4.0,
            )
        )
    return ClusterSnapshot(tuple(nodes), tuple(destinations))
