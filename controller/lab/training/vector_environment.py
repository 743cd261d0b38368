"""Many small queue simulations that step together in NumPy, to train on.

`controller.lab.simulator` judges policies; this is the part of it that learning needs a hundred
thousand times: first come, first served nodes with slots, fed one query a step.

Axes: B simulations, Q queries, M models, N nodes, K kinds of nodes, P candidates.
"""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from controller.routing.ppo.observation import (
    DRLM_WEIGHTS,
    Candidates,
    Layout,
    LayoutObservation,
    layout_observation,
    scaled,
)
from controller.routing.problem import FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class World:
    """A fleet and the queries it gets.

    Attributes:
        layout: names and placement.
        quality: float64[Q, M]; predicted.
        correct: float64[Q, M]; what an answer scores really.
        seconds: float64[Q, M, K]; predicted inference time; infinite where not deployed.
        slots: int64[K]; requests a node serves at once.
        watts: float64[K]; while it serves.
        usd_per_second: float64[K]; while it serves.
        noise: deviation of log(real / predicted time).
        parameters_billions: float64[M].
    """

    layout: Layout
    quality: FloatArray
    correct: FloatArray
    seconds: FloatArray
    slots: IntArray
    watts: FloatArray
    usd_per_second: FloatArray
    noise: float
    parameters_billions: FloatArray

    def split(self, held_out: float, seed: int) -> "tuple[World, World]":
        """The same fleet with disjoint queries: those to train on, those to judge with."""
        order = np.random.default_rng(seed).permutation(self.quality.shape[0])
        cut = round(order.size * (1.0 - held_out))
        return self.with_queries(order[:cut]), self.with_queries(order[cut:])

    def with_queries(self, queries: IntArray) -> "World":
        """The same fleet with some of the queries."""
        return World(
            self.layout,
            self.quality[queries],
            self.correct[queries],
            self.seconds[queries],
            self.slots,
            self.watts,
            self.usd_per_second,
            self.noise,
            self.parameters_billions,
        )


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the episodes of a training run are like.

    Attributes:
        rates: least and greatest arrivals a second; an episode draws one between, evenly on the
            log scale.
        preferences: share of the episodes with weights drawn at random; the others have DRLM's.
        down_ratio: at most this share of the nodes is away in an episode.
    """

    rates: tuple[float, float] = (1.0, 1.0)
    preferences: float = 0.0
    down_ratio: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What one step brought, each float64[B]; `waiting` and `seconds` are what really happened."""

    reward: FloatArray
    waiting: FloatArray
    seconds: FloatArray
    correct: FloatArray


