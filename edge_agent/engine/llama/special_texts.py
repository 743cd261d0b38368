"""Keeps what looks like a control token in a message from becoming one.

A template writes control tokens as text ("<|im_end|>"), and the tokenizer turns that text into
tokens wherever it stands. What a user writes must never end a turn or begin another one, so the
texts of control tokens are taken out of the messages before the template sees them, and put back
as plain text after it has done its work. Everything else stays one text with the template's own,
so that an ordinary chat has exactly the tokens that llama.cpp gives it.
"""

import bisect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

_PRIVATE_USE: Final = range(0xF0000, 0xFFFFE)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a rendered chat; `is_plain` text holds no control tokens, whatever it says."""

    text: str
    is_plain: bool


class SpecialTexts:
    """The texts of a vocabulary's control tokens."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(text for text in texts if text)
        self._sorted = sorted(self._texts)
        self._lengths = sorted({len(text) for text in self._texts}, reverse=True)
        starts = "".join(re.escape(first) for first in sorted({text[0] for text in self._texts}))
        self._start = re.compile(f"[{starts}]") if starts else None

    def find(self, text: str) -> list[tuple[int, int]]:
        """(start, end) of each control token's text, the longest at each place, ascending."""
        found: list[tuple[int, int]] = []
        if self._start is None:
            return found
        at = 0
        while (start := self._start.search(text, at)) is not None:
            at = start.start()
            length = next(
                (
                    size
                    for size in self._lengths
                    if at + size <= len(text) and text[at : at + size] in self._texts
                ),
                0,
            )
            if length:
                found.append((at, at + length))
            at += length or 1
        return found

    def unfinished(self, text: str) -> bool:
        """Whether the end of a text is the beginning of a control token's."""
        longest = self._lengths[0] if self._lengths else 0
        for size in range(1, min(longest, len(text) + 1)):
            tail = text[-size:]
            at = bisect.bisect_left(self._sorted, tail)
            if at < len(self._sorted) and self._sorted[at].startswith(tail):
                return True
        return False

    def meet(self, left: str, right: str) -> bool:
        """Whether a control token's text begins in one text and ends in the next."""
        longest = self._lengths[0] if self._lengths else 0
        left, right = left[-longest:], right[:longest]
        both = left + right
        return any(
            size > len(left) - at and both[at : at + size] in self._texts
            for at in range(len(left))
            for size in self._lengths
            if at + size <= len(both)
        )


class Hiding:
    """Hides the control tokens' texts of one chat behind marks that no message has.

    Args:
        texts: every text that will be hidden in.

    Raises:
        ValueError: the texts leave no character for the marks.
    """

    def __init__(self, special: SpecialTexts, texts: Iterable[str]) -> None:
        self._special = special
        used = set().union(*texts)
        border = next((chr(code) for code in _PRIVATE_USE if chr(code) not in used), None)
        if border is None:
            raise ValueError("it uses up every character that Unicode keeps for private use")
        self._border = border
        self._hidden: list[str] = []

    def hide(self, text: str) -> str:
        """The text for the template."""
        parts: list[str] = []
        at = 0
        for start, end in self._special.find(text):
            parts += (text[at:start], self._mark(text[start:end]))
            at = end
        rest = text[at:]
        # "<|im_" at the end of one message and "end|>" at the beginning of the next must not
        # meet; a template may strip the white space between them.
        kept = rest.rstrip()
        if self._special.unfinished(kept):
            rest = kept + self._mark("") + rest[len(kept) :]
        return "".join((*parts, rest))

    def pieces(self, rendered: str) -> Sequence[Piece]:
        """What the template made of the hidden texts, in order.

        Raises:
            ValueError: it cut a mark in two.
        """
        pieces: list[Piece] = []
        is_joined = False
        # Odd parts are the numbers in the marks.
        for index, part in enumerate(re.split(f"{self._border}([0-9]+){self._border}", rendered)):
            if index % 2:
                hidden = self._hidden[int(part)]
                is_joined = not hidden
                if hidden:
                    pieces.append(Piece(hidden, is_plain=True))
                continue
            if self._border in part:
                raise ValueError("it cuts messages at a fixed length, within a control token")
            before = pieces[-1] if pieces else None
            if (
                before is not None
                and is_joined
                and not before.is_plain
                and not self._special.meet(before.text, part)
            ):
                pieces[-1] = Piece(before.text + part, is_plain=False)
            else:
                pieces.append(Piece(part, is_plain=False))
        return [piece for piece in pieces if piece.text]

    def _mark(self, text: str) -> str:
        self._hidden.append(text)
        return f"{self._border}{len(self._hidden) - 1}{self._border}"
