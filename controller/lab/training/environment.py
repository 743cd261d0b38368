"""DRLM's decision process as a Gymnasium environment over the simulator.

For other people's learners; ours trains on `vector_environment`, which steps many fleets at once.
One step is one query; an episode is `requests` queries from empty queues, and ends by truncation,
since the fleet would go on.
"""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from controller.lab.simulator.reward import DRLM, RewardWeights, step_rewards
from controller.lab.simulator.scenario import Scenario
from controller.lab.simulator.stepping import OpenDestinations, SteppedCluster

Observation = dict[str, Any]

_FLOAT = np.float32
_MOST = 1e9
"""Seconds, joules and USD are cut here, so that they fit the observation space."""


class RoutingEnvironment(gym.Env[Observation, np.int64]):
    """Routes queries one by one.

    Observation: raw state, a dictionary of arrays. Of K destinations: `quality`,
    `service_seconds`, `wait_seconds`, `energy_joules`, `cost_usd` float32[K] and `feasible`
    int8[K]. Of N nodes: `busy_slots`, `queue_length`, `remaining_seconds`, `utilisation`
    float32[N].

    Action: index of a destination. `action_masks()` and `info["action_mask"]` say which are
    feasible. One that is not is answered with the least reward there is, and the query goes where
    it would be ready soonest.

    Reward: `controller.lab.simulator.reward`, from predictions, as in DRLM.

    Args:
        scenario: the fleet and its queries.
        requests: of an episode.
        rate: arrivals a second, Poisson.
        weights: of the reward.
        down_ratio: at most this share of the nodes is away in an episode.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - Gymnasium's own form

    def __init__(
        self,
        scenario: Scenario,
        requests: int = 100,
        rate: float = 1.0,
        weights: RewardWeights = DRLM,
        down_ratio: float = 0.0,
    ) -> None:
        if requests < 1 or not rate > 0.0 or not 0.0 <= down_ratio < 1.0:
            raise ValueError("an episode needs requests, a rate above 0 and nodes that are there")
        self._scenario, self._requests, self._rate = scenario, requests, rate
        self._weights, self._down_ratio = weights, down_ratio
        destinations, nodes = int(scenario.node_of.size), scenario.nodes
        self.action_space = spaces.Discrete(destinations)

        def box(size: int, high: float) -> spaces.Box:
            return spaces.Box(0.0, high, (size,), _FLOAT)

        parts: dict[str, spaces.Space[Any]] = {
            "quality": box(destinations, 1.0),
            "service_seconds": box(destinations, _MOST),
            "wait_seconds": box(destinations, _MOST),
            "energy_joules": box(destinations, _MOST),
            "cost_usd": box(destinations, _MOST),
            "feasible": spaces.MultiBinary(destinations),
            "busy_slots": box(nodes, _MOST),
            "queue_length": box(nodes, _MOST),
            "remaining_seconds": box(nodes, _MOST),
            "utilisation": box(nodes, 1.0),
        }
        self.observation_space = spaces.Dict(parts)
        self._cluster = SteppedCluster(scenario)
        self._candidates: OpenDestinations | None = None
        self._query = self._step = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start an episode with empty queues.

        Args:
            seed: of arrivals, queries and luck; None goes on with the last one's generator.
            options: not used.
        """
        super().reset(seed=seed, options=options)
        self._cluster, self._step = SteppedCluster(self._scenario), 0
        nodes = self._scenario.nodes
        away = self.np_random.random(nodes) < self.np_random.uniform(0.0, self._down_ratio)
        if not (~away & self._scenario.has_models).any():
            away[:] = False
        for node in np.flatnonzero(away):
            self._cluster.fail(int(node))
        return self._arrive(), self._info()

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Send the query, and let the next one arrive.

        Returns:
            observation, reward, never terminated, truncated after the last query, and info with
            `query`, `action_mask` and, of the step taken, `quality`, `correct`, `wait_seconds`,
            `service_seconds` (predicted) and `is_feasible`.

        Raises:
            RuntimeError: `reset` was not called.
        """
        candidates = self._candidates
        if candidates is None:
            raise RuntimeError("call reset before step")
        chosen = int(action)
        late = candidates.service_seconds + candidates.wait_seconds
        is_feasible = bool(candidates.feasible[chosen])
        if is_feasible:
            rewards = step_rewards(
                candidates.quality,
                late,
                candidates.energy_joules,
                candidates.cost_usd,
                candidates.feasible,
                self._weights,
            )
            reward = float(rewards[chosen])
        else:
            w = self._weights
            reward = -(w.latency + w.energy + w.cost)
            chosen = int(np.argmin(np.where(candidates.feasible, late, np.inf)))
        model = int(candidates.configuration_index[chosen])
        taken = {
            "quality": float(candidates.quality[chosen]),
            "correct": float(self._scenario.correct[self._query, model]),
            "wait_seconds": float(candidates.wait_seconds[chosen]),
            "service_seconds": float(candidates.service_seconds[chosen]),
            "is_feasible": is_feasible,
        }
        self._cluster.assign(chosen, float(self.np_random.standard_normal()))
        self._step += 1
        observation = self._arrive()
        return observation, reward, False, self._step >= self._requests, self._info() | taken

    def action_masks(self) -> NDArray[np.bool_]:
        """bool[K]; which destinations are feasible now."""
        if self._candidates is None:
            return np.ones(self._scenario.node_of.size, dtype=np.bool_)
        return np.asarray(self._candidates.feasible)

    def _arrive(self) -> Observation:
        rng = self.np_random
        moment = self._cluster.now + float(rng.exponential(1.0 / self._rate))
        self._query = int(rng.integers(self._scenario.queries))
        self._candidates, _ = self._cluster.arrive(self._query, moment)
        state, seen = self._cluster.state(), self._candidates

        def cut(values: NDArray[Any]) -> NDArray[Any]:
            return np.asarray(np.minimum(values, _MOST), dtype=_FLOAT)

        return {
            "quality": cut(seen.quality),
            "service_seconds": cut(seen.service_seconds),
            "wait_seconds": cut(seen.wait_seconds),
            "energy_joules": cut(seen.energy_joules),
            "cost_usd": cut(seen.cost_usd),
            "feasible": seen.feasible.astype(np.int8),
            "busy_slots": cut(state.busy_slots),
            "queue_length": cut(state.queue_length),
            "remaining_seconds": cut(state.remaining_seconds),
            "utilisation": np.minimum(state.utilisation, 1.0).astype(_FLOAT),
        }

    def _info(self) -> dict[str, Any]:
        return {"query": self._query, "action_mask": self.action_masks()}
