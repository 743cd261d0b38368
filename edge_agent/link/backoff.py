"""Delays between attempts to connect. Pure."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Full jitter: a delay drawn between 0 and a bound that doubles up to `cap_seconds`.

    Full jitter spreads a fleet that lost its controller at one moment, and the cap
    bounds how long a node stays away once the network is back.
    """

    first_seconds: float = 0.5
    cap_seconds: float = 15.0

    def delay_seconds(self, failures: int, rng: random.Random) -> float:
        """How long to wait after so many failures in a row, at least 1."""
        bound = min(self.cap_seconds, self.first_seconds * 2.0 ** min(failures - 1, 16))
        return rng.uniform(0.1 * bound, bound)
