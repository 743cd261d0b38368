"""Turns the bytes of decoded tokens into text that may be shown."""

import codecs
from collections.abc import Sequence


class AnswerText:
    """The text of one answer while it grows.

    Two things are held back: the first bytes of a character that is not whole yet, and
    text that may turn out to be the beginning of a stop string.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._is_stopped = False

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has appeared; nothing more is shown from then on."""
        return self._is_stopped

    def feed(self, piece: bytes) -> str:
        """Add one token's bytes; the text that may be shown now, perhaps none."""
        if self._is_stopped:
            return ""
        text = self._held + self._decoder.decode(piece)
        first = min((at for at in map(text.find, self._stop) if at >= 0), default=None)
        if first is not None:
            self._is_stopped = True
            self._held = ""
            return text[:first]
        shown = len(text) - self._undecided(text)
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """End the answer: the text that was held back and is no stop string after all.

        The bytes of a character that was never completed are dropped: no replacement character
        is invented for them.
        """
        rest, self._held = self._held, ""
        return rest

    def _undecided(self, text: str) -> int:
        """Characters at the end of `text` that may be the beginning of a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
