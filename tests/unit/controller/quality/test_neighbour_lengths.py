import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.quality.neighbour_lengths import LengthPrior, answer_lengths
from controller.quality.neighbours import Shrinkage, Source
from tests.fakes.evidence import NAN, evidence

UNLIMITED = np.array([math.inf])


def prior(*typical: float, mean: float | None = None) -> LengthPrior:
    """One request's, the same for mean and median."""
    level = np.array([typical]) if mean is None else np.full((1, len(typical)), mean)
    return LengthPrior(level, level, np.array(typical))


def test_answers_are_as_long_as_those_to_similar_prompts() -> None:
    found = answer_lengths(
        evidence(
            [[1.0]],
            [[[NAN, NAN, NAN]]],
            [0.5, 0.5, 0.5],
            tokens=[[[300.0, NAN, NAN]]],
            mean_tokens=[100.0, 50.0, NAN],
            relative_length=[[2.0]],
        ),
        UNLIMITED,
        prior(100.0, 50.0, 64.0),
        Shrinkage(length_weight=1.0),
    )
    # Its own answer, then everybody's ratio at its own mean, then at the prior.
    assert found.mean[0] == pytest.approx([200.0, 75.0, 96.0])
    assert found.source[0].tolist() == [Source.NEIGHBOURS, Source.NEIGHBOURS, Source.PRIOR]


def test_without_neighbours_the_prior_holds_whole() -> None:
    found = answer_lengths(
        evidence([[0.0]], [[[NAN, NAN]]], [0.5, 0.5], mean_tokens=[80.0, NAN]),
        np.array([32.0]),
        LengthPrior(np.array([[30.0, 28.0]]), np.array([[32.0, 27.0]]), np.array([90.0, 64.0])),
    )
    assert found.mean[0] == pytest.approx([30.0, 28.0])
    assert found.median[0].tolist() == [32.0, 27.0]
    assert found.source[0].tolist() == [Source.DESTINATION_MEAN, Source.PRIOR]


def test_a_limit_cuts_every_answer_and_not_their_mean() -> None:
    found = answer_lengths(
        evidence([[1.0, 1.0]], [[[NAN], [NAN]]], [0.5], tokens=[[[10.0], [400.0]]]),
        np.array([100.0]),
        prior(200.0, mean=90.0),
        Shrinkage(length_weight=1e-9),
    )
    assert found.mean[0, 0] == pytest.approx((10.0 + 100.0) / 2.0)


def test_an_answer_that_was_cut_is_at_least_so_long() -> None:
    def with_limit(limit: float) -> float:
        found = answer_lengths(
            evidence([[1.0]], [[[NAN]]], [0.5], cut_tokens=[[[64.0]]], relative_length=[[0.1]]),
            np.array([limit]),
            prior(200.0, mean=1.0),
            Shrinkage(length_weight=1e-9),
        )
        return float(found.mean[0, 0])

    assert with_limit(32.0) == pytest.approx(32.0)
    assert with_limit(64.0) == pytest.approx(64.0)
    # Beyond it, answers end as exponential ones of this mean do.
    assert with_limit(164.0) == pytest.approx(64.0 + 200.0 * (1.0 - math.exp(-0.5)))
    assert with_limit(math.inf) == pytest.approx(264.0)


def test_the_median_answer_is_what_half_of_the_weight_exceeds() -> None:
    found = answer_lengths(
        evidence(
            [[1.0, 1.0, 1.0]], [[[NAN], [NAN], [NAN]]], [0.5], tokens=[[[500.0], [10.0], [12.0]]]
        ),
        UNLIMITED,
        prior(90.0),
        Shrinkage(length_weight=0.01),
    )
    assert found.median[0, 0] == 12.0
    assert found.mean[0, 0] > 150.0


def test_nearness_is_relative_to_the_nearest() -> None:
    def mean(*similarity: float) -> float:
        found = answer_lengths(
            evidence([list(similarity)], [[[NAN], [NAN]]], [0.5], tokens=[[[10.0], [400.0]]]),
            UNLIMITED,
            prior(90.0),
            Shrinkage(length_weight=1e-9),
        )
        return float(found.mean[0, 0])

    assert mean(0.9, 0.8) == pytest.approx(mean(0.3, 0.2))
    assert mean(0.9, 0.2) == pytest.approx(10.0, abs=0.01)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(0, 9), st.integers(1, 4))
def test_lengths_stay_within_the_limit_whatever_is_known(seed: int, r: int, k: int, d: int) -> None:
    rng = np.random.default_rng(seed)

    def some(shape: tuple[int, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        return np.where(rng.random(shape) < 0.5, NAN, rng.uniform(1.0, 900.0, shape))

    tokens = some((r, k, d))
    limits = rng.uniform(1.0, 600.0, r)
    within = np.minimum(rng.uniform(1.0, 600.0, (r, d)), limits[:, None])
    found = answer_lengths(
        evidence(
            np.sort(rng.uniform(-1.0, 1.0, (r, k)))[:, ::-1].tolist(),
            np.full((r, k, d), NAN),  # type: ignore[arg-type]
            [0.5] * d,
            tokens=tokens,  # type: ignore[arg-type]
            cut_tokens=np.where(np.isnan(tokens), some((r, k, d)), NAN),  # type: ignore[arg-type]
            relative_length=some((r, k)) / 100.0,  # type: ignore[arg-type]
            mean_tokens=some((d,)).tolist(),
        ),
        limits,
        LengthPrior(within, within, rng.uniform(1.0, 500.0, d)),
    )
    for lengths in (found.mean, found.median):
        assert lengths.shape == (r, d)
        assert (lengths >= 1.0).all()
        assert (lengths <= limits[:, None] * (1.0 + 1e-12)).all()
