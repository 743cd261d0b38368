import numpy as np
import pytest

from controller.predictors.output_length import OutputLength, tabulate_lengths
from controller.predictors.quality_table import QualityTable, tabulate

CLASSES, MODELS = ("x", "y"), ("small", "large")


def table():
    return tabulate(
        CLASSES,
        MODELS,
        np.array([0, 0, 0, 1, 0]),
        np.array([0, 0, 0, 1, 1]),
        np.array([0.5, 0.49, 1.0, 1.0, np.nan]),
    )


def test_answers_are_right_from_one_half_and_smoothed():
    found = table()
    assert found.correct.tolist() == [[2, 0], [0, 1]]
    assert found.answered.tolist() == [[3, 0], [0, 1]]
    np.testing.assert_allclose(found.expected[0, 0], 3 / 5)
    np.testing.assert_allclose(found.expected[1, 1], 2 / 3)


def test_a_class_never_asked_of_a_model_takes_its_own_mean():
    np.testing.assert_allclose(table().expected[1, 0], 3 / 5)
    empty = QualityTable(CLASSES, MODELS, np.zeros((2, 2)), np.zeros((2, 2)))
    assert (empty.expected == 0.5).all()


def test_quality_is_marginalised_over_classes():
    shares = np.array([[0.25, 0.75], [1.0, 0.0]])
    found = table().predict(shares)
    np.testing.assert_allclose(found, shares @ table().expected)
    chosen = table().predict(shares, ["large", "stranger", "large"])
    np.testing.assert_allclose(chosen[:, 0], found[:, 1])
    np.testing.assert_allclose(chosen[:, 1], found.mean(axis=1))
    assert table().predict(shares, []).shape == (2, 0)


def test_more_right_answers_than_answers_are_refused():
    with pytest.raises(ValueError, match="more right answers"):
        QualityTable(CLASSES, MODELS, np.full((2, 2), 2.0), np.ones((2, 2)))
    with pytest.raises(ValueError, match="counts of"):
        QualityTable(CLASSES, MODELS, np.zeros((2, 1)), np.zeros((2, 1)))


def lengths(n=400):
    rng = np.random.default_rng(0)
    label, model = rng.integers(0, 2, n), rng.integers(0, 2, n)
    return label, model, np.array([[10.0, 40.0], [100.0, 400.0]])[label, model]


def test_lengths_of_many_answers_are_their_means():
    found = tabulate_lengths(CLASSES, MODELS, *lengths())
    np.testing.assert_allclose(found.expected, [[10, 40], [100, 400]], rtol=0.15)
    shares = np.array([[0.5, 0.5]])
    np.testing.assert_allclose(found.predict(shares)[0], found.expected.mean(axis=0))


def test_a_pair_never_seen_is_guessed_from_its_class_and_model():
    label, model, tokens = lengths()
    tokens[(label == 1) & (model == 1)] = np.nan
    found = tabulate_lengths(CLASSES, MODELS, label, model, tokens)
    np.testing.assert_allclose(found.expected[1, 1], 400, rtol=0.15)
    strange = found.predict(np.array([[1.0, 0.0]]), ["stranger"])
    np.testing.assert_allclose(strange, found.class_means[0])
    assert 10 < found.class_means[0] < 40


def test_no_lengths_at_all_are_refused():
    with pytest.raises(ValueError, match="answer's length"):
        tabulate_lengths(CLASSES, MODELS, np.zeros(1, int), np.zeros(1, int), np.array([np.nan]))
    with pytest.raises(ValueError, match="one number"):
        OutputLength(CLASSES, MODELS, np.ones((1, 2)), np.ones(2))
