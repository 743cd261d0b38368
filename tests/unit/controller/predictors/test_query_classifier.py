import numpy as np
import pytest

from controller.predictors.features import profile_query
from controller.predictors.query_classifier import QueryClassifier, sharpened
from controller.predictors.tree_ensemble import LEAF, TreeEnsemble


def stump(threshold, low, high):
    return TreeEnsemble(
        roots=np.array([0], dtype=np.int32),
        feature=np.array([0, LEAF, LEAF], dtype=np.int32),
        threshold=np.array([threshold, 0.0, 0.0]),
        left=np.array([1, 0, 0], dtype=np.int32),
        right=np.array([2, 0, 0], dtype=np.int32),
        missing=np.zeros(3, dtype=np.int32),
        values=np.array([[0.0, 0.0], low, high]),
        n_features=2,
    )


def classifier(threshold=0.6, sharpness=1.0):
    return QueryClassifier(
        ("a", "b"), "b", threshold, stump(0.0, [0.9, 0.1], [0.55, 0.45]), sharpness
    )


def test_an_unclear_prompt_is_of_the_default_class():
    embeddings = np.array([[-1, 0], [1, 0]], dtype=np.float32)
    assert classifier().raw_probabilities(embeddings).tolist() == [[0.9, 0.1], [0.55, 0.45]]
    assert classifier().probabilities(embeddings).tolist() == [[0.9, 0.1], [0.0, 1.0]]


def test_a_prompt_without_embedding_is_unclear():
    known = profile_query("x", embedding=np.array([-1, 0], dtype=np.float32))
    found = classifier().classify([profile_query("y"), known])
    assert [query.class_probabilities.tolist() for query in found] == [[0, 1], [0.9, 0.1]]
    assert classifier().classify([profile_query("y")])[0].class_probabilities.tolist() == [0, 1]


def test_sharpening_keeps_the_order_and_the_sum():
    shares = np.array([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]])
    found = sharpened(shares, 3.0)
    np.testing.assert_allclose(found.sum(axis=1), 1.0)
    assert found[0, 0] > 0.7
    assert (np.diff(found[0]) < 0).all()
    np.testing.assert_allclose(sharpened(shares, 1.0), shares, atol=1e-8)


def test_a_default_class_that_is_none_is_refused():
    with pytest.raises(ValueError, match="none of"):
        QueryClassifier(("a", "b"), "c", 0.5, stump(0.0, [1, 0], [0, 1]))
    with pytest.raises(ValueError, match="one probability a class"):
        QueryClassifier(("a", "b", "c"), "c", 0.5, stump(0.0, [1, 0], [0, 1]))
