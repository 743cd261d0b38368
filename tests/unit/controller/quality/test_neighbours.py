import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.quality.neighbours import (
    Evidence,
    Shrinkage,
    Source,
    paper_quality,
    shrunk_quality,
)
from tests.fakes.evidence import NAN, evidence


def test_eq_3_by_hand() -> None:
    found = paper_quality(evidence([[0.9, 0.6, 0.5]], [[[1.0], [0.0], [1.0]]], [0.3]))
    assert found.value[0, 0] == pytest.approx((0.9 + 0.5) / 2.0)
    assert found.count[0, 0] == 3
    assert found.source[0, 0] == Source.NEIGHBOURS


def test_neighbours_below_the_threshold_do_not_count() -> None:
    given_evidence = evidence([[0.9, 0.29]], [[[1.0], [0.0]]], [0.3])
    assert paper_quality(given_evidence, threshold=0.3).value[0, 0] == 1.0
    assert paper_quality(given_evidence, threshold=0.29).value[0, 0] < 1.0


def test_only_the_k_nearest_count() -> None:
    given_evidence = evidence([[0.9, 0.8]], [[[1.0], [0.0]]], [0.3])
    assert paper_quality(given_evidence, neighbours=1).value[0, 0] == 1.0


@pytest.mark.parametrize(
    "given_evidence",
    [
        evidence([[0.2, 0.1]], [[[1.0], [1.0]]], [0.3]),
        evidence([[0.9, 0.8]], [[[NAN], [NAN]]], [0.3]),
        evidence([[0.0, 0.0]], [[[NAN], [NAN]]], [0.3]),
    ],
    ids=["all too far", "none scored here", "no neighbour"],
)
def test_the_paper_s_form_falls_back_to_the_destination_s_mean(given_evidence: Evidence) -> None:
    found = paper_quality(given_evidence)
    assert found.value[0, 0] == 0.3
    assert found.count[0, 0] == 50
    assert Source(found.source[0, 0]).label == "destination-mean"


def test_the_paper_s_form_does_not_use_a_model_s_scores_elsewhere() -> None:
    given_evidence = evidence([[0.9]], [[[1.0]]], [0.3], own_scores=[[[NAN]]])
    assert paper_quality(given_evidence).value[0, 0] == 0.3
    assert shrunk_quality(given_evidence).value[0, 0] > 0.3


@pytest.mark.parametrize(("neighbours", "threshold"), [(0, 0.3), (10, 0.0), (10, NAN)])
def test_eq_3_needs_neighbours_and_a_threshold(neighbours: int, threshold: float) -> None:
    with pytest.raises(ValueError, match="Eq"):
        paper_quality(evidence([[0.9]], [[[1.0]]], [0.3]), neighbours, threshold)


def test_ours_by_hand() -> None:
    shrinkage = Shrinkage(
        neighbours=2, bandwidth=0.5, difficulty_weight=1.0, remainder_weight=2.0, margin=0.0
    )
    found = shrunk_quality(
        evidence([[1.0, 0.5]], [[[1.0, 0.0], [1.0, NAN]]], [0.5, 0.4], difficulty=[[0.1, 0.2]]),
        shrinkage,
    )
    near = np.exp(-1.0)
    shared = (0.1 + near * 0.2) / (1.0 + near + 1.0)
    first = (0.4 + near * 0.3) / (1.0 + near + 2.0)
    second = -0.5 / (1.0 + 2.0)
    assert found.value[0] == pytest.approx([0.5 + shared + first, 0.4 + shared + second])
    assert found.count[0].tolist() == [2, 1]


def test_no_neighbour_leaves_ours_at_the_mean() -> None:
    found = shrunk_quality(
        evidence([[0.0]], [[[NAN, NAN]]], [0.5, 0.7], mean_source=Source.MODEL_MEAN)
    )
    assert found.value[0].tolist() == [0.5, 0.7]
    assert found.source[0].tolist() == [Source.MODEL_MEAN] * 2


def test_ours_shrinks_to_a_given_centre() -> None:
    given_evidence = evidence([[0.0]], [[[NAN]]], [0.5])
    assert shrunk_quality(given_evidence, centre=np.array([[0.8]])).value[0, 0] == 0.8


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(0, 12), st.integers(1, 5))
def test_estimates_are_probabilities_whatever_is_known(seed: int, r: int, k: int, d: int) -> None:
    rng = np.random.default_rng(seed)
    scores = np.where(rng.random((r, k, d)) < 0.4, NAN, rng.random((r, k, d)))
    given_evidence = evidence(
        np.sort(rng.uniform(-1.0, 1.0, (r, k)))[:, ::-1].tolist(),
        scores.tolist() if k else np.zeros((r, 0, d)),  # type: ignore[arg-type]
        rng.random(d).tolist(),
        difficulty=rng.uniform(-1.0, 1.0, (r, k)).tolist(),
    )
    for found in (paper_quality(given_evidence), shrunk_quality(given_evidence)):
        assert found.value.shape == (r, d)
        assert ((found.value >= 0.0) & (found.value <= 1.0)).all()
        assert (found.count >= 1).all()
