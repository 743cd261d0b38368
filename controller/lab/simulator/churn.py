"""Nodes that fail and come back at random."""

from dataclasses import dataclass

import numpy as np

from controller.lab.simulator.runner import Outage


@dataclass(frozen=True, slots=True)
class Churn:
    """How long nodes stay; both times are exponential and independent from node to node.

    Attributes:
        up_seconds, down_seconds: their means, above 0.
        unnoticed_seconds: how long a failed node goes on being sent requests: its lease.

    Raises:
        ValueError: a time is not positive and finite, or the lease is negative.
    """

    up_seconds: float
    down_seconds: float
    unnoticed_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not (0.0 < self.up_seconds < np.inf and 0.0 < self.down_seconds < np.inf):
            raise ValueError("nodes stay up and away for positive finite times")
        if not 0.0 <= self.unnoticed_seconds < np.inf:
            raise ValueError("a lease is finite and not negative")

    @property
    def down_ratio(self) -> float:
        """Share of the nodes that is away at any moment, in the long run."""
        return self.down_seconds / (self.up_seconds + self.down_seconds)


def random_outages(
    nodes: int, churn: Churn, until_seconds: float, rng: np.random.Generator
) -> list[Outage]:
    """Every node's outages that begin before a moment, as if all had come and gone for long.

    Args:
        nodes: how many there are.
        churn: how long they stay.
        until_seconds: of the simulation; later ones are left out.
        rng: draws everything.
    """
    found = []
    for node in range(nodes):
        at = 0.0
        if rng.random() < churn.down_ratio:
            # Away at the start, which everybody knows; the rest of an exponential time is one.
            at = float(rng.exponential(churn.down_seconds))
            found.append(Outage(node, 0.0, at))
        while True:
            fails = at + float(rng.exponential(churn.up_seconds))
            if fails >= until_seconds:
                break
            at = fails + float(rng.exponential(churn.down_seconds))
            found.append(Outage(node, fails, at, churn.unnoticed_seconds))
    return found
