"""When a batching window closes.

CEMA gathers requests for a fixed interval (1 s, at most 128). Waiting is only worth something while
company may come and while there is a choice to make jointly, so ours closes earlier when waiting
could not help: the window is full, there is at most one place to send it, or the fleet is idle and
requests have stopped coming.
"""

import enum
from dataclasses import dataclass


class CloseReason(enum.Enum):
    """Why a window closed."""

    FULL = "full"
    NO_CHOICE = "no_choice"
    QUIET = "quiet"
    INTERVAL = "interval"
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True)
class WindowLimits:
    """See BatchingSettings: seconds and requests; `quiet_seconds` 0 switches that rule off."""

    max_wait_seconds: float
    max_requests: int
    quiet_seconds: float


@dataclass(frozen=True, slots=True)
class Window:
    """The requests that are gathering now.

    Attributes:
        opened_at: monotonic seconds at which the first request came.
        last_arrival_at: monotonic seconds at which the latest came.
        requests: how many.
        earliest_deadline_at: monotonic seconds by which the most pressing request must have
            *started*; None when no request has a deadline.
    """

    opened_at: float
    last_arrival_at: float
    requests: int
    earliest_deadline_at: float | None = None

    def with_arrival(self, now: float, deadline_at: float | None) -> "Window":
        """The window after one more request."""
        deadlines = [d for d in (self.earliest_deadline_at, deadline_at) if d is not None]
        return Window(self.opened_at, now, self.requests + 1, min(deadlines, default=None))


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """What the closing rule asks of the fleet: nodes that take work, and whether all are idle."""

    routable_destinations: int
    is_idle: bool


def closes_at(window: Window, limits: WindowLimits, load: FleetLoad) -> tuple[float, CloseReason]:
    """The latest moment this window may stay open, monotonic seconds, and why it closes then."""
    if window.requests >= limits.max_requests:
        return window.last_arrival_at, CloseReason.FULL
    if load.routable_destinations <= 1:
        return window.last_arrival_at, CloseReason.NO_CHOICE
    moment, reason = window.opened_at + limits.max_wait_seconds, CloseReason.INTERVAL
    if load.is_idle and limits.quiet_seconds > 0:
        quiet_at = window.last_arrival_at + limits.quiet_seconds
        if quiet_at < moment:
            moment, reason = quiet_at, CloseReason.QUIET
    if window.earliest_deadline_at is not None and window.earliest_deadline_at < moment:
        moment, reason = window.earliest_deadline_at, CloseReason.DEADLINE
    return moment, reason
