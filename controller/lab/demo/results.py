"""What one policy made of the questions. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from controller.lab.demo.questions import DemoQuestion


@dataclass(frozen=True, slots=True)
class Answer:
    """One question's answer; `error` is set instead of the rest when it failed.

    Attributes:
        energy_joules: as its node said, an estimate on boards without a sensor.
        finish_seconds: from the close of its window to its last token.
    """

    question: DemoQuestion
    text: str = ""
    node_id: str = ""
    model: str = ""
    batch_id: str = ""
    energy_joules: float = 0.0
    is_estimate: bool = True
    finish_seconds: float = 0.0
    error: str = ""

    @property
    def is_right(self) -> bool:
        """Whether it was answered, and rightly."""
        return not self.error and self.question.is_answered_by(self.text)


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """What the controller foresaw of one batch."""

    requests: int
    objective: float
    completion_seconds: float
    decision_milliseconds: float
    policy: str
    fallback_reason: str


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """One policy's run over all questions."""

    policy: str
    answers: tuple[Answer, ...]
    batches: tuple[BatchFigures, ...]

    @property
    def requests(self) -> int:
        """Questions sent."""
        return len(self.answers)

    @property
    def failed(self) -> int:
        """Questions that got no answer."""
        return sum(bool(answer.error) for answer in self.answers)

    @property
    def quality(self) -> float:
        """Share of right answers."""
        return sum(answer.is_right for answer in self.answers) / max(self.requests, 1)

    @property
    def energy_joules(self) -> float:
        """Of all answers."""
        return sum(answer.energy_joules for answer in self.answers)

    @property
    def is_energy_estimated(self) -> bool:
        """Whether at least one node estimated."""
        return any(answer.is_estimate for answer in self.answers if not answer.error)

    @property
    def makespan_predicted_seconds(self) -> float:
        """When the last answer was expected, counted from the close of the window."""
        return max((batch.completion_seconds for batch in self.batches), default=0.0)

    @property
    def makespan_measured_seconds(self) -> float:
        """When the last answer came, counted from the close of the window."""
        return max((a.finish_seconds for a in self.answers if not a.error), default=0.0)

    @property
    def objective(self) -> float:
        """J as it was predicted; over several windows the mean, weighted by their requests."""
        total = sum(batch.requests for batch in self.batches)
        return sum(b.objective * b.requests for b in self.batches) / total if total else 0.0

    @property
    def decision_milliseconds(self) -> float:
        """Spent on deciding, all windows together."""
        return sum(batch.decision_milliseconds for batch in self.batches)

    def to_json(self) -> dict[str, Any]:
        """The figures under the names that other programs read."""
        return {
            "requests": self.requests,
            "failed": self.failed,
            "quality": self.quality,
            "energy_joules": self.energy_joules,
            "energy_is_estimate": self.is_energy_estimated,
            "makespan_predicted_seconds": self.makespan_predicted_seconds,
            "makespan_measured_seconds": self.makespan_measured_seconds,
            "objective": self.objective,
            "decision_milliseconds": self.decision_milliseconds,
            "windows": len(self.batches),
            "answers": [
                {
                    "question": answer.question.text,
                    "subject": answer.question.subject,
                    "node_id": answer.node_id,
                    "model": answer.model,
                    "text": answer.text,
                    "is_right": answer.is_right,
                    "error": answer.error,
                }
                for answer in self.answers
            ],
        }


def to_json(results: Sequence[PolicyResult]) -> dict[str, Any]:
    """Every policy's figures, by name."""
    return {"policies": {result.policy: result.to_json() for result in results}}
