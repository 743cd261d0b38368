"""Grow DRLM's predictors from measurements, and say how good they are on unseen queries.

Random Forest of 200 trees of depth 20 by scikit-learn; 600 trees of 63 leaves at rate 0.05 by
LightGBM; queries are split 80/20 (sections IV-5 to IV-8 of the paper).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from controller.domain.hardware import (
    DeviceClass,
    ModelConfiguration,
    configuration_of,
    device_class,
)
from controller.offline.measurements import Measurement
from controller.predictors.features import QueryProfile, profile_query
from controller.predictors.fitted import (
    UNLIMITED,
    FittedPredictors,
    MeasuredLimits,
    latency_from_lightgbm,
)
from controller.predictors.latency_regressor import (
    FEATURE_GROUPS,
    FeatureLayout,
    LatencyPredictor,
    feature_group,
)
from controller.predictors.output_length import tabulate_lengths
from controller.predictors.quality_table import CORRECT_FROM, QualityTable, tabulate
from controller.predictors.query_classifier import QueryClassifier, sharpened
from controller.predictors.tree_ensemble import LEAF, TreeEnsemble

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Embed = Callable[[Sequence[str]], NDArray[np.float32]]

HELD_OUT_RATIO: Final = 0.2
FOREST_TREES: Final = 200
FOREST_DEPTH: Final = 20
BOOSTED_TREES: Final = 600
BOOSTED_LEAVES: Final = 63
BOOSTED_RATE: Final = 0.05
# Ours: the paper has 223,835 rows; a fleet of one's own has some hundreds, whose queries 600 trees
# would learn by heart. On 384 rows of the real engine these took the mean R2 from 0.63 to 0.70.
_LEAST_IN_LEAF: Final = 20
_FEATURES_A_TREE: Final = 0.6
_ROWS_A_TREE: Final = 0.7
CONFIDENCE_THRESHOLD: Final = 0.5
"""Of the sharpened probabilities; ours: the paper gives none. Below it the forest itself expects
to be wrong more often than right."""
_SHARPNESSES: Final = tuple(1.0 + 0.25 * step for step in range(21))

_MOST_CLASSES: Final = 64
_LEAST_QUERIES: Final = 10
"""A subject with fewer queries counts as its workload."""


class FitError(Exception):
    """The measurements do not suffice; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class TrainingTable:
    """Measurements by column: n rows over Q queries, M models and D device classes.

    Attributes:
        prompts: text of each query.
        classes: names of the C classes.
        class_index: int64[Q], the true class of each query.
        model_names: M names under which quality and length are kept.
        models: M configurations.
        devices: D device classes.
        query: int64[n].
        model: int64[n].
        device: int64[n].
        seconds: float64[n], of inference without waiting, above 0.
        completion_tokens: float64[n]; NaN is unknown.
        score_ratio: float64[n]; NaN was not graded.
        limits: of the answers.
    """

    prompts: tuple[str, ...]
    classes: tuple[str, ...]
    class_index: IntArray
    model_names: tuple[str, ...]
    models: tuple[ModelConfiguration, ...]
    devices: tuple[DeviceClass, ...]
    query: IntArray
    model: IntArray
    device: IntArray
    seconds: FloatArray
    completion_tokens: FloatArray
    score_ratio: FloatArray
    limits: MeasuredLimits = UNLIMITED

    def __post_init__(self) -> None:
        if self.query.shape[0] == 0:
            raise FitError("there are no measurements to fit on")
        if not (np.isfinite(self.seconds).all() and (self.seconds > 0).all()):
            raise FitError("a measurement's inference time is not above 0")


def query_class(row: Measurement) -> str:
    """MMLU's subject; of other workloads, whose topics are many and small, their own name."""
    return row.question_class if row.workload.startswith("mmlu") else row.workload


