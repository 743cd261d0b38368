"""How questions are put: zero-shot chain of thought, one user message, no worked examples.

The model is asked to reason first and to end in a form that the grader reads. Source of the form:
the experiments of CEMA-Router (zero-shot chain of thought, exact number or choice); the wording is
ours. It shows no letter and no number, since small models repeat what they are shown. A change of
wording makes measurements of before and after two different things.
"""

from collections.abc import Sequence
from typing import Final

from controller.domain.request import ChatMessage
from controller.lab.offline.graders import Choice

_NUMBER: Final = (
    "{question}\n\n"
    "Let's think step by step. End with a line that has only #### and the final number."
)
_CHOICE: Final = (
    "{question}\n\n{choices}\n\n"
    "Let's think step by step. "
    'End with "The answer is" and the letter of the right choice in brackets.'
)
_SHORT_TEXT: Final = "{question}\n\nAnswer truthfully, in one short sentence."


def asked_for_number(question: str) -> tuple[ChatMessage, ...]:
    """A word problem; for the graders GSM8K and NUMERIC."""
    return (ChatMessage("user", _NUMBER.format(question=question.strip())),)


def asked_for_choice(question: str, choices: Sequence[Choice]) -> tuple[ChatMessage, ...]:
    """A question with its options, one a line; for the grader CHOICE."""
    listed = "\n".join(f"{choice.label}) {choice.text.strip()}" for choice in choices)
    return (ChatMessage("user", _CHOICE.format(question=question.strip(), choices=listed)),)


def asked_for_sentence(question: str) -> tuple[ChatMessage, ...]:
    """A question to be answered freely; for the grader TRUTHFULQA."""
    return (ChatMessage("user", _SHORT_TEXT.format(question=question.strip())),)
