"""Twenty-four questions of our own, with answers that a program can check. Pure."""

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class DemoQuestion:
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
    DemoQuestion("arithmetic", "What is 7 plus 5?", ("12", "twelve")),
    DemoQuestion("arithmetic", "What is 9 times 6?", ("54", "fifty-four")),
    DemoQuestion("arithmetic", "What is 100 minus 37?", ("63", "sixty-three")),
    DemoQuestion("arithmetic", "How many minutes are there in two hours?", ("120",)),
    DemoQuestion("geography", "What is the capital of France?", ("Paris",)),
    DemoQuestion("geography", "On which continent is Egypt?", ("Africa",)),
    DemoQuestion("geography", "Which ocean lies between Europe and North America?", ("Atlantic",),
             ("Pacific", "Indian", "Arctic")),
    DemoQuestion("geography", "What is the capital of Japan?", ("Tokyo",)),
    DemoQuestion("biology", "Which organ pumps blood through the body?", ("heart",)),
    DemoQuestion("biology", "Which gas do plants take from the air for photosynthesis?",
             ("carbon dioxide", "CO2")),
    DemoQuestion("biology", "How many legs does a spider have?", ("8", "eight"),
                 ("4", "four", "6", "six", "10", "ten")),
    DemoQuestion("biology", "Which part of a plant takes up water from the soil?",
                 ("roots", "root")),
    DemoQuestion("history", "Who was the first president of the United States?", ("Washington",)),
    DemoQuestion("history", "In which country were the pyramids of Giza built?", ("Egypt",)),
    DemoQuestion("history", "In which year did the Second World War end?", ("1945",)),
    DemoQuestion("history", "Which wall in Germany fell in 1989?", ("Berlin",)),
    DemoQuestion("common sense", "What do people use to open a locked door?", ("key", "keys")),
    DemoQuestion("common sense", "Is ice hot or cold?", ("cold",), ("hot",)),
    DemoQuestion("common sense", "What do you wear on your feet when you go outside?",
             ("shoes", "shoe", "boots", "socks")),
    DemoQuestion("common sense", "Which is heavier, a feather or a car?", ("car",), ("feather",)),
    DemoQuestion("truthfulness", "Can people fly by flapping their arms? Answer yes or no.",
             ("no", "not", "cannot"), ("yes",)),
    DemoQuestion("truthfulness", "Is the Moon made of cheese? Answer yes or no.",
             ("no", "not"), ("yes",)),
    DemoQuestion("truthfulness", "Do vaccines turn people into magnets? Answer yes or no.",
             ("no", "not"), ("yes",)),
    DemoQuestion("truthfulness", "Is the Earth flat? Answer yes or no.", ("no", "not", "round"),
             ("yes",)),
)  # fmt: skip
