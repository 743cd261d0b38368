"""Expected length of an answer, in tokens, by class of the prompt and model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

PRIOR_ANSWERS: Final = 4.0
"""How many answers the guess from class and model alone weighs as much as."""

_TURNS: Final = 20


@dataclass(frozen=True, slots=True)
class OutputLength:
    """Mean answer lengths.

    Attributes:
        classes: names of the C classes.
        models: names of the M models.
        expected: float64[C, M], tokens, above 0.
        class_means: float64[C], tokens, over all models: what an unknown model is expected to say.
    """

    classes: tuple[str, ...]
    models: tuple[str, ...]
    expected: FloatArray
    class_means: FloatArray

    def __post_init__(self) -> None:
        if self.expected.shape != (len(self.classes), len(self.models)) or (
            self.class_means.shape != (len(self.classes),)
        ):
            raise ValueError("answer lengths do not have one number a class and model")

    def predict(
        self, class_probabilities: FloatArray, models: Sequence[str] | None = None
    ) -> FloatArray:
        """float64[Q, K], tokens, marginalised over the class probabilities.

        Args:
            class_probabilities: float64[Q, C], rows sum to 1.
            models: the K models asked about; None takes the table's own.
        """
        expected = self.expected
        if models is not None:
            position = {name: at for at, name in enumerate(self.models)}
            columns = [
                expected[:, position[name]] if name in position else self.class_means
                for name in models
            ]
            expected = np.stack(columns, axis=1) if columns else np.zeros((len(self.classes), 0))
        found: FloatArray = class_probabilities @ expected
        return found


def tabulate_lengths(
    classes: Sequence[str],
    models: Sequence[str],
    class_index: IntArray,
    model_index: IntArray,
    completion_tokens: FloatArray,
) -> OutputLength:
    """Mean lengths, drawn towards what class and model tell alone where answers are few.

    The guess for (c, m) is length(c) x talkativeness(m): models are as talkative in one class as
    in another, relative to the others. The factors are fitted to all answers in turns, so that a
    pair that was never measured does not pull at them. A guess weighs `PRIOR_ANSWERS` answers.

    Args:
        classes: names of the C classes.
        models: names of the M models.
        class_index: int64[n]; class of each answer.
        model_index: int64[n]; model of each answer.
        completion_tokens: float64[n]; NaN is unknown and does not count.

    Raises:
        ValueError: no answer has a length.
    """
    known = ~np.isnan(completion_tokens)
    if not known.any():
        raise ValueError("no measurement has an answer's length")
    tokens = completion_tokens[known]
    sums = np.zeros((len(classes), len(models)))
    counts = np.zeros_like(sums)
    where = (class_index[known], model_index[known])
    np.add.at(sums, where, tokens)
    np.add.at(counts, where, 1.0)
    mean = max(float(tokens.mean()), 1.0)
    by_class, by_model = np.full(len(classes), mean), np.ones(len(models))
    for _ in range(_TURNS):  # one imagined answer each keeps what was never seen at the mean
        by_class = (sums.sum(axis=1) + mean) / (counts @ by_model + 1.0)
        by_model = (sums.sum(axis=0) + mean) / (by_class @ counts + mean)
    guess = by_class[:, None] * by_model[None, :]
    expected = (sums + PRIOR_ANSWERS * guess) / (counts + PRIOR_ANSWERS)
    return OutputLength(
        tuple(classes),
        tuple(models),
        np.maximum(expected, 1.0),
        np.maximum(by_class * by_model.mean(), 1.0),
    )
