"""Times what DRLM does for one new query, one section a part."""

import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from controller.domain.hardware import DeviceClass, ModelConfiguration, architecture
from controller.lab.bench.decision import decision_section, percentiles
from controller.lab.simulator.scenario_file import read_scenario
from controller.predictors.features import profile_query
from controller.predictors.fitted import FittedPredictors, load_predictors
from controller.predictors.latency_regressor import FeatureLayout, LatencyPredictor
from controller.predictors.quality_table import QualityTable
from controller.predictors.query_classifier import QueryClassifier
from controller.predictors.reading_writing import Placement
from controller.predictors.tree_ensemble import LEAF, TreeEnsemble
from controller.quality.embedding import OnnxEmbedding
from controller.request_manager.policy_files import load_policy
from controller.routing.ppo.policy import LearnedPolicy

_TREES: Final = 600
_LEAVES: Final = 63
_FOREST_TREES: Final = 200
_FOREST_LEAVES: Final = 100
_CLASSES: Final = ("biology", "commonsense", "geography", "history", "mathematics", "truth")
_FAMILIES: Final = ("gemma2", "gemma3", "gpt-oss", "llama3.1", "llama3.2", "mistral", "qwen3",
                    "tinyllama")  # fmt: skip
_PROMPT: Final = (
    "A farmer has 17 sheep, and all but 9 run away. Then he buys twice as many as are left, while "
    "his neighbour, who owns 12 goats, sells a third of them. How many animals do both have now?"
)


def bench_drlm(
    predictors: Path | None, policies: Path | None, rng: np.random.Generator
) -> dict[str, Any]:
    """Figures by section; what is timed runs on one core.

    Args:
        predictors: folder of fitted predictors; None makes trees of the paper's size.
        policies: folder of trained policies; with it and predictors of the paper's setting the
            section `decision` times the whole decision.
        rng: of the made-up trees and embeddings.

    Raises:
        ArtifactError: a folder does not load.
        EmbeddingUnavailableError: there is no embedding model.
    """
    fitted = None if predictors is None else load_predictors(predictors)
    found = {"predictors": predictors_section(fitted, rng)}
    if fitted is not None and policies is not None:
        policy = LearnedPolicy("ppo", load_policy(policies / "ppo"))
        embedding = OnnxEmbedding(threads=1)
        found["decision"] = decision_section(embedding, fitted, policy, read_scenario("drlm"))
    return found


def predictors_section(
    fitted: FittedPredictors | None, rng: np.random.Generator, repeats: int = 200
) -> dict[str, Any]:
    """Milliseconds from a prompt and its embedding to the predictions for 85 pairs."""
    if fitted is None:
        layout = FeatureLayout(_CLASSES, _FAMILIES, ("JOA", "JON", "NJN", "RP", "VM"))
        latency = LatencyPredictor(
            layout, random_trees(rng, _TREES, _LEAVES, len(layout.names), 1), 0.3
        )
        forest = random_trees(rng, _FOREST_TREES, _FOREST_LEAVES, 384, len(_CLASSES))
        classifier = QueryClassifier(_CLASSES, _CLASSES[0], 0.0, forest)
        quality = QualityTable(
            _CLASSES,
            tuple(f"m{at}" for at in range(23)),
            np.ones((len(_CLASSES), 23)),
            np.full((len(_CLASSES), 23), 2.0),
        )
    else:
        latency, classifier, quality = fitted.latency, fitted.classifier, fitted.quality
    placements = latency.encode(_pairs())
    embedding = rng.normal(size=384).astype(np.float32)
    embedding /= np.linalg.norm(embedding)
    profiled, classified, predicted, whole = [], [], [], []
    for _ in range(repeats + 1):  # the first one compiles
        started = time.perf_counter()
        query = profile_query(_PROMPT, embedding=embedding)
        after_profile = time.perf_counter()
        query = classifier.classify([query])[0]
        after_classes = time.perf_counter()
        assert query.class_probabilities is not None
        quality.predict(query.class_probabilities[None, :])
        before_latency = time.perf_counter()
        latency.predict([query], placements)
        ended = time.perf_counter()
        profiled.append(after_profile - started)
        classified.append(after_classes - after_profile)
        predicted.append(ended - before_latency)
        whole.append(ended - started)
    return {
        "is_fitted": fitted is not None,
        "pairs": placements.features.shape[0],
        "latency_trees": int(latency.trees.roots.shape[0]),
        **percentiles("profile", np.array(profiled[1:])),
        **percentiles("classes", np.array(classified[1:])),
        **percentiles("latency", np.array(predicted[1:])),
        **percentiles("all", np.array(whole[1:])),
    }


def _pairs() -> list[Placement]:
    """As many as Table I has: 17 configurations on five classes of devices."""
    gib = 1 << 30
    devices = [
        DeviceClass("RP", 4, 4 * gib),
        DeviceClass("NJN", 4, 4 * gib, 128),
        DeviceClass("JON", 6, 8 * gib, 1024),
        DeviceClass("JOA", 12, 64 * gib, 2048),
        DeviceClass("VM", 8, 24 * gib),
    ]
    scales = [("gemma2", 2.0), ("gemma3", 0.27), ("gemma3", 1.0), ("llama3.2", 1.0),
              ("llama3.2", 3.0), ("tinyllama", 1.1)]  # fmt: skip
    models = [
        ModelConfiguration(family, billions, bits, *(architecture(family, billions) or ()))
        for family, billions in scales
        for bits in (3, 4, 8)
    ][:17]
    return [(model, device) for model in models for device in devices]


def random_trees(
    rng: np.random.Generator, trees: int, leaves: int, n_features: int, n_outputs: int
) -> TreeEnsemble:
    """Trees grown by splitting a random leaf each time: about as deep as real ones."""
    total = 2 * leaves - 1
    feature = np.full(trees * total, LEAF, dtype=np.int32)
    left = np.zeros(trees * total, dtype=np.int32)
    right = np.zeros(trees * total, dtype=np.int32)
    for tree in range(trees):
        start, used = tree * total, 1
        open_leaves = [start]
        while used < total:
            node = open_leaves.pop(int(rng.integers(len(open_leaves))))
            feature[node] = rng.integers(n_features)
            left[node], right[node] = start + used, start + used + 1
            open_leaves += [start + used, start + used + 1]
            used += 2
    values = rng.random((trees * total, n_outputs))
    values /= values.sum(axis=1, keepdims=True) * (1.0 if n_outputs > 1 else trees)
    return TreeEnsemble(
        roots=np.arange(trees, dtype=np.int32) * total,
        feature=feature,
        threshold=rng.normal(size=trees * total),
        left=left,
        right=right,
        missing=np.full(trees * total, 2, dtype=np.int32),
        values=values,
        n_features=n_features,
    )
