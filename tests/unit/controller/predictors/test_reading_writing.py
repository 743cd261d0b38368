"""Seconds from tokens and speeds: recovered from measurements, and told of new pairs."""

from dataclasses import dataclass

import numpy as np
import pytest

from controller.domain.hardware import DeviceClass, ModelConfiguration
from controller.predictors.reading_writing import (
    Placement,
    ReadingWriting,
    fit_reading_writing,
)

GIB = 1 << 30
MODELS = tuple(ModelConfiguration("m", billions, 4) for billions in (0.2, 1.0, 3.0, 8.0))
DEVICES = (DeviceClass("slow", 4, GIB), DeviceClass("fast", 8, GIB))
TOKENS = (40.0, 10.0)
"""Of the answers to prompts of the two classes."""


@dataclass
class Measured:
    """Each query at each measured pair: reading takes a tenth of writing, a token."""

    placements: list[Placement]
    query: np.ndarray
    prompt: np.ndarray
    tokens: np.ndarray
    prefill: np.ndarray
    decode: np.ndarray
    shares: np.ndarray

    def fit(self, most: int = 0) -> tuple[ReadingWriting, np.ndarray]:
        return fit_reading_writing(
            self.placements, self.query, self.shares, self.prompt, self.tokens, self.prefill,
            self.decode, most,
        )  # fmt: skip


def writing(model: ModelConfiguration, device: DeviceClass) -> float:
    """Seconds a token: as the bytes, and eight times as long on the slow device."""
    return model.weight_bytes / 1e9 * 0.02 * (8.0 if device.kind == "slow" else 1.0)


def measured(left_out: tuple[Placement, ...] = (), queries: int = 40) -> Measured:
    rng = np.random.default_rng(0)
    pairs = [(m, d) for m in MODELS for d in DEVICES if (m, d) not in left_out]
    placements = [pair for _ in range(queries) for pair in pairs]
    query = np.repeat(np.arange(queries), len(pairs))
    label = np.arange(queries) % 2
    prompt = rng.integers(20, 200, queries).astype(float)[query]
    tokens = np.array(TOKENS)[label][query] * np.exp(rng.normal(0.0, 0.1, query.size))
    each = np.array([writing(*pair) for pair in placements])
    return Measured(
        placements, query, prompt, tokens, prompt * each / 10, tokens * each, np.eye(2)[label]
    )


def foretold(found: ReadingWriting, prompt: float, label: int, *pairs: Placement) -> np.ndarray:
    longer = found.of_queries(np.eye(2)[[label]])
    return np.exp(
        found.log_seconds(np.array([prompt]), longer, found.of_placements(pairs))
    )[0]  # fmt: skip


@pytest.mark.parametrize("label", [0, 1])
def test_seconds_are_those_of_reading_and_writing(label: int) -> None:
    found, _ = measured().fit()
    pairs = [(m, d) for m in MODELS for d in DEVICES]
    truth = [writing(*pair) * (100.0 / 10 + TOKENS[label]) for pair in pairs]
    np.testing.assert_allclose(foretold(found, 100.0, label, *pairs), truth, rtol=0.15)


def test_a_pair_that_was_not_measured_has_the_speed_of_its_parts() -> None:
    new = (MODELS[1], DEVICES[0])
    found, _ = measured(left_out=(new,)).fit()
    truth = writing(*new) * (100.0 / 10 + TOKENS[0])
    np.testing.assert_allclose(foretold(found, 100.0, 0, new), [truth], rtol=0.2)


def test_a_new_model_is_as_slow_as_its_size() -> None:
    found, _ = measured().fit()
    new = [(ModelConfiguration("new", billions, 4), DEVICES[1]) for billions in (0.5, 2.0, 6.0)]
    seconds = foretold(found, 100.0, 0, *new)
    assert (np.diff(seconds) > 0).all()


def test_answers_end_where_they_were_cut_and_where_the_request_ends_them() -> None:
    found, _ = measured().fit(most=20)
    pair = (MODELS[1], DEVICES[1])
    placed = found.of_placements([pair])
    longer = found.of_queries(np.eye(2))
    prompts = np.full(2, 100.0)
    read, write = writing(*pair) * 10, writing(*pair)
    seconds = np.exp(found.log_seconds(prompts, longer, placed))[:, 0]
    np.testing.assert_allclose(seconds, [read + 20 * write, read + 10 * write], rtol=0.15)
    limited = np.exp(found.log_seconds(prompts, longer, placed, np.full(2, 5.0)))[:, 0]
    np.testing.assert_allclose(limited, [read + 5 * write] * 2, rtol=0.15)


def test_what_a_query_is_grown_on_knows_nothing_of_its_own_answers() -> None:
    data = measured()
    before, unseen = data.fit()
    data.tokens[data.query == 0] *= 3.0
    after, again = data.fit()
    # The models' means move for all alike; what is told of query 0 moves with them, not with it.
    moved = (again - unseen)[data.shares[:, 0] == 1.0]
    assert moved[0] < 0 < moved[1:].max()
    assert after.class_tokens[0] > before.class_tokens[0]


def test_measurements_without_seconds_are_refused() -> None:
    data = measured()
    data.prefill[:] = 0.0
    with pytest.raises(ValueError, match="no measurement has seconds"):
        data.fit()
