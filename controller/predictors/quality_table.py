"""Expected quality of each model for each class of prompts: DRLM's A(c, m)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

CORRECT_FROM: Final = 0.5
"""A score of at least this is a correct answer, as the paper binarises."""

PRIOR_ANSWERS: Final = 2.0
"""Beta(1, 1): two imagined answers. Where a class was never asked of a model, they are as good as
the model was on other classes; where the model is unknown too, one of two is right."""


@dataclass(frozen=True, slots=True)
class QualityTable:
    """Counts of right answers by class and model.

    Attributes:
        classes: names of the C classes.
        models: names of the M models (`ModelConfiguration.name`, or catalogue names).
        correct: float64[C, M], answers with a score of at least `CORRECT_FROM`.
        answered: float64[C, M], answers with a score.
    """

    classes: tuple[str, ...]
    models: tuple[str, ...]
    correct: FloatArray
    answered: FloatArray

    def __post_init__(self) -> None:
        shape = (len(self.classes), len(self.models))
        if self.correct.shape != shape or self.answered.shape != shape:
            raise ValueError(f"a quality table of {shape} has counts of {self.correct.shape}")
        if (self.correct < 0).any() or (self.correct > self.answered).any():
            raise ValueError("a quality table counts more right answers than answers")

    @property
    def expected(self) -> FloatArray:
        """float64[C, M], A(c, m): smoothed share of right answers, strictly within (0, 1).

        (right + 1) / (answers + 2) where the class was asked of the model. Where it never was,
        the model's own smoothed share over all classes: 0.5 when the model is new.
        """
        smoothed = (self.correct + 1.0) / (self.answered + PRIOR_ANSWERS)
        overall = (self.correct.sum(axis=0) + 1.0) / (self.answered.sum(axis=0) + PRIOR_ANSWERS)
        return np.where(self.answered > 0, smoothed, overall[None, :])

    def predict(
        self, class_probabilities: FloatArray, models: Sequence[str] | None = None
    ) -> FloatArray:
        """float64[Q, K], expected quality, marginalised over the class probabilities.

        Args:
            class_probabilities: float64[Q, C], rows sum to 1.
            models: the K models asked about; None takes the table's own. One that is not in the
                table gets the mean of all models for the class.
        """
        expected = self.expected
        if models is not None:
            mean = expected.mean(axis=1) if self.models else np.full(len(self.classes), 0.5)
            position = {name: at for at, name in enumerate(self.models)}
            columns = [expected[:, position[name]] if name in position else mean for name in models]
            expected = np.stack(columns, axis=1) if columns else np.zeros((len(self.classes), 0))
        found: FloatArray = class_probabilities @ expected
        return found


def tabulate(
    classes: Sequence[str],
    models: Sequence[str],
    class_index: IntArray,
    model_index: IntArray,
    score_ratio: FloatArray,
) -> QualityTable:
    """Count graded answers.

    Args:
        classes: names of the C classes.
        models: names of the M models.
        class_index: int64[n]; class of each answer.
        model_index: int64[n]; model of each answer.
        score_ratio: float64[n], 0 to 1; NaN was not graded and does not count.
    """
    graded = ~np.isnan(score_ratio)
    correct = np.zeros((len(classes), len(models)))
    answered = np.zeros_like(correct)
    where = (class_index[graded], model_index[graded])
    np.add.at(answered, where, 1.0)
    np.add.at(correct, where, (score_ratio[graded] >= CORRECT_FROM).astype(np.float64))
    return QualityTable(tuple(classes), tuple(models), correct, answered)