def table_of(rows: Sequence[Measurement], *, device_by: str = "hardware") -> TrainingTable:
    """Measurements as columns; rows without tokens, decode time or scale are left out.

    Args:
        rows: of `read_measurements`.
        device_by: "hardware" takes machines of one hardware name, cores and memory as one class;
            "node" tells every node apart.

    Raises:
        FitError: no row is usable, or there are too many classes.
    """
    prompts: dict[str, int] = {}
    texts: list[str] = []
    labels: list[str] = []
    workloads: list[str] = []
    models: dict[str, int] = {}
    configurations: list[ModelConfiguration] = []
    devices: dict[DeviceClass, int] = {}
    columns: list[tuple[int, int, int, float, float, float]] = []
    longest, cut = 0, 0
    for row in rows:
        seconds = row.prefill_seconds + row.decode_seconds
        configuration = configuration_of(
            row.model_family, row.model_parameters_billions, row.model_quantisation
        )
        if seconds <= 0 or row.completion_tokens <= 0 or configuration is None:
            continue
        if row.prompt_digest not in prompts:
            prompts[row.prompt_digest] = len(texts)
            texts.append(row.prompt)
            labels.append(query_class(row))
            workloads.append(row.workload)
        if row.model not in models:
            models[row.model] = len(configurations)
            configurations.append(configuration)
        longest = max(longest, row.max_tokens)
        cut += row.finish_reason == "length"
        device = device_class(
            row.node_id if device_by == "node" else row.hardware,
            row.cpu_cores,
            row.memory_bytes,
            row.has_gpu,
        )
        columns.append(
            (
                prompts[row.prompt_digest],
                models[row.model],
                devices.setdefault(device, len(devices)),
                seconds,
                float(row.completion_tokens),
                float("nan") if row.score_ratio is None else row.score_ratio,
            )
        )
    if not columns:
        raise FitError(
            "no measurement has prefill and decode seconds, tokens, and the model's scale and "
            "quantisation; measure with `edge-controller profile run`"
        )
    labels = _without_small_classes(labels, workloads)
    classes = sorted(set(labels))
    if len(classes) > _MOST_CLASSES:
        raise FitError(f"{len(classes)} query classes; choose at most {_MOST_CLASSES} of them")
    table = np.array(columns, dtype=np.float64)
    return TrainingTable(
        prompts=tuple(texts),
        classes=tuple(classes),
        class_index=np.array([classes.index(label) for label in labels], dtype=np.int64),
        model_names=tuple(models),
        models=tuple(configurations),
        devices=tuple(devices),
        query=table[:, 0].astype(np.int64),
        model=table[:, 1].astype(np.int64),
        device=table[:, 2].astype(np.int64),
        seconds=table[:, 3],
        completion_tokens=table[:, 4],
        score_ratio=table[:, 5],
        limits=MeasuredLimits(longest, cut / len(columns)),
    )


def _without_small_classes(labels: Sequence[str], workloads: Sequence[str]) -> list[str]:
    counts = Counter(labels)
    return [
        label if counts[label] >= _LEAST_QUERIES else workload
        for label, workload in zip(labels, workloads, strict=True)
    ]


def split_queries(n_queries: int, seed: int) -> NDArray[np.bool_]:
    """bool[Q], which queries are held out: a fifth of them, at least one.

    Raises:
        FitError: fewer than five queries.
    """
    if n_queries < 5:
        raise FitError(f"{n_queries} queries; at least 5 are needed to hold a fifth out")
    held_out = np.zeros(n_queries, dtype=np.bool_)
    chosen = np.random.default_rng(seed).permutation(n_queries)
    held_out[chosen[: max(1, round(n_queries * HELD_OUT_RATIO))]] = True
    return held_out


