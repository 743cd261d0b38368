"""How late the event loop wakes up: while it is late nobody is answered and no health is heard."""

import asyncio
import bisect
import math
from collections.abc import Sequence
from typing import Final

from controller.telemetry.metrics import Buckets, Metrics

STEP_SECONDS: Final = 0.1

BOUNDS_SECONDS: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, math.inf)
"""Of the histogram's buckets. A node's health should not wait for more than 0.05 s."""


class LoopLag:
    """A histogram of how much later than asked the loop woke up.

    Attributes:
        total_seconds: of all wakings.
    """

    def __init__(self) -> None:
        self._counts = [0] * len(BOUNDS_SECONDS)
        self.total_seconds = 0.0

    @property
    def counts(self) -> Sequence[int]:
        """Wakings in each bucket, beyond the bound of the one before it."""
        return tuple(self._counts)

    def register_metrics(self, metrics: Metrics) -> None:
        """Register the histogram."""
        metrics.histogram(
            "event_loop_lag_seconds",
            "Delay of the controller's event loop, measured ten times a second. While it is late, "
            "nothing is answered.",
            lambda: Buckets(BOUNDS_SECONDS, self._counts, self.total_seconds),
        )

    def observe(self, seconds: float) -> None:
        """The loop woke up so late."""
        late = max(seconds, 0.0)
        self._counts[bisect.bisect_left(BOUNDS_SECONDS, late)] += 1
        self.total_seconds += late

    async def run(self) -> None:
        """Watch the loop until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            wanted = loop.time() + STEP_SECONDS
            await asyncio.sleep(STEP_SECONDS)
            self.observe(loop.time() - wanted)
