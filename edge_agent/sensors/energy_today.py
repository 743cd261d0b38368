"""The node's energy since midnight, kept over restarts."""

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

log = structlog.get_logger()

_WRITE_SECONDS: Final = 60.0
"""A flash card wears out by writing; so much at most is lost when the power fails."""


class EnergyToday:
    """Adds up a total that only rises, day by day of the node's own wall clock.

    A clock that falls back, as on a board without a clock battery before its time is set, starts
    no new day: only a later date than the kept one does. Belongs to the event loop.

    Args:
        path: where it is kept; a damaged file starts the day at 0.
        today: the local date.
    """

    def __init__(
        self, path: Path, today: Callable[[], datetime.date] = datetime.date.today
    ) -> None:
        self._path = path
        self._today = today
        self._day, self._joules = _read(path) or (today(), 0.0)
        self._last_total = 0.0
        self._written_at: float | None = None

    @property
    def joules(self) -> float:
        """Since midnight, as of the last `add`."""
        return self._joules

    def add(self, total_joules: float, now: float) -> float:
        """Take the node's total since the agent started; returns today's joules.

        Args:
            now: monotonic seconds.
        """
        day = self._today()
        if day > self._day:
            # What came since the last look belongs to the new day: looks are a second apart.
            self._day, self._joules = day, 0.0
        self._joules += max(0.0, total_joules - self._last_total)
        self._last_total = total_joules
        if self._written_at is None or now - self._written_at >= _WRITE_SECONDS:
            self._written_at = now
            self.keep()
        return self._joules

    def keep(self) -> None:
        """Write it down; a disk that cannot be written loses it at the next restart only."""
        partial = self._path.with_suffix(".partial")
        try:
            partial.write_text(json.dumps({"day": self._day.isoformat(), "joules": self._joules}))
            partial.replace(self._path)
        except OSError as error:
            log.warning("energy.not_kept", path=str(self._path), error=error.strerror)


def _read(path: Path) -> tuple[datetime.date, float] | None:
    try:
        found = json.loads(path.read_text())
        day, joules = datetime.date.fromisoformat(found["day"]), float(found["joules"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return (day, joules) if 0.0 <= joules < float("inf") else None
