"""A question of an operator's own JSONL; docs/profiling-data.md describes the fields."""

from pathlib import Path
from typing import Final

from controller.domain.request import ChatMessage
from controller.lab.offline.graders import Choice, Grader, Key
from controller.lab.offline.prompts import asked_for_choice
from controller.lab.offline.question_lines import BROKEN, LABELS, BadLine, Line, stem_of, text_of
from controller.lab.offline.questions import Question

_MAX_TOKENS: Final = 1_000_000
_OWN_FIELDS: Final = {
    "id", "prompt", "messages", "answer", "grader", "class", "max_tokens", "choices", "incorrect",
    "tolerance", "relative_tolerance",
}  # fmt: skip


def own_question(line: Line, path: Path, seed: int) -> Question:
    """The question of one line.

    Args:
        line: of the file.
        path: of the file, whose name is the workload's.
        seed: decides nothing here.

    Raises:
        BadLine: a field is wrong, missing or unknown.
    """
    if BROKEN in line.fields:
        raise BadLine(str(line.fields[BROKEN]))
    unknown = sorted(set(line.fields) - _OWN_FIELDS)
    if unknown:
        raise BadLine(f"no field {', '.join(unknown)}; there are: {', '.join(sorted(_OWN_FIELDS))}")
    name = stem_of(path)
    choices = _own_choices(line)
    expected = _own_texts(line, "answer")
    grader = _own_grader(line, choices, expected)
    max_tokens = line.fields.get("max_tokens")
    if max_tokens is not None and (
        not isinstance(max_tokens, int)
        or isinstance(max_tokens, bool)
        or not 1 <= max_tokens <= _MAX_TOKENS
    ):
        raise BadLine(f"'max_tokens' must be a whole number from 1 to {_MAX_TOKENS}")
    key = Key(
        grader,
        () if grader is Grader.NONE else expected,
        _own_texts(line, "incorrect"),
        choices,
        _own_number(line, "tolerance"),
        _own_number(line, "relative_tolerance"),
    )
    own_id = line.fields.get("id", f"{name}/{line.number - 1}")
    if not isinstance(own_id, str | int) or isinstance(own_id, bool) or own_id == "":
        raise BadLine("'id' must be a text or a whole number")
    own_class = line.fields.get("class", name)
    if not isinstance(own_class, str) or not own_class:
        raise BadLine("'class' must be a text that is not empty")
    return Question(name, str(own_id), own_class, _own_messages(line, choices), key, max_tokens)


def _own_grader(line: Line, choices: tuple[Choice, ...], expected: tuple[str, ...]) -> Grader:
    told = line.fields.get("grader")
    if told is None:
        if choices:
            return Grader.CHOICE
        return Grader.NORMALISED if expected else Grader.NONE
    try:
        return Grader(told)
    except ValueError as error:
        names = ", ".join(grader.value for grader in Grader)
        raise BadLine(f"no grader {told!r}; there are: {names}") from error


def _own_messages(line: Line, choices: tuple[Choice, ...]) -> tuple[ChatMessage, ...]:
    if ("prompt" in line.fields) == ("messages" in line.fields):
        raise BadLine("give either 'prompt' or 'messages'")
    if "prompt" in line.fields:
        prompt = text_of(line, "prompt")
        return asked_for_choice(prompt, choices) if choices else (ChatMessage("user", prompt),)
    turns = line.fields["messages"]
    if not isinstance(turns, list) or not turns:
        raise BadLine("'messages' must be a list of turns")
    found = []
    for turn in turns:
        if (
            not isinstance(turn, dict)
            or set(turn) != {"role", "content"}
            or turn["role"] not in ("system", "user", "assistant")
            or not isinstance(turn["content"], str)
        ):
            raise BadLine(
                "each of 'messages' must have a 'role' (system, user or assistant) and a 'content'"
            )
        found.append(ChatMessage(turn["role"], turn["content"]))
    return tuple(found)


def _own_choices(line: Line) -> tuple[Choice, ...]:
    given = line.fields.get("choices", [])
    if not isinstance(given, list) or len(given) > len(LABELS):
        raise BadLine(f"'choices' must be a list of at most {len(LABELS)} texts")
    if not all(isinstance(text, str) for text in given):
        raise BadLine("'choices' must be texts")
    return tuple(Choice(label, text) for label, text in zip(LABELS, given, strict=False))


def _own_texts(line: Line, name: str) -> tuple[str, ...]:
    given = line.fields.get(name, [])
    several = given if isinstance(given, list) else [given]
    if not all(isinstance(v, str | int | float) and not isinstance(v, bool) for v in several):
        raise BadLine(f"{name!r} must be a text or a number, or a list of them")
    return tuple(str(value) for value in several)


def _own_number(line: Line, name: str) -> float:
    found = line.fields.get(name, 0)
    if not isinstance(found, int | float) or isinstance(found, bool):
        raise BadLine(f"{name!r} must be a number")
    return float(found)
