from collections import Counter
from collections.abc import Sequence

import numpy as np

from controller.lab.bench.decision import decision_section
from controller.lab.simulator.scenario_file import read_scenario
from controller.routing.policies import policy_named
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
    assert found["predicted_destinations"] == 0  # of models that the small predictors do not know
    assert 1 <= found["busy_nodes_p50"] <= 4
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