class VectorEnvironment:
    """B copies of one world, each with its own queries, arrivals and queues."""

    def __init__(
        self, world: World, size: int, rng: np.random.Generator, traffic: Traffic | None = None
    ) -> None:
        self.world, self.size = world, size
        self.traffic = traffic or Traffic()
        self._rng = rng
        layout = world.layout
        kinds = layout.kinds
        self._members = [np.flatnonzero(layout.kind_of_node == kind) for kind in range(kinds)]
        self._hosted = np.stack(
            [layout.deployed[:, members].all(axis=1) for members in self._members], axis=1
        )  # [M, K]
        partly = np.stack([layout.deployed[:, m].any(axis=1) for m in self._members], axis=1)
        if (partly != self._hosted).any():
            raise ValueError("nodes of one kind must have the same models; split the kind")
        self.pair_model, self.pair_kind = np.nonzero(self._hosted)  # [P]
        most = int(world.slots.max())
        absent = np.arange(most)[None, :] >= world.slots[layout.kind_of_node][:, None]
        self._empty = np.where(absent, np.inf, 0.0)  # [N, S]
        self.reset()

    @property
    def pairs(self) -> int:
        """P."""
        return int(self.pair_model.size)

    def reset(self) -> None:
        """Start new episodes with empty queues."""
        size, rng, nodes = self.size, self._rng, self._empty.shape[0]
        self._actual = np.repeat(self._empty[None], size, axis=0)
        self._expected = self._actual.copy()
        self.now = np.zeros(size)
        low, high = self.traffic.rates
        self.rates = np.exp(rng.uniform(np.log(low), np.log(high), size))
        drawn = rng.dirichlet((2.0, 0.5, 0.5, 1.0), size)
        is_drawn = rng.random(size) < self.traffic.preferences
        self.weights = np.where(is_drawn[:, None], drawn, np.array(DRLM_WEIGHTS))
        away = rng.random((size, nodes)) < rng.uniform(0.0, self.traffic.down_ratio, (size, 1))
        away[away.all(axis=1)] = False
        # A fleet without any node of a lone kind is fine; one without any model is not.
        self.up = ~away
        self._arrive()

    def _arrive(self) -> None:
        self.now = self.now + self._rng.exponential(1.0 / self.rates)
        self.query = self._rng.integers(0, self.world.quality.shape[0], self.size)

    def waits(self) -> FloatArray:
        """Predicted seconds until each node can start, float64[B, N]; completions are known."""
        now = self.now[:, None, None]
        ahead = np.where(self._actual <= now, 0.0, np.maximum(self._expected - now, 1e-3))
        return np.asarray(ahead.min(axis=2))

    def candidates(self) -> tuple[Candidates, IntArray]:
        """A candidate for each deployed (model, kind): its least busy node; int64[B, P] which."""
        world, layout = self.world, self.world.layout
        waiting = np.where(self.up, self.waits(), np.inf)
        finite = np.where(self.up, waiting, 0.0)
        log_wait, idle = np.log1p(finite), (waiting <= 0.0)
        kinds = layout.kinds
        shape = (self.size, kinds)
        least, most = np.empty(shape), np.empty(shape)
        chosen = np.empty(shape, dtype=np.int64)
        count, idles, logs = np.empty(shape), np.empty(shape), np.empty(shape)
        for kind, members in enumerate(self._members):
            part = waiting[:, members]
            first = part.argmin(axis=1)
            chosen[:, kind] = members[first]
            least[:, kind] = part[np.arange(self.size), first]
            most[:, kind] = finite[:, members].max(axis=1)
            count[:, kind] = self.up[:, members].sum(axis=1)
            idles[:, kind] = idle[:, members].sum(axis=1)
            logs[:, kind] = log_wait[:, members].sum(axis=1)
        hosted = self._hosted.astype(np.float64).T  # [K, M]
        peers = np.maximum(count @ hosted, 1.0)  # [B, M]
        present = count > 0  # [B, K]
        quality = world.quality[self.query]  # [B, M]
        seconds = world.seconds[self.query]  # [B, M, K]
        allowed = self._hosted[None] & present[:, None, :]
        fastest = np.where(allowed, seconds, np.inf).min(axis=2)
        best = np.where(self._hosted[None], quality[:, :, None], 0.0).max(axis=1)  # [B, K]
        m, k = self.pair_model, self.pair_kind
        mask = present[:, k]
        took = seconds[:, m, k]
        latest = np.where(mask, took + most[:, k], 0.0).max(axis=1)
        total = np.maximum(self.up.sum(axis=1), 1)
        return (
            Candidates(
                mask=mask,
                quality=quality[:, m],
                seconds=took,
                waiting=np.where(mask, least[:, k], 0.0),
                energy_joules=took * world.watts[k],
                cost_usd=took * world.usd_per_second[k],
                fastest_seconds=np.where(mask, fastest[:, m], took),
                node_best_quality=best[:, k],
                peers_idle=((idles @ hosted) / peers)[:, m],
                peers_waiting=((logs @ hosted) / peers)[:, m],
                fleet_idle=idle.sum(axis=1) / total,
                fleet_waiting=log_wait.sum(axis=1) / total,
                latest_seconds=latest,
                weights=self.weights,
            ),
            chosen[:, k],
        )

    def layout_observation(self) -> LayoutObservation:
        """What a factorised or flat policy sees; of what no node can serve it sees nothing."""
        layout = self.world.layout
        mask = layout.deployed[None] & self.up[:, None, :]
        present = np.stack([self.up[:, each].any(axis=1) for each in self._members], axis=1)
        servable = self._hosted[None] & present[:, None, :]  # [B, M, K]
        seconds = np.where(servable, self.world.seconds[self.query], 0.0)
        quality = np.where(servable.any(axis=2), self.world.quality[self.query], 0.0)
        penalty = None
        if (self.weights[:, 1:3] > 0.0).any():
            there = mask.reshape(self.size, -1)
            everywhere = np.where(mask, seconds[:, :, layout.kind_of_node], 0.0)
            usd = everywhere * self.world.usd_per_second[layout.kind_of_node]
            joules = everywhere * self.world.watts[layout.kind_of_node]
            fees = self.weights[:, 1:2] * scaled(usd.reshape(self.size, -1), there)
            fees = fees + self.weights[:, 2:3] * scaled(joules.reshape(self.size, -1), there)
            penalty = 1.1 * fees.reshape(mask.shape)
        return layout_observation(
            layout,
            quality,
            seconds,
            np.where(self.up, self.waits(), 0.0),
            mask,
            self.weights,
            penalty,
        )

    def step(self, model: IntArray, node: IntArray, reward: FloatArray) -> StepResult:
        """Send each simulation's query to a node, and let the next one arrive.

        Args:
            model, node: int64[B].
            reward: float64[B]; the one-step reward of the choice, from the observation.

        Raises:
            ValueError: a node lacks the model or is away.
        """
        each = np.arange(self.size)
        if not (self.world.layout.deployed[model, node] & self.up[each, node]).all():
            raise ValueError("a query was sent to a node that cannot take it")
        kind = self.world.layout.kind_of_node[node]
        predicted = self.world.seconds[self.query, model, kind]
        noise = self.world.noise
        real = predicted * np.exp(self._rng.normal(-0.5 * noise**2, noise, self.size))
        slot = self._actual[each, node].argmin(axis=1)
        free = self._actual[each, node, slot]
        start = np.maximum(self.now, free)
        known = np.where(
            free <= self.now, self.now, np.maximum(self._expected[each, node, slot], self.now)
        )
        self._actual[each, node, slot] = start + real
        self._expected[each, node, slot] = known + predicted
        correct = self.world.correct[self.query, model]
        waited = start - self.now
        self._arrive()
        return StepResult(np.asarray(reward), waited, real, correct)

    def state(self) -> dict[str, Any]:
        """Everything a checkpoint needs to go on exactly here."""
        return {
            "actual": self._actual.copy(),
            "expected": self._expected.copy(),
            "now": self.now.copy(),
            "rates": self.rates.copy(),
            "weights": self.weights.copy(),
            "up": self.up.copy(),
            "query": self.query.copy(),
            "rng": json.dumps(self._rng.bit_generator.state),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state()` of an environment made alike."""
        self._actual, self._expected = state["actual"].copy(), state["expected"].copy()
        self.now, self.rates = state["now"].copy(), state["rates"].copy()
        self.weights, self.up = state["weights"].copy(), state["up"].copy()
        self.query = state["query"].copy()
        self._rng.bit_generator.state = json.loads(state["rng"])
