"""Seconds of an answer from a few numbers: tokens read and written, and how fast.

Ours: DRLM has trees alone, grown on 223,835 rows. From some hundreds trees cannot learn that twice
the tokens take twice as long, nor that a device is slower with every model. What this says is where
they start from, so that they are left with what it does not know.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from controller.domain.hardware import DeviceClass, ModelConfiguration

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Placement = tuple[ModelConfiguration, DeviceClass]

PLACEMENT_NAMES: Final = ("reading_log", "writing_log", "model_tokens_log")
"""Columns of `ReadingWriting.of_placements`: log seconds a token, twice, and log tokens."""

_RIDGE: Final = 1.0
"""How many measurements the guess that a model or device is like all others weighs as much as."""

_PRIOR_ANSWERS: Final = 2.0
"""The same for a class of prompts."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadingWriting:
    """Sums of effects on the logarithm, so that a pair that was never measured has its estimate.

    Attributes:
        models: names of the M configurations that were measured.
        kinds: of the K devices that were measured.
        reading: float64[2 + M + K]; log seconds to read a prompt token: level, slope by the log of
            the model's bytes, then by model and by kind of device, 0 for a new one.
        writing: the same of an answer's token.
        class_tokens: float64[C]; log of how much longer the answers of a class are than others.
        model_tokens: float64[M]; log of how long a model's answers are.
        most_tokens: answers were cut there when they were measured; 0: nowhere.
    """

    models: tuple[str, ...]
    kinds: tuple[str, ...]
    reading: FloatArray
    writing: FloatArray
    class_tokens: FloatArray
    model_tokens: FloatArray
    most_tokens: int

    def __post_init__(self) -> None:
        size = (2 + len(self.models) + len(self.kinds),)
        if self.reading.shape != size or self.writing.shape != size:
            raise ValueError("reading and writing do not have one number a model and device")
        if self.model_tokens.shape != (len(self.models),):
            raise ValueError("answer lengths do not have one number a model")

    def of_placements(self, placements: Iterable[Placement]) -> FloatArray:
        """float64[K', 3], as `PLACEMENT_NAMES` names them."""
        pairs = list(placements)
        rows = _design(pairs, self.models, self.kinds)
        position = {name: at for at, name in enumerate(self.models)}
        typical = float(self.model_tokens.mean()) if self.models else 0.0
        tokens = [
            self.model_tokens[position[m.name]] if m.name in position else typical for m, _ in pairs
        ]
        return np.stack([rows @ self.reading, rows @ self.writing, np.array(tokens)], axis=1)

    def of_queries(self, class_probabilities: FloatArray) -> FloatArray:
        """float64[Q]; log of how much longer an answer is than the model's usual one.

        Args:
            class_probabilities: float64[Q, C].
        """
        found: FloatArray = class_probabilities @ self.class_tokens
        return found

    def log_seconds(
        self,
        prompt_tokens: FloatArray,
        longer_log: FloatArray,
        placements: FloatArray,
        max_tokens: FloatArray | None = None,
    ) -> FloatArray:
        """float64[Q, K'], log seconds of inference.

        Args:
            prompt_tokens: float64[Q], at least 1.
            longer_log: float64[Q], of `of_queries`.
            placements: float64[K', 3], of `of_placements`.
            max_tokens: float64[Q]; each request's limit; None: there is none.
        """
        tokens = longer_log[:, None] + placements[None, :, 2]
        if self.most_tokens > 0:
            tokens = np.minimum(tokens, np.log(self.most_tokens))
        if max_tokens is not None:
            tokens = np.minimum(tokens, np.log(max_tokens)[:, None])
        read = np.log(prompt_tokens)[:, None] + placements[None, :, 0]
        return np.asarray(np.logaddexp(read, placements[None, :, 1] + tokens))


def fit_reading_writing(
    placements: Sequence[Placement],
    query: IntArray,
    shares: FloatArray,
    prompt_tokens: FloatArray,
    completion_tokens: FloatArray,
    prefill_seconds: FloatArray,
    decode_seconds: FloatArray,
    most_tokens: int,
) -> tuple[ReadingWriting, FloatArray]:
    """Fit to n measurements by least squares, drawn towards no effect.

    Args:
        placements: n models on devices.
        query: int64[n].
        shares: float64[Q, C]; class probabilities of the queries.
        prompt_tokens: float64[n], above 0.
        completion_tokens: float64[n], above 0.
        prefill_seconds: float64[n]; where it is 0 it tells nothing of reading.
        decode_seconds: float64[n]; likewise.
        most_tokens: where answers were cut; 0: nowhere.

    Returns:
        The fit, and float64[Q]: `of_queries` as it would be had the query's own answers not been
        seen. What is grown on the fit must not see through it what it is to predict.
    """
    models = tuple(sorted({model.name for model, _ in placements}))
    kinds = tuple(sorted({device.kind for _, device in placements}))
    rows = _design(placements, models, kinds)

    def effects(seconds: FloatArray, tokens: FloatArray) -> FloatArray:
        told = seconds > 0
        if not told.any():
            raise ValueError("no measurement has seconds of reading and of writing")
        known = rows[told]
        penalty = np.full(rows.shape[1], _RIDGE)
        penalty[0] = 0.0
        target = np.log(seconds[told] / tokens[told])
        return np.asarray(np.linalg.solve(known.T @ known + np.diag(penalty), known.T @ target))

    lengths = np.log(completion_tokens)
    mine = rows[:, 2 : 2 + len(models)]
    model_tokens = (mine.T @ lengths) / mine.sum(axis=0)
    longer = (lengths - mine @ model_tokens)[:, None] * shares[query]  # [n, C]
    by_query, weight = np.zeros(shares.shape), np.zeros(shares.shape)
    np.add.at(by_query, query, longer)
    np.add.at(weight, query, shares[query])
    total, count = by_query.sum(axis=0), weight.sum(axis=0) + _PRIOR_ANSWERS
    others = (total - by_query) / (count - weight)  # [Q, C]
    return (
        ReadingWriting(
            models,
            kinds,
            effects(prefill_seconds, prompt_tokens),
            effects(decode_seconds, completion_tokens),
            total / count,
            model_tokens,
            most_tokens,
        ),
        np.asarray((shares * others).sum(axis=1)),
    )


def _design(
    placements: Sequence[Placement], models: tuple[str, ...], kinds: tuple[str, ...]
) -> FloatArray:
    """float64[n, 2 + M + K]: what of `ReadingWriting.reading` counts for each placement."""
    model_at = {name: at for at, name in enumerate(models)}
    kind_at = {name: at for at, name in enumerate(kinds)}
    rows = np.zeros((len(placements), 2 + len(models) + len(kinds)))
    for row, (model, device) in zip(rows, placements, strict=True):
        row[0], row[1] = 1.0, np.log(model.weight_bytes / 1e9)
        if model.name in model_at:
            row[2 + model_at[model.name]] = 1.0
        if device.kind in kind_at:
            row[2 + len(models) + kind_at[device.kind]] = 1.0
    return rows
