"""How a pull tells whoever waits what it is doing."""

import enum
from collections.abc import Callable
from dataclasses import dataclass


class PullStage(enum.Enum):
    """What a pull is busy with."""

    WAITING = "waiting"
    DOWNLOADING = "downloading"
    UNPACKING = "unpacking"
    COPYING = "copying"
    VERIFYING = "verifying"
    QUANTISING = "quantising"
    RETRYING = "retrying"
    SOURCE_FAILED = "source_failed"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class PullProgress:
    """One report of a pull.

    Attributes:
        model: the catalogue name of what is being pulled; a derived model's pull also reports on
            the model it is made from.
        text: the stage in words, with the source or the reason.
        done_bytes, total_bytes: of this stage; the total is None when nobody knows it.
    """

    model: str
    stage: PullStage
    text: str
    done_bytes: int = 0
    total_bytes: int | None = None


OnProgress = Callable[[PullProgress], None]
"""Called on the event loop, many times a second at most; must not block."""


def ignore_progress(progress: PullProgress) -> None:
    """Do nothing; for callers that do not watch."""