def fit(
    table: TrainingTable,
    embed: Embed,
    *,
    seed: int = 0,
    boosted_trees: int = BOOSTED_TREES,
    forest_trees: int = FOREST_TREES,
    threads: int = 2,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[FittedPredictors, dict[str, Any]]:
    """Predictors grown on four fifths of the queries, and figures on the rest.

    Args:
        table: measurements.
        embed: texts to float32[n, 384].
        seed: of the split and of both kinds of trees.
        boosted_trees: of the latency predictor.
        forest_trees: of the classifier.
        threads: of LightGBM and scikit-learn.
        say: told what is being done.

    Raises:
        FitError: too few queries, or only one class.
    """
    held_out = split_queries(len(table.prompts), seed)
    if np.unique(table.class_index[~held_out]).shape[0] < 2:
        raise FitError("the queries are all of one class; measure a second workload")
    say(f"embedding {len(table.prompts)} queries")
    embeddings = np.asarray(embed(table.prompts), dtype=np.float32)
    say("growing the classifier")
    forest, unbiased = _grow_forest(
        embeddings, table.class_index, ~held_out, len(table.classes), forest_trees, seed, threads
    )
    train = ~held_out[table.query]
    true_class = table.class_index[table.query]
    quality = tabulate(
        table.classes,
        table.model_names,
        true_class[train],
        table.model[train],
        table.score_ratio[train],
    )
    length = tabulate_lengths(
        table.classes,
        table.model_names,
        true_class[train],
        table.model[train],
        table.completion_tokens[train],
    )
    sharpness = _best_sharpness(unbiased[~held_out], table.class_index[~held_out])
    classifier = QueryClassifier(
        table.classes, _default_class(quality), CONFIDENCE_THRESHOLD, forest, sharpness
    )
    served = classifier.probabilities(embeddings)
    # What the forest says of queries that it was grown on is too sure; those trees that did not
    # see a query say what the latency predictor will get to read in service.
    seen = np.where(held_out[:, None], served, sharpened(unbiased, sharpness))
    profiles = [
        profile_query(text, class_probabilities=probabilities)
        for text, probabilities in zip(table.prompts, seen, strict=True)
    ]
    say(f"growing {boosted_trees} latency trees on {int(train.sum())} measurements")
    latency, text, importance, latency_figures = _grow_latency(
        table, profiles, train, boosted_trees, seed, threads
    )
    fitted = FittedPredictors(classifier, quality, length, latency, text, table.limits)
    figures: dict[str, Any] = {
        "queries": len(table.prompts),
        "held_out_queries": int(held_out.sum()),
        "measurements": int(table.query.shape[0]),
        "held_out_measurements": int((~train).sum()),
        "classifier": _classifier_figures(classifier, embeddings, table.class_index, held_out),
        "quality": _quality_figures(table, quality, served, ~train),
        "output_length": _length_figures(table, fitted, served, ~train),
        "latency": {**latency_figures, "feature_importance": importance},
    }
    return fitted, figures


def _grow_forest(
    embeddings: NDArray[np.float32],
    labels: IntArray,
    train: NDArray[np.bool_],
    n_classes: int,
    trees: int,
    seed: int,
    threads: int,
) -> tuple[TreeEnsemble, FloatArray]:
    """A forest, and float64[Q, C]: what trees say of the queries they were not grown on."""
    from sklearn.ensemble import RandomForestClassifier

    forest = RandomForestClassifier(
        n_estimators=trees,
        max_depth=FOREST_DEPTH,
        random_state=seed,
        n_jobs=threads,
        bootstrap=True,
    )
    forest.fit(embeddings[train], labels[train])
    present = forest.classes_.astype(np.int64)
    parts: dict[str, list[NDArray[Any]]] = {
        name: [] for name in ("feature", "threshold", "left", "right", "values")
    }
    roots, start = [], 0
    inside = np.flatnonzero(train)
    votes = np.zeros((embeddings.shape[0], n_classes))
    voters = np.zeros(embeddings.shape[0])
    drawn_by_tree = forest.estimators_samples_
    for tree, drawn in zip(forest.estimators_, drawn_by_tree, strict=True):
        nodes = tree.tree_
        leaf = nodes.children_left < 0
        shares = nodes.value[:, 0, :] / nodes.value[:, 0, :].sum(axis=1, keepdims=True)
        values = np.zeros((nodes.node_count, n_classes))
        values[:, present] = shares
        parts["feature"].append(np.where(leaf, LEAF, nodes.feature))
        parts["threshold"].append(nodes.threshold)
        parts["left"].append(np.where(leaf, 0, nodes.children_left + start))
        parts["right"].append(np.where(leaf, 0, nodes.children_right + start))
        parts["values"].append(values)
        roots.append(start)
        start += nodes.node_count
        unseen = np.ones(inside.shape[0], dtype=np.bool_)
        unseen[drawn] = False
        rows = inside[unseen]
        votes[rows] += values[nodes.apply(embeddings[rows])]
        voters[rows] += 1.0
    uniform = np.full(n_classes, 1.0 / n_classes)
    unbiased = np.where(voters[:, None] > 0, votes / np.maximum(voters, 1.0)[:, None], uniform)
    ensemble = TreeEnsemble(
        roots=np.array(roots, dtype=np.int32),
        feature=np.concatenate(parts["feature"]).astype(np.int32),
        threshold=np.concatenate(parts["threshold"]).astype(np.float64),
        left=np.concatenate(parts["left"]).astype(np.int32),
        right=np.concatenate(parts["right"]).astype(np.int32),
        missing=np.zeros(start, dtype=np.int32),
        values=np.concatenate(parts["values"]),
        n_features=embeddings.shape[1],
    )
    return ensemble, unbiased


def _best_sharpness(shares: FloatArray, labels: IntArray) -> float:
    """The exponent that makes the true classes likeliest, of queries that no tree saw."""
    rows = np.arange(labels.shape[0])
    likelihood = [
        float(np.log(sharpened(shares, power)[rows, labels]).mean()) for power in _SHARPNESSES
    ]
    return _SHARPNESSES[int(np.argmax(likelihood))]


def _default_class(quality: QualityTable) -> str:
    """The class that the model best over all classes does best: the paper's GPT-OSS 20B."""
    expected = quality.expected
    strongest = int(np.argmax(expected.mean(axis=0)))
    return quality.classes[int(np.argmax(expected[:, strongest]))]


def _grow_latency(
    table: TrainingTable,
    profiles: Sequence[QueryProfile],
    train: NDArray[np.bool_],
    trees: int,
    seed: int,
    threads: int,
) -> tuple[LatencyPredictor, str, dict[str, Any], dict[str, Any]]:
    import lightgbm

    layout = FeatureLayout(
        table.classes,
        tuple(sorted({model.family for model in table.models})),
        tuple(sorted({device.kind for device in table.devices})),
    )
    pairs = table.model * len(table.devices) + table.device
    used, position = np.unique(pairs, return_inverse=True)
    placements = layout.of_placements(
        (table.models[pair // len(table.devices)], table.devices[pair % len(table.devices)])
        for pair in used
    )
    rows = np.hstack([layout.of_queries(profiles)[table.query], placements[position]])
    target = np.log(table.seconds)
    # Names by number: LightGBM refuses brackets and commas, which boards and models may have.
    plain = [f"f{at}" for at in range(len(layout.names))]
    booster = lightgbm.train(
        {
            "objective": "regression",
            "num_leaves": BOOSTED_LEAVES,
            "learning_rate": BOOSTED_RATE,
            "min_data_in_leaf": _LEAST_IN_LEAF,
            "feature_fraction": _FEATURES_A_TREE,
            "bagging_fraction": _ROWS_A_TREE,
            "bagging_freq": 1,
            "seed": seed,
            "deterministic": True,
            "force_row_wise": True,
            "num_threads": threads,
            "verbosity": -1,
        },
        lightgbm.Dataset(rows[train], target[train], feature_name=plain),
        num_boost_round=trees,
    )
    text = str(booster.model_to_string())
    predictor = latency_from_lightgbm(text, layout, 0.0)
    foreseen = predictor.trees.sums(rows[~train])[:, 0]
    residual = target[~train] - foreseen
    sigma = float(np.sqrt(np.mean(residual**2)))
    spread = float(np.sum((target[~train] - target[~train].mean()) ** 2))
    r2 = 1.0 - float(np.sum(residual**2)) / spread if spread > 0 else 0.0
    gains = np.asarray(booster.feature_importance("gain"), dtype=np.float64)
    shares = gains / max(gains.sum(), 1e-300)
    groups = dict.fromkeys(FEATURE_GROUPS, 0.0)
    for name, share in zip(layout.names, shares, strict=True):
        groups[feature_group(name)] += float(share)
    importance = {
        "groups": groups,
        "features": {
            layout.names[at]: float(shares[at]) for at in np.argsort(-shares) if shares[at] > 0
        },
    }
    figures = {
        "r2_log": r2,
        "residual_sigma_log": sigma,
        "median_ratio_error": float(np.median(np.expm1(np.abs(residual)))),
        "lightgbm_difference": float(np.abs(booster.predict(rows[~train]) - foreseen).max()),
    }
    return LatencyPredictor(layout, predictor.trees, sigma), text, importance, figures


def _classifier_figures(
    classifier: QueryClassifier,
    embeddings: NDArray[np.float32],
    labels: IntArray,
    held_out: NDArray[np.bool_],
) -> dict[str, Any]:
    raw = classifier.raw_probabilities(embeddings[held_out])
    said, truth = raw.argmax(axis=1), labels[held_out]
    confusion = np.zeros((len(classifier.classes),) * 2, dtype=np.int64)
    np.add.at(confusion, (truth, said), 1)
    return {
        "accuracy": float(np.mean(said == truth)),
        "unclear_ratio": float(np.mean(raw.max(axis=1) < classifier.confidence_threshold)),
        "sharpness": classifier.sharpness,
        "classes": list(classifier.classes),
        "confusion": confusion.tolist(),
        "default_class": classifier.default_class,
    }


def _log_loss(probability: FloatArray, correct: NDArray[np.bool_]) -> float:
    return float(-np.mean(np.log(np.where(correct, probability, 1.0 - probability))))


def _quality_figures(
    table: TrainingTable, quality: QualityTable, served: FloatArray, rows: NDArray[np.bool_]
) -> dict[str, Any]:
    graded = rows & ~np.isnan(table.score_ratio)
    if not graded.any():
        return {"log_loss": None, "log_loss_without_classes": None, "graded_answers": 0}
    correct = table.score_ratio[graded] >= CORRECT_FROM
    foreseen = quality.predict(served)[table.query[graded], table.model[graded]]
    overall = (quality.correct.sum(axis=0) + 1.0) / (quality.answered.sum(axis=0) + 2.0)
    return {
        "log_loss": _log_loss(foreseen, correct),
        "log_loss_without_classes": _log_loss(overall[table.model[graded]], correct),
        "graded_answers": int(graded.sum()),
    }


def _length_figures(
    table: TrainingTable, fitted: FittedPredictors, served: FloatArray, rows: NDArray[np.bool_]
) -> dict[str, Any]:
    known = rows & ~np.isnan(table.completion_tokens)
    if not known.any():
        return {"mean_absolute_error_tokens": None, "mean_tokens": None}
    foreseen = fitted.output_length.predict(served)[table.query[known], table.model[known]]
    measured = table.completion_tokens[known]
    return {
        "mean_absolute_error_tokens": float(np.abs(foreseen - measured).mean()),
        "mean_tokens": float(measured.mean()),
    }
