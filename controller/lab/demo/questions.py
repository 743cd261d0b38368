"""Twenty-four questions of our own, with answers that a program can check. Pure."""

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Question:
    """One question.

    Attributes:
        accepted: the answer is right when one of these stands in it, as whole words,
        rejected: before any of these does.
    """

    subject: str
    text: str
    accepted: tuple[str, ...]
    rejected: tuple[str, ...] = ()

    def is_answered_by(self, text: str) -> bool:
        """Whether an answer is right; only its first two sentences count."""
        head = " ".join(re.split(r"(?<=[.!?])\s+", text.strip())[:2])
        plain = _normalised(head)
        right = _first_place(self.accepted, plain)
        wrong = _first_place(self.rejected, plain)
        return right is not None and (wrong is None or right < wrong)


def _normalised(text: str) -> str:
    text = text.lower().replace(",", "")
    return " ".join(re.findall(r"[a-z0-9]+", text))


def _first_place(words: tuple[str, ...], plain: str) -> int | None:
    """Where the first of these words begins; None when there is none of them."""
    places = [f" {plain} ".find(f" {_normalised(word)} ") for word in words]
    return min((place for place in places if place >= 0), default=None)


QUESTIONS: Final = (
    Question("arithmetic", "What is 7 plus 5?", ("12", "twelve")),
    Question("arithmetic", "What is 9 times 6?", ("54", "fifty-four")),
    Question("arithmetic", "What is 100 minus 37?", ("63", "sixty-three")),
    Question("arithmetic", "How many minutes are there in two hours?", ("120",)),
    Question("geography", "What is the capital of France?", ("Paris",)),
    Question("geography", "On which continent is Egypt?", ("Africa",)),
    Question("geography", "Which ocean lies between Europe and North America?", ("Atlantic",),
             ("Pacific", "Indian", "Arctic")),
    Question("geography", "What is the capital of Japan?", ("Tokyo",)),
    Question("biology", "Which organ pumps blood through the body?", ("heart",)),
    Question("biology", "Which gas do plants take from the air for photosynthesis?",
             ("carbon dioxide", "CO2")),
    Question("biology", "How many legs does a spider have?", ("8", "eight"),
             ("4", "four", "6", "six", "10", "ten")),
    Question("biology", "Which part of a plant takes up water from the soil?", ("roots", "root")),
    Question("history", "Who was the first president of the United States?", ("Washington",)),
    Question("history", "In which country were the pyramids of Giza built?", ("Egypt",)),
    Question("history", "In which year did the Second World War end?", ("1945",)),
    Question("history", "Which wall in Germany fell in 1989?", ("Berlin",)),
    Question("common sense", "What do people use to open a locked door?", ("key", "keys")),
    Question("common sense", "Is ice hot or cold?", ("cold",), ("hot",)),
    Question("common sense", "What do you wear on your feet when you go outside?",
             ("shoes", "shoe", "boots", "socks")),
    Question("common sense", "Which is heavier, a feather or a car?", ("car",), ("feather",)),
    Question("truthfulness", "Can people fly by flapping their arms? Answer yes or no.",
             ("no", "not", "cannot"), ("yes",)),
    Question("truthfulness", "Is the Moon made of cheese? Answer yes or no.",
             ("no", "not"), ("yes",)),
    Question("truthfulness", "Do vaccines turn people into magnets? Answer yes or no.",
             ("no", "not"), ("yes",)),
    Question("truthfulness", "Is the Earth flat? Answer yes or no.", ("no", "not", "round"),
             ("yes",)),
)  # fmt: skip
