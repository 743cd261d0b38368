"""One question with its right answer, as a workload file gave it."""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from controller.domain.request import ChatMessage
from controller.lab.offline.graders import Key


@dataclass(frozen=True, slots=True)
class Question:
    """What is sent, and what it is graded by.

    Attributes:
        workload: name of the question set.
        question_id: unique in its workload.
        question_class: topic that the workload gives; its name where it gives none.
        messages: the chat to send; at least one turn.
        key: how an answer is graded.
        max_tokens: greatest length of an answer; None takes the run's.
    """

    workload: str
    question_id: str
    question_class: str
    messages: tuple[ChatMessage, ...]
    key: Key
    max_tokens: int | None = None

    @property
    def text(self) -> str:
        """Everything the model will read, without its template."""
        return "\n".join(message.content for message in self.messages)


def chosen(
    questions: Sequence[Question],
    classes: Collection[str] = (),
    sample: int | None = None,
    seed: int = 0,
) -> list[Question]:
    """Those of the classes, and of them a random sample, in the order of the workload.

    Args:
        questions: of one workload.
        classes: empty takes all.
        sample: how many; None, or more than there are, takes all.
        seed: the same questions, classes, sample and seed choose the same.
    """
    kept = [q for q in questions if not classes or q.question_class in classes]
    if sample is None or sample >= len(kept):
        return kept
    rng = random.Random(seed)
    return [kept[index] for index in sorted(rng.sample(range(len(kept)), sample))]


@dataclass(frozen=True, slots=True)
class Part:
    """Every `of`-th question, from number `index` on: several parts share a set out.

    Attributes:
        index: 0 to `of` - 1.
        of: how many parts there are.
    """

    index: int
    of: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.of:
            raise ValueError(f"part {self.index + 1} of {self.of}")


def parted(questions: Sequence[Question], parts: Collection[Part]) -> list[Question]:
    """The questions, of one workload, that are in one of the parts; all when there are none."""
    return [
        question
        for at, question in enumerate(questions)
        if not parts or any(at % part.of == part.index for part in parts)
    ]
