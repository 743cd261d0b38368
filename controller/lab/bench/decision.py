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

from controller.domain.request import InferenceRequest, Sampling
from controller.ids import RequestId
from controller.lab.bench.live_fleet import LiveFleet, profiler_of, speed_ratios
from controller.lab.simulator.cluster import ClusterDescription
from controller.predictors.class_conditioned import ClassConditioned
from controller.predictors.fitted import FittedPredictors
from controller.quality.embedding import CachedEmbedding, EmbeddingBackend
from controller.request_manager.estimates import combined
from controller.routing.decision_memory import DecisionMemory
from controller.routing.policy import Budget, RoutingPolicy
from controller.routing.ppo.observation import DRLM_WEIGHTS
from controller.routing.problem import FloatArray

_MAX_TOKENS: Final = 256
_INTERVAL_SECONDS: Final = 1.0
_REST_SECONDS: Final = 600.0
_PARTS: Final = ("embedding", "predictions", "state", "policy")
_EPISODE: Final = 100
_WARM_UP: Final = 5
_FORMS: Final = (
    "A farmer has {count} sheep, and all but 9 get lost. Then he buys twice as many as are left, "
    "while his neighbour, who owns {other} {plural}, sells a third of them. How many animals do "
    "both have now?",
    "Which organelle makes most of the energy in a cell of {plural} that live in {place}? "
    "A. nucleus B. ribosome C. mitochondrion D. vacuole",
    "Which river has to be crossed on the way from the capital of {place} to its coast, where "
    "{plural} live? A. Danube B. Nile C. Amazon D. Volga",
    "In which century did the first empire of {place} end, whose coat of arms had {plural}? "
    "A. 5th B. 12th C. 15th D. 19th",
    "Where in {place} would somebody look for {plural} that got lost? "
    "A. shelf B. garden C. pocket D. bank E. cloud",
    "What happens if you see {plural} before breakfast on a journey through {place}?",
)
"""One for each class of the paper's setting."""

_PLURALS: Final = ("goats", "foxes", "swans", "bees", "trout", "horses", "geese", "lions")
_PLACES: Final = ("Peru", "Egypt", "France", "Ghana", "Japan", "Norway", "Persia", "Rome")


def decision_section(
    embedding: EmbeddingBackend,
    fitted: FittedPredictors,
    policy: RoutingPolicy,
    cluster: ClusterDescription,
    repeats: int = 300,
) -> dict[str, Any]:
    """Milliseconds of each part and of the whole for one new query, on one core.

    Every query is a text that was not seen before. One comes every second on average, a hundred
    after each time that the fleet was idle, and nodes serve what was sent to them. `total` is the
    whole and `without_embedding` what is left when the embedding's time is taken away; the caches
    are then the embedding's. `remembered` is the whole for the same queries when their embeddings
    are known. `snapshot` is what the profiler takes to tell the state of the fleet beforehand; one
    serves a whole batch, and it is not in the others.

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
        "nodes": len(cluster.node_names),
        "destinations": int(cluster.destinations[0].size),
        "predicted_destinations": decisions.predicted_destinations,
        "queries": repeats,
        "policy": policy.name,
        "fallbacks": fallbacks,
        "busy_nodes_p50": float(np.median(decisions.busy_nodes)),
    }
    for at, name in enumerate(_PARTS):
        figures |= percentiles(name, anew[:, at])
    return {
        **figures,
        **percentiles("without_embedding", anew[:, 1:].sum(axis=1)),
        **percentiles("remembered", remembered.sum(axis=1)),
        **percentiles("total", anew.sum(axis=1)),
        **percentiles("snapshot", np.array(decisions.snapshot_seconds)),
    }


class _Decisions:
    """The parts that serve, over one fleet."""

    def __init__(
        self, cluster: ClusterDescription, fitted: FittedPredictors, policy: RoutingPolicy
    ) -> None:
        self.cluster = cluster
        self.fallbacks: Counter[str] = Counter()
        self.busy_nodes: list[int] = []
        self.snapshot_seconds: list[float] = []
        self.predicted_destinations = 0
        self._conditioned = ClassConditioned(fitted)
        self._policy = policy
        # The predictors know a class of devices; how much faster a node is, the scenario does.
        self._speed_ratios = speed_ratios(cluster, profiler_of(cluster).snapshot(0.0))

    def timed(self, embedding: EmbeddingBackend, repeats: int) -> FloatArray:
        """float64[repeats, parts], seconds of each part for each query."""
        limits = np.full(1, float(_MAX_TOKENS))
        rng, fleet, now = np.random.default_rng(0), LiveFleet(self.cluster), 0.0
        memory = DecisionMemory()
        found = np.empty((repeats, len(_PARTS)))
        for at in range(-_WARM_UP, repeats):  # the first ones compile
            now += rng.exponential(_INTERVAL_SECONDS) + (_REST_SECONDS if not at % _EPISODE else 0)
            asked = _request(at)
            fleet.advance(now)
            moments = [time.perf_counter()]
            snapshot = fleet.snapshot(now)
            moments.append(time.perf_counter())
            embedded = embedding.embed([asked.text])
            moments.append(time.perf_counter())
            told = self._conditioned.predict([asked.text], embedded, limits, snapshot, memory)
            told = replace(told, inference_seconds=told.inference_seconds / self._speed_ratios)
            estimates = combined([asked], snapshot, None, told, memory)
            moments.append(time.perf_counter())
            batch = estimates.formulated([asked], snapshot, DRLM_WEIGHTS, memory=memory)
            moments.append(time.perf_counter())
            decision = self._policy.decide(batch.problem, rng, Budget())
            moments.append(time.perf_counter())
            fleet.send(batch, asked, int(decision.assignment[0]), now)
            if at >= 0:
                self.fallbacks.update({why.value: n for why, n in decision.fallbacks.items()})
                self.busy_nodes.append(int(np.count_nonzero(batch.problem.backlog_seconds)))
                seconds = np.diff(moments)
                self.snapshot_seconds.append(seconds[0])
                found[at] = seconds[1:]
        self.predicted_destinations = sum(not gap for gap in told.gaps_of_destinations)
        return found


def percentiles(name: str, seconds: FloatArray) -> dict[str, float]:
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
    """Another text for each number of a few hundred, in the forms by turns."""
    turn, form = divmod(number + _WARM_UP, len(_FORMS))
    plural, place = _PLURALS[turn % len(_PLURALS)], _PLACES[turn // len(_PLURALS) % len(_PLACES)]
    text = _FORMS[form].format(count=17 + turn, other=1012 - turn, plural=plural, place=place)
    return InferenceRequest(
        RequestId(f"query-{number}"), text, sampling=Sampling(max_tokens=_MAX_TOKENS)
    )
