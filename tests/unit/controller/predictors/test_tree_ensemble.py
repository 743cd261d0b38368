import lightgbm
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.lab.bench.drlm import random_trees
from controller.predictors.tree_ensemble import (
    LEAF,
    TreeEnsemble,
    ensemble_from_arrays,
    ensemble_from_lightgbm,
)


def boosted(rows, target, **options):
    return lightgbm.train(
        {"num_leaves": 15, "verbosity": -1, "num_threads": 1, "min_data_in_leaf": 3, **options},
        lightgbm.Dataset(rows, target),
        num_boost_round=20,
    )


@pytest.mark.parametrize(
    "options", [{}, {"use_missing": False}, {"zero_as_missing": True}, {"num_leaves": 2}]
)
def test_lightgbm_text_predicts_what_lightgbm_predicts(options):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(600, 5))
    rows[rng.random(rows.shape) < 0.2] = np.nan
    rows[rng.random(rows.shape) < 0.2] = 0.0
    booster = boosted(rows, np.nansum(rows, axis=1) + rng.normal(size=600), **options)
    ensemble, names = ensemble_from_lightgbm(booster.model_to_string())
    assert names == tuple(booster.feature_name())
    asked = np.vstack([rows, [[np.nan] * 5], [[0.0] * 5], [[1e300] * 5]])
    found = ensemble.sums(asked)[:, 0]
    np.testing.assert_allclose(found, booster.predict(asked), rtol=1e-12, atol=1e-12)
    assert np.ptp(found) > 0.1


def test_a_constant_target_makes_trees_of_one_leaf():
    booster = boosted(np.random.default_rng(0).normal(size=(50, 2)), np.full(50, 3.0))
    ensemble, _ = ensemble_from_lightgbm(booster.model_to_string())
    np.testing.assert_allclose(ensemble.sums(np.zeros((2, 2)))[:, 0], 3.0)


def test_categorical_splits_and_strange_texts_are_refused():
    rng = np.random.default_rng(0)
    rows = np.stack([rng.integers(0, 6, 300), rng.normal(size=300)], axis=1).astype(float)
    booster = lightgbm.train(
        {"verbosity": -1, "num_threads": 1, "min_data_per_group": 5, "max_cat_to_onehot": 1},
        lightgbm.Dataset(rows, rows[:, 0] % 3, categorical_feature=[0]),
        num_boost_round=3,
    )
    with pytest.raises(ValueError, match="categorical"):
        ensemble_from_lightgbm(booster.model_to_string())
    with pytest.raises(ValueError, match="no text model"):
        ensemble_from_lightgbm("hello")
    text = boosted(rows, rows[:, 1]).model_to_string()
    with pytest.raises(ValueError, match="cannot be read"):
        ensemble_from_lightgbm(text.replace("threshold=", "threshold=x ", 1))


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 20),
    st.sampled_from([1, 2, 63, 64, 65, 130]),
    st.integers(0, 4),
)
def test_prepared_ends_give_the_sums_of_the_joined_rows_to_the_last_bit(seed, leaves, count, first):
    rng = np.random.default_rng(seed)
    ensemble = random_trees(rng, 5, leaves, 4, 1)
    starts, ends = rng.normal(size=(3, first)), rng.normal(size=(count, 4 - first))
    starts[rng.random(starts.shape) < 0.2] = np.nan
    ends[rng.random(ends.shape) < 0.2] = np.nan
    joined = np.hstack([np.repeat(starts, count, axis=0), np.tile(ends, (3, 1))])
    found = ensemble.sums_of_prepared(starts, ensemble.prepare(ends))
    assert found.tolist() == ensemble.sums(joined).reshape(3, count).tolist()


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 20), st.integers(1, 3))
def test_packed_trees_come_to_the_same_leaves(seed, leaves, outputs):
    """Against the walk that the arrays' description tells, whatever the order of the nodes."""
    rng = np.random.default_rng(seed)
    trees = random_trees(rng, 4, leaves, 3, outputs)
    for row in rng.normal(size=(5, 3)):
        expected = np.zeros(outputs)
        for node in trees.roots:
            while trees.feature[node] != LEAF:
                is_left = row[trees.feature[node]] <= trees.threshold[node]
                node = (trees.left if is_left else trees.right)[node]
            expected += trees.values[node]
        assert trees.sums(row[None, :])[0].tolist() == expected.tolist()


def test_arrays_come_back():
    ensemble = random_trees(np.random.default_rng(0), 3, 5, 4, 2)
    rows = np.random.default_rng(1).normal(size=(10, 4))
    again = ensemble_from_arrays(ensemble.as_arrays())
    assert again.sums(rows).tolist() == ensemble.sums(rows).tolist()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("left", 0, "child does not come after"),
        ("right", 10_000, "child does not come after"),
        ("left", 2, "two parents"),  # as its right child
        ("feature", 4, "feature that does not exist"),
        ("missing", 8, "in an unknown way"),
        ("roots", -1, "starts outside"),
    ],
)
def test_arrays_that_would_walk_astray_are_refused(name, value, message):
    arrays = random_trees(np.random.default_rng(0), 3, 5, 4, 1).as_arrays()
    arrays[name] = arrays[name].copy()
    arrays[name][0] = value
    with pytest.raises(ValueError, match=message):
        ensemble_from_arrays(arrays)


def test_missing_arrays_and_wrong_widths_are_told():
    ensemble = random_trees(np.random.default_rng(0), 3, 5, 4, 1)
    arrays = ensemble.as_arrays()
    del arrays["left"]
    with pytest.raises(ValueError, match="lack the array 'left'"):
        ensemble_from_arrays(arrays)
    with pytest.raises(ValueError, match="fitted on 4"):
        ensemble.sums(np.zeros((1, 3)))
    prepared = ensemble.prepare(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="starts of 2 columns, not 1"):
        ensemble.sums_of_prepared(np.zeros((1, 2)), prepared)
    other = random_trees(np.random.default_rng(0), 4, 5, 4, 1)
    with pytest.raises(ValueError, match="other trees"):
        other.sums_of_prepared(np.zeros((1, 1)), prepared)
    with pytest.raises(ValueError, match="one output"):
        random_trees(np.random.default_rng(0), 3, 5, 4, 2).sums_of_prepared(
            np.zeros((1, 1)), prepared
        )
    with pytest.raises(ValueError, match="at least one node"):
        TreeEnsemble(*(np.zeros(0, dtype=np.int32),) * 6, np.zeros((0, 1)), 1)
