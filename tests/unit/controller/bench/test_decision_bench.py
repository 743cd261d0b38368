from collections import Counter
from collections.abc import Sequence

import numpy as np

from controller.bench.decision import decision_section, profiler_of
from controller.routing.policies import policy_named
from controller.simulator.scenario_file import read_scenario
from tests.fakes.predictors import fitted_predictors


class FlatEmbedding:
    """The same for every text; remembers what it was asked."""

    name = model = "flat"
    dimension = 384

    def __init__(self) -> None:
        self.texts: list[str] = []

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        self.texts += texts
        return np.full((len(texts), 384), 384**-0.5, dtype=np.float32)


def test_the_whole_decision_is_the_sum_of_its_parts():
    embedding = FlatEmbedding()
    found = decision_section(
        embedding, fitted_predictors(), policy_named("greedy-reward"), read_scenario("drlm"), 4
    )
    assert (found["nodes"], found["destinations"], found["queries"]) == (64, 959, 4)
    assert found["fallbacks"] == {}
    for part in (
        "embedding",
        "predictions",
        "state",
        "policy",
        "without_embedding",
        "remembered",
        "total",
    ):
        assert 0 < found[f"{part}_milliseconds_p50"] <= found[f"{part}_milliseconds_p95"]
    assert found["total_milliseconds_p95"] > found["without_embedding_milliseconds_p50"]
    assert len(set(embedding.texts)) >= 4
    assert max(Counter(embedding.texts).values()) == 2  # once to be timed, once to be remembered


def test_the_papers_cluster_becomes_a_snapshot_with_all_its_placements():
    cluster = read_scenario("drlm")
    snapshot = profiler_of(cluster).snapshot(0.0)
    assert len({destination.node_id for destination in snapshot.destinations}) == 64
    pairs = {(d.node_id, d.model) for d in snapshot.destinations}
    assert len(pairs) == len(snapshot.destinations) == cluster.destinations[0].size
    kinds = {node.device.kind for node in snapshot.nodes if node.device is not None}
    assert kinds == {"RP", "NJN", "JON", "JOA", "VM"}
