"""Grow DRLM's predictors from measurements, and say how good they are on unseen queries.

Random Forest of 200 trees of depth 20 by scikit-learn; 600 trees of 63 leaves at rate 0.05 by
LightGBM; queries are split 80/20 (sections IV-5 to IV-8 of the paper).
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from controller.lab.training.held_out import (
    classifier_figures,
    determination,
    length_figures,
    quality_figures,
)
from controller.lab.training.measurement_table import FitError, TrainingTable
from controller.predictors.features import (
    QueryProfile,
    class_probabilities,
    profile_query,
    structures,
)
from controller.predictors.fitted import (
    FittedPredictors,
    latency_from_lightgbm,
)
from controller.predictors.latency_regressor import (
    FEATURE_GROUPS,
    FeatureLayout,
    LatencyPredictor,
    feature_group,
)
from controller.predictors.output_length import tabulate_lengths
from controller.predictors.quality_table import QualityTable, tabulate
from controller.predictors.query_classifier import QueryClassifier, sharpened
from controller.predictors.reading_writing import ReadingWriting, fit_reading_writing
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
        "classifier": classifier_figures(classifier, embeddings, table.class_index, held_out),
        "quality": quality_figures(table, quality, served, ~train),
        "output_length": length_figures(table, fitted, served, ~train),
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

    rates, unseen = _rates(table, profiles, train)
    layout = FeatureLayout(
        table.classes,
        tuple(sorted({model.family for model in table.models})),
        tuple(sorted({device.kind for device in table.devices})),
        rates,
    )
    asked = layout.of_queries(profiles)
    if unseen is not None:
        seen = np.unique(table.query[train])
        asked[seen, -1] = unseen[seen]
    pairs = table.model * len(table.devices) + table.device
    used, position = np.unique(pairs, return_inverse=True)
    placements = layout.of_placements(
        (table.models[pair // len(table.devices)], table.devices[pair % len(table.devices)])
        for pair in used
    )
    rows = np.hstack([asked[table.query], placements[position]])
    foretold = layout.foretold(asked, placements)[table.query, position]
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
        lightgbm.Dataset(rows[train], (target - foretold)[train], feature_name=plain),
        num_boost_round=trees,
    )
    text = str(booster.model_to_string())
    predictor = latency_from_lightgbm(text, layout, 0.0)
    corrected = predictor.trees.sums(rows[~train])[:, 0]
    foreseen = foretold[~train] + corrected
    residual = target[~train] - foreseen
    sigma = float(np.sqrt(np.mean(residual**2)))
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
        "r2_log": determination(target[~train], foreseen),
        "r2_log_by_model": {
            name: determination(target[~train][mine], foreseen[mine])
            for name, mine in (
                (name, table.model[~train] == at) for at, name in enumerate(table.model_names)
            )
            if mine.sum() > 1
        },
        "residual_sigma_log": sigma,
        "median_ratio_error": float(np.median(np.expm1(np.abs(residual)))),
        "lightgbm_difference": float(np.abs(booster.predict(rows[~train]) - corrected).max()),
    }
    return LatencyPredictor(layout, predictor.trees, sigma), text, importance, figures


def _rates(
    table: TrainingTable, profiles: Sequence[QueryProfile], train: NDArray[np.bool_]
) -> tuple[ReadingWriting | None, FloatArray | None]:
    """What tokens and speeds foretell, and float64[Q] as in `fit_reading_writing`."""
    if table.prefill_seconds is None:
        return None, None
    known = train & (table.completion_tokens > 0)
    tokens = structures(profiles)[:, 0]
    shares = class_probabilities(profiles, len(table.classes))
    return fit_reading_writing(
        [
            (table.models[model], table.devices[device])
            for model, device in zip(table.model[known], table.device[known], strict=True)
        ],
        table.query[known],
        shares,
        tokens[table.query[known]],
        table.completion_tokens[known],
        table.prefill_seconds[known],
        (table.seconds - table.prefill_seconds)[known],
        table.limits.max_tokens,
    )


def fit_splits(
    table: TrainingTable,
    embed: Embed,
    *,
    seed: int = 0,
    splits: int = 1,
    boosted_trees: int = BOOSTED_TREES,
    forest_trees: int = FOREST_TREES,
    threads: int = 2,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[FittedPredictors, dict[str, Any]]:
    """`fit` with a seed, and how much its figures depend on which queries are held out.

    Args:
        table: measurements.
        embed: texts to float32[n, 384].
        seed: of the predictors that are given back.
        splits: how many seeds, from `seed` on.
        boosted_trees, forest_trees, threads: as in `fit`.
        say: told what is being done.

    Returns:
        The predictors of `seed`, and their figures; with several splits also "splits": R2 of each
        seed, their mean, lowest and highest, and the mean of each model's.

    Raises:
        FitError: as `fit`.
    """

    def of_seed(number: int) -> tuple[FittedPredictors, dict[str, Any]]:
        say(f"split of seed {number}")
        return fit(
            table,
            embed,
            seed=number,
            boosted_trees=boosted_trees,
            forest_trees=forest_trees,
            threads=threads,
            say=say if number == seed else lambda _: None,
        )

    fitted, figures = of_seed(seed)
    others = [of_seed(number)[1] for number in range(seed + 1, seed + splits)]
    latency = [each["latency"] for each in (figures, *others)]
    if splits == 1:
        return fitted, figures
    found = np.array([each["r2_log"] for each in latency])
    by_model = {
        name: float(
            np.mean([e["r2_log_by_model"][name] for e in latency if name in e["r2_log_by_model"]])
        )
        for name in sorted({name for each in latency for name in each["r2_log_by_model"]})
    }
    return fitted, {
        **figures,
        "splits": {
            "r2_log": found.tolist(),
            "r2_log_mean": float(found.mean()),
            "r2_log_lowest": float(found.min()),
            "r2_log_highest": float(found.max()),
            "r2_log_mean_by_model": by_model,
        },
    }
