"""DRLM's reward of sending one query somewhere, with energy and money as further penalties.

r = alpha * quality~ - beta * Phi(latency~) - gamma * energy~ - delta * cost~, each term scaled to
0..1 over the feasible candidates of the step; Phi(t) = (exp(k t) - 1) / (exp(k) - 1). Latency is
predicted inference plus the predicted wait. Source: DRLM, section II-4; the routing specification,
section 8, which also gives k.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from controller.routing.baselines.greedy_reward import (
    LATENCY_WEIGHT,
    QUALITY_WEIGHT,
    latency_penalty,
)
from controller.routing.ppo.observation import scaled
from controller.routing.problem import BoolArray, FloatArray


@dataclass(frozen=True, slots=True)
class RewardWeights:
    """What a reward consists of; the defaults are DRLM's."""

    quality: float = QUALITY_WEIGHT
    latency: float = LATENCY_WEIGHT
    energy: float = 0.0
    cost: float = 0.0

    def __post_init__(self) -> None:
        values = (self.quality, self.latency, self.energy, self.cost)
        if not all(0.0 <= value < np.inf for value in values):
            raise ValueError("weights of the reward must be finite and at least 0")


DRLM: Final = RewardWeights()


def step_rewards(
    quality: FloatArray,
    latency_seconds: FloatArray,
    energy_joules: FloatArray,
    cost_usd: FloatArray,
    feasible: BoolArray,
    weights: RewardWeights = DRLM,
) -> FloatArray:
    """The reward of every candidate, float64[..., K]; NaN where it is not feasible.

    Args:
        quality: float64[..., K]; predicted.
        latency_seconds: float64[..., K]; predicted inference and wait.
        energy_joules: float64[..., K].
        cost_usd: float64[..., K].
        feasible: bool[..., K].
        weights: of the four terms.
    """
    late = latency_penalty(scaled(latency_seconds, feasible))
    found = weights.quality * scaled(quality, feasible) - weights.latency * late
    if weights.energy:
        found = found - weights.energy * scaled(energy_joules, feasible)
    if weights.cost:
        found = found - weights.cost * scaled(cost_usd, feasible)
    return np.where(feasible, found, np.nan)
