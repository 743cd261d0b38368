"""Times the whole decision of DRLM for one new query, from its text to a node.

The fleet is the paper's, 64 nodes and all its placements, as a live controller's snapshot; the
parts are those that serve: embedding model, fitted predictors, formulation, learned policy.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import numpy as np

from controller.domain.cluster import (
    Calibration,
    ClusterSnapshot,
    NodeKind,
    PowerProfile,
    TokenPrice,
)
from controller.domain.node_report import (
    Health,
    ModelPhase,
    NodeAttributes,
    NodeHello,
    ReportedModel,
)
from controller.domain.request import InferenceRequest, Sampling
from controller.ids import ModelName, NodeId, RequestId
from controller.predictors.class_conditioned import ClassConditioned
from controller.predictors.embedding import CachedEmbedding, EmbeddingBackend
from controller.predictors.fitted import FittedPredictors
from controller.profiler.state import HealthReported, NodeConnected, ProfilerState
from controller.request_manager.estimates import combined
from controller.routing.policy import Budget, RoutingPolicy
from controller.routing.ppo.observation import DRLM_WEIGHTS
from controller.routing.problem import FloatArray
from controller.simulator.cluster import ClusterDescription

_MAX_TOKENS: Final = 256
_INTERVAL_SECONDS: Final = 1.0
_PARTS: Final = ("embedding", "predictions", "state", "policy")
_EPISODE: Final = 100
_WARM_UP: Final = 5
_FORMS: Final = (
    "A farmer has {0} sheep, and all but 9 get lost. Then he buys twice as many as are left, while "
    "his neighbour, who owns {1} goats, sells a third of them. How many animals do both have now?",
    "Where would you put {0} plates after washing {1} of them, on a shelf or in a garden?",
    "Which of {0} organelles of a cell makes most of its energy, and what do {1} others do?",
    "What happens if you swallow {0} seeds of a water melon and wait for {1} days?",
)


def decision_section(
    embedding: EmbeddingBackend,
    fitted: FittedPredictors,
    policy: RoutingPolicy,
    cluster: ClusterDescription,
    repeats: int = 300,
) -> dict[str, Any]:
    """Milliseconds of each part and of the whole for one new query, on one core.

    Every query is a text that was not seen before; nodes have ahead of them what was sent to them,
    as if a query came every second, a hundred after the fleet was idle. `total` is the whole and
    `without_embedding` what is left when the embedding's time is taken away; the caches are then
    the embedding's. `remembered` is the whole for the same queries when their embeddings are known.
    `snapshot` is what the profiler takes to tell the state of the fleet beforehand; one serves a
    whole batch, and it is not in the others.

    Args:
        embedding: embeds each text anew.
        fitted: on the placements of the cluster.
        policy: decides one request.
        cluster: the fleet.
        repeats: queries that are timed, after a few that are not.
    """
    with _one_core():
        decisions = _Decisions(cluster, fitted, policy)
        anew = decisions.timed(embedding, repeats)
        fallbacks = dict(decisions.fallbacks)
        known = CachedEmbedding(embedding)
        known.embed([_request(at).text for at in range(-_WARM_UP, repeats)])
        remembered = decisions.timed(known, repeats)
    figures: dict[str, Any] = {
        "nodes": len(decisions.snapshot.nodes),
        "destinations": len(decisions.snapshot.destinations),
        "predicted_destinations": decisions.predicted_destinations,
        "queries": repeats,
        "policy": policy.name,
        "fallbacks": fallbacks,
    }
    for at, name in enumerate(_PARTS):
        figures |= percentiles(name, anew[:, at])
    return {
        **figures,
        **percentiles("without_embedding", anew[:, 1:].sum(axis=1)),
        **percentiles("remembered", remembered.sum(axis=1)),
        **percentiles("total", anew.sum(axis=1)),
        **percentiles("snapshot", decisions.snapshot_seconds),
    }


class _Decisions:
    """The parts that serve, over one fleet."""

    def __init__(
        self, cluster: ClusterDescription, fitted: FittedPredictors, policy: RoutingPolicy
    ) -> None:
        profiler = profiler_of(cluster)
        self.snapshot = profiler.snapshot(0.0)
        self.snapshot_seconds = _seconds_of(lambda: profiler.snapshot(0.0))
        self.fallbacks: Counter[str] = Counter()
        self.predicted_destinations = 0
        self._conditioned = ClassConditioned(fitted)
        self._policy = policy

    def timed(self, embedding: EmbeddingBackend, repeats: int) -> FloatArray:
        """float64[repeats, parts], seconds of each part for each query."""
        limits = np.full(1, float(_MAX_TOKENS))
        rng = np.random.default_rng(0)
        waits = np.zeros(len(self.snapshot.nodes))
        found = np.empty((repeats, len(_PARTS)))
        for at in range(-_WARM_UP, repeats):  # the first ones compile
            idle_again = at % _EPISODE == 0
            waits = np.maximum(0.0, waits - (np.inf if idle_again else _INTERVAL_SECONDS))
            asked, busy = _request(at), _with_backlog(self.snapshot, waits)
            moments = [time.perf_counter()]
            embedded = embedding.embed([asked.text])
            moments.append(time.perf_counter())
            told = self._conditioned.predict([asked.text], embedded, limits, busy)
            estimates = combined([asked], busy, None, told)
            moments.append(time.perf_counter())
            batch = estimates.formulated([asked], busy, DRLM_WEIGHTS)
            moments.append(time.perf_counter())
            decision = self._policy.decide(batch.problem, rng, Budget())
            moments.append(time.perf_counter())
            chosen = int(decision.assignment[0])
            waits[batch.problem.node_of[chosen]] += batch.problem.work_seconds[0, chosen]
            if at >= 0:
                self.fallbacks.update({why.value: n for why, n in decision.fallbacks.items()})
                found[at] = np.diff(moments)
        self.predicted_destinations = sum(not gap for gap in told.gaps_of_destinations)
        return found


def percentiles(name: str, seconds: FloatArray) -> dict[str, float]:
    """Median and 95th percentile in milliseconds, under names that say so."""
    return {
        f"{name}_milliseconds_p50": float(np.median(seconds) * 1e3),
        f"{name}_milliseconds_p95": float(np.percentile(seconds, 95) * 1e3),
    }


def _seconds_of(call: Callable[[], object], repeats: int = 50) -> FloatArray:
    found = np.empty(repeats)
    for at in range(repeats):
        started = time.perf_counter()
        call()
        found[at] = time.perf_counter() - started
    return found


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
    text = _FORMS[number % len(_FORMS)].format(17 + number, 1012 - number)
    return InferenceRequest(
        RequestId(f"query-{number}"), text, sampling=Sampling(max_tokens=_MAX_TOKENS)
    )


def _with_backlog(snapshot: ClusterSnapshot, waits: FloatArray) -> ClusterSnapshot:
    nodes = [
        replace(node, backlog_seconds=float(seconds))
        for node, seconds in zip(snapshot.nodes, waits, strict=True)
    ]
    return replace(snapshot, nodes=tuple(nodes))


def profiler_of(cluster: ClusterDescription) -> ProfilerState:
    """What a live controller knows when a described cluster has connected, idle.

    How fast a model decodes where is made up, and takes no part in what is timed.
    """
    profiler = ProfilerState(stale_seconds=3600.0)
    of_node: list[list[ReportedModel]] = [[] for _ in cluster.node_names]
    groups = [cluster.groups[at] for at in cluster.group_of_node]
    for at, model in zip(*cluster.destinations, strict=True):
        placed = cluster.models[model]
        configuration = placed.configuration
        rate = 1e10 / placed.read_bytes * groups[at].speed_ratio
        of_node[at].append(
            ReportedModel(
                ModelName(configuration.name), configuration.family, configuration.billions,
                f"Q{configuration.quantisation_bits}_0", "", ModelPhase.READY, "", 4096,
                groups[at].slots, Calibration(5.0 * rate, rate, rate), TokenPrice(), True, 4.0,
            )
        )  # fmt: skip
    for name, group, models in zip(cluster.node_names, groups, of_node, strict=True):
        device = cluster.devices[group.device]
        attributes = NodeAttributes(
            NodeKind.EDGE, device.kind, device.cores, device.memory_bytes, "", "", "",
            PowerProfile(group.idle_watts, group.active_watts),
        )  # fmt: skip
        hello = NodeHello(NodeId(name), "start", attributes, tuple(models))
        profiler.apply(NodeConnected(hello, False), 0.0)
        idle = Health(1.0, 0.1, 1 << 30, None, None, "none", None, (), ())
        profiler.apply(HealthReported(hello.node_id, idle), 0.0)
    return profiler
