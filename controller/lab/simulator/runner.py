"""One policy, one workload, one simulated cluster: what came of it."""

import heapq
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from controller.lab.simulator.cluster import NodeEvent
from controller.lab.simulator.engine import Cluster, Lost, SimulatedCompletion
from controller.lab.simulator.problems import ProblemSource
from controller.lab.simulator.scenario import Scenario
from controller.lab.simulator.workload import Workload
from controller.request_manager.lifecycle import may_start_again
from controller.routing.baselines.greedy_reward import (
    LATENCY_WEIGHT,
    QUALITY_WEIGHT,
    STEEPNESS,
    latency_penalty,
)
from controller.routing.policy import UNASSIGNED, Budget, RoutingPolicy
from controller.routing.problem import BoolArray, FloatArray, IntArray, RoutingProblem

DEFAULT_BUDGET: Final = Budget(seconds=None, max_evaluations=20_000)
"""By evaluations, so that a run is the same on every machine."""

MAX_ATTEMPTS: Final = 3
"""Dispatches of one request before it fails, as in the controller's settings."""

_REWARD_ROWS: Final = 4096


@dataclass(frozen=True, slots=True)
class Outage:
    """A node that goes down and may come back.

    Attributes:
        node: its index.
        down_at: seconds; when it stops.
        up_at: seconds; infinite if it stays away. With `down_at` 0 a node joins then.
        unnoticed_seconds: how long the controller goes on sending requests there: a lease that has
            to end. What was there is routed again only then.
    """

    node: int
    down_at: float
    up_at: float = math.inf
    unnoticed_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SimulatedWindow:
    """How long arrivals are gathered before a batch policy decides.

    Attributes:
        seconds: from the first arrival to the decision; 0 decides on each arrival by itself.
        most: a batch of so many is decided at once.
    """

    seconds: float = 0.0
    most: int = 30


@dataclass(frozen=True, slots=True, eq=False)
class QueryOutcome:
    """What happened to R requests; times in seconds of the simulation, NaN if never served.

    Attributes:
        destination: int64[R]; where each was sent last; `UNASSIGNED` if nowhere.
        arrived, started, finished: float64[R].
        reward: float64[R]; DRLM's, of the last decision, as seen when it was made.
        unloaded_reward: float64[R]; the same, but with latency scaled by what the nodes that were
            there would offer with nothing to do, a scale that no policy can stretch; beyond its end
            the penalty rises in a straight line.
        slowest_seconds: float64[R]; the greatest predicted wait and inference of any candidate of
            that decision, which `reward` scales by.
        correct: float64[R]; the score of the answer.
        failed: bool[R]; its node went away after the first token, or for the third time, as in
            the controller: it was not routed again.
        decision_seconds: float64[R]; of this machine's clock: its decision's time, shared evenly by
            the batch, without the building of the problem.
        decisions: how often the policy was asked.
        fallbacks: decisions that the policy left to another.
        requeued: times that a request was routed again, because its node went down.
        utilisation: float64[N]; until the last request ended.
        energy_joules, cost_usd: of all service, lost work included.
        wasted_joules: of lost work.
        idle_joules: what the nodes drew besides until the last request ended; 0 when the scenario
            does not say.
    """

    destination: IntArray
    arrived: FloatArray
    started: FloatArray
    finished: FloatArray
    reward: FloatArray
    unloaded_reward: FloatArray
    slowest_seconds: FloatArray
    correct: FloatArray
    failed: BoolArray
    decision_seconds: FloatArray
    decisions: int
    fallbacks: int
    requeued: int
    utilisation: FloatArray
    energy_joules: float
    cost_usd: float
    wasted_joules: float
    idle_joules: float

    @property
    def served(self) -> BoolArray:
        """bool[R]."""
        return np.asarray(np.isfinite(self.finished))

    @property
    def waiting_seconds(self) -> FloatArray:
        """From arrival to the start of service, gathering and lost tries included; float64[R]."""
        return np.asarray(self.started - self.arrived)

    @property
    def inference_seconds(self) -> FloatArray:
        """float64[R]."""
        return np.asarray(self.finished - self.started)

    @property
    def end_to_end_seconds(self) -> FloatArray:
        """float64[R]."""
        return np.asarray(self.finished - self.arrived)


def outages_of(events: Sequence[NodeEvent], unnoticed_seconds: float = 0.0) -> list[Outage]:
    """The outages that a scenario file's events describe: each failure until the node joins.

    A node whose first event is that it joins is away from the start.
    """
    found: list[Outage] = []
    down_at: dict[int, float] = {}
    seen: set[int] = set()
    for event in sorted(events, key=lambda each: each.at_seconds):
        if event.is_up and (event.node in down_at or event.node not in seen):
            since = down_at.pop(event.node, 0.0)
            # What is away from the start was never seen to be there.
            late = unnoticed_seconds if event.node in seen else 0.0
            found.append(Outage(event.node, since, event.at_seconds, late))
        elif not event.is_up:
            down_at.setdefault(event.node, event.at_seconds)
        seen.add(event.node)
    stay = [Outage(node, at, math.inf, unnoticed_seconds) for node, at in down_at.items()]
    return found + stay


def simulate(
    scenario: Scenario,
    workload: Workload,
    policy: RoutingPolicy,
    weights: FloatArray,
    seed: int = 0,
    window: SimulatedWindow | None = None,
    outages: Sequence[Outage] = (),
    budget: Budget = DEFAULT_BUDGET,
) -> QueryOutcome:
    """Send the workload through the cluster until every request that can be served is.

    The time a decision takes is measured, but passes outside the simulation: with a budget of
    evaluations alone, the same arguments give the same outcome but for `decision_seconds`.

    Args:
        weights: float64[4]; quality, cost, energy, time.
        seed: of the policy's randomness.
        window: None decides on each arrival by itself.

    Raises:
        ValueError: an outage names no node, or ends before it begins; the workload asks a query
            that is not there; the policy sent a request where it cannot go.
    """
    for outage in outages:
        if (
            not 0 <= outage.node < scenario.nodes
            or not 0.0 <= outage.down_at <= outage.up_at
            or not 0.0 <= outage.unnoticed_seconds < math.inf
        ):
            raise ValueError(
                f"{outage} does not fit {scenario.nodes} nodes or ends before it began"
            )
    if workload.query.min() < 0 or workload.query.max() >= scenario.queries:
        raise ValueError(f"the workload asks a query outside 0..{scenario.queries - 1}")
    run = _Run(scenario, workload, policy, weights, seed, window or SimulatedWindow(), budget)
    return run.to_the_end(outages)


# At one moment, nodes change before requests are routed.
_SILENT, _DOWN, _UP, _ARRIVAL, _CLOSE = range(5)


class _Run:
    def __init__(
        self,
        scenario: Scenario,
        workload: Workload,
        policy: RoutingPolicy,
        weights: FloatArray,
        seed: int,
        window: SimulatedWindow,
        budget: Budget,
    ) -> None:
        self.scenario, self.workload, self.policy = scenario, workload, policy
        self.rng, self.window, self.budget = np.random.default_rng(seed), window, budget
        self.cluster = Cluster(scenario.slots)
        self.source = ProblemSource(scenario, weights)
        size = workload.arrivals.size
        self.query_list = workload.query.tolist()
        spread = scenario.noise * workload.luck - 0.5 * scenario.noise**2
        self.luck = np.exp(spread).tolist()
        self.destination = np.full(size, UNASSIGNED, dtype=np.int64)
        self.started, self.finished = np.full(size, np.nan), np.full(size, np.nan)
        self.failed = np.zeros(size, dtype=np.bool_)
        self.attempts = np.zeros(size, dtype=np.int64)
        self.thought = np.zeros(size)
        # What the reward of each decision is worked out from afterwards, all at once.
        self.seen_waits = np.zeros((size, scenario.nodes))
        self.seen_fleet = np.zeros(size, dtype=np.int64)
        self.fleets = [self.cluster.up.copy()]
        self.timeline: list[tuple[float, int, int]] = []
        self.gathered: list[int] = []
        self.held: list[int] = []
        self.unserved = size
        self.batches = self.decisions = self.fallbacks = self.requeued = 0

    def to_the_end(self, outages: Sequence[Outage]) -> QueryOutcome:
        self.timeline = [
            (moment, _ARRIVAL, request)
            for request, moment in enumerate(self.workload.arrivals.tolist())
        ]
        for outage in outages:
            noticed = outage.down_at + outage.unnoticed_seconds
            self.timeline.append((outage.down_at, _SILENT, outage.node))
            self.timeline.append((min(noticed, outage.up_at), _DOWN, outage.node))
            if math.isfinite(outage.up_at):
                self.timeline.append((outage.up_at, _UP, outage.node))
        heapq.heapify(self.timeline)
        # Nodes that come or go after the last request has ended change nothing.
        while self.unserved:
            moment, kind, item = self.timeline[0] if self.timeline else (math.inf, _UP, 0)
            # An arrival is unserved, so time goes on to it, whatever ends on the way.
            if kind < _ARRIVAL:
                ending = self.cluster.next_completion()
                if ending <= moment and math.isfinite(ending):
                    self._record(self.cluster.advance(ending))
                    continue
                if not self.timeline:
                    break  # what is held has nowhere to go
            heapq.heappop(self.timeline)
            completed = self.cluster.advance(moment)
            if completed:
                self._record(completed)
            self._handle(kind, item)
        scenario, cluster = self.scenario, self.cluster
        idle = 0.0
        if scenario.idle_watts is not None:
            free = cluster.up_seconds() - cluster.busy_seconds / scenario.slots
            idle = float(np.maximum(free, 0.0) @ scenario.idle_watts)
        reward, unloaded, slowest = self._rewards()
        return QueryOutcome(
            destination=self.destination,
            arrived=self.workload.arrivals,
            started=self.started,
            finished=self.finished,
            reward=reward,
            unloaded_reward=unloaded,
            slowest_seconds=slowest,
            correct=self._correct(),
            failed=self.failed,
            decision_seconds=self.thought,
            decisions=self.decisions,
            fallbacks=self.fallbacks,
            requeued=self.requeued,
            utilisation=cluster.utilisation(),
            energy_joules=float(cluster.busy_seconds @ scenario.watts),
            cost_usd=float(cluster.busy_seconds @ scenario.usd_per_second),
            wasted_joules=float(cluster.wasted_seconds @ scenario.watts),
            idle_joules=idle,
        )

    def _record(self, completions: Sequence[SimulatedCompletion]) -> None:
        self.unserved -= len(completions)
        for completion in completions:
            self.started[completion.request] = completion.started
            self.finished[completion.request] = completion.finished

    def _handle(self, kind: int, item: int) -> None:
        if kind == _ARRIVAL:
            self._gather([item])
        elif kind == _CLOSE:
            if item == self.batches and self.gathered:
                self._close()
        elif kind == _SILENT:
            self.cluster.fall_silent(item)
        elif kind == _DOWN:
            lost = self.cluster.fail(item)
            self.fleets.append(self.cluster.up.copy())
            self._gather([each.request for each in lost if self._starts_again(each)])
        else:
            self.cluster.join(item)
            self.fleets.append(self.cluster.up.copy())
            waiting, self.held = self.held, []
            self._gather(waiting)

    def _starts_again(self, lost: Lost) -> bool:
        """Decide by the controller's own rule."""
        request = lost.request
        chosen = self.destination[request]
        first = self.scenario.first_token_ratio
        has_streamed = False
        if first is not None and lost.served_ratio > 0.0:
            kind = self.scenario.kind_of_node[self.scenario.node_of[chosen]]
            has_streamed = lost.served_ratio >= first[self.scenario.model_of[chosen], kind]
        if may_start_again(has_streamed, int(self.attempts[request]), MAX_ATTEMPTS):
            self.requeued += 1
            self.destination[request] = UNASSIGNED
            return True
        self.failed[request] = True
        self.unserved -= 1
        return False

    def _gather(self, requests: Sequence[int]) -> None:
        for request in requests:
            self.gathered.append(request)
            if self.window.seconds <= 0.0 or len(self.gathered) >= self.window.most:
                self._close()
            elif len(self.gathered) == 1:
                closing = self.cluster.now + self.window.seconds
                heapq.heappush(self.timeline, (closing, _CLOSE, self.batches))

    def _close(self) -> None:
        batch, self.gathered = self.gathered, []
        self.batches += 1
        queries = [self.query_list[request] for request in batch]
        problem = self.source.problem(queries, self.cluster.waits(), self.cluster.up)
        started = time.perf_counter()
        decision = self.policy.decide(problem, self.rng, self.budget)
        share = (time.perf_counter() - started) / len(batch)
        for request in batch:
            self.thought[request] += share
        self.decisions += 1
        self.fallbacks += bool(decision.fallback_reason)
        waits = problem.backlog_seconds
        for row, (request, chosen) in enumerate(
            zip(batch, decision.assignment.tolist(), strict=True)
        ):
            if chosen == UNASSIGNED:
                self.held.append(request)
                continue
            self.seen_waits[request] = waits
            self._send(problem, row, request, chosen)
            if row + 1 < len(batch):
                if row == 0:
                    waits = waits.copy()
                waits[problem.node_of[chosen]] += problem.work_seconds[row, chosen]

    def _send(self, problem: RoutingProblem, row: int, request: int, chosen: int) -> None:
        if not problem.feasible[row, chosen]:
            raise ValueError(f"{self.policy.name} sent a request to a node that is down")
        scenario, query = self.scenario, self.query_list[request]
        self.destination[request] = chosen
        self.seen_fleet[request] = len(self.fleets) - 1
        self.attempts[request] += 1
        self.cluster.send(
            request,
            int(scenario.node_of[chosen]),
            float(scenario.pair_seconds[query, chosen]),
            float(scenario.pair_true_seconds[query, chosen]) * self.luck[request],
        )

    def _correct(self) -> FloatArray:
        found = np.full(self.destination.size, np.nan)
        done = np.isfinite(self.finished)
        model = self.scenario.model_of[self.destination[done]]
        found[done] = self.scenario.correct[self.workload.query[done], model]
        return found

    def _rewards(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Of each request's last decision: reward, unloaded reward and slowest candidate."""
        found = np.full((3, self.destination.size), np.nan)
        for fleet, up in enumerate(self.fleets):
            sent = np.flatnonzero((self.destination != UNASSIGNED) & (self.seen_fleet == fleet))
            nodes = np.flatnonzero(up & self.scenario.has_models)
            for start in range(0, sent.size, _REWARD_ROWS):
                rows = sent[start : start + _REWARD_ROWS]
                found[:, rows] = self._rewards_of(rows, nodes)
        reward, unloaded, slowest = found
        return reward, unloaded, slowest

    def _rewards_of(
        self, requests: IntArray, nodes: IntArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """DRLM's reward, as `simulator.reward` has it, on both scales."""
        scenario, chosen = self.scenario, self.destination[requests]
        query = self.workload.query[requests]
        seen = self.seen_waits[requests]
        quality = scenario.pair_quality[query, chosen]
        latency = scenario.pair_seconds[query, chosen]
        latency = latency + seen[np.arange(requests.size), scenario.node_of[chosen]]
        # Waits are the nodes', so the extremes of each node's destinations do for all of them.
        low, high = scenario.node_quality_range
        worst, best = low[query][:, nodes].min(axis=1), high[query][:, nodes].max(axis=1)
        good = QUALITY_WEIGHT * _share(quality, worst, best)
        low, high = (times[query][:, nodes] for times in scenario.node_seconds_range)
        ahead = seen[:, nodes]
        slowest = (high + ahead).max(axis=1)
        late = _share(latency, (low + ahead).min(axis=1), slowest)
        unloaded = _share(latency, low.min(axis=1), high.max(axis=1))
        return (
            good - LATENCY_WEIGHT * latency_penalty(late),
            good - LATENCY_WEIGHT * _unbounded_penalty(unloaded),
            slowest,
        )


def _unbounded_penalty(share: FloatArray) -> FloatArray:
    """Phi up to 1, and beyond it on its tangent: the exponential itself soon overflows."""
    slope = STEEPNESS / -np.expm1(-STEEPNESS)
    beyond = np.maximum(share - 1.0, 0.0)
    return np.asarray(latency_penalty(np.minimum(share, 1.0)) + slope * beyond)


def _share(values: FloatArray, low: FloatArray, high: FloatArray) -> FloatArray:
    width = np.where(high > low, high - low, 1.0)
    return np.where(high > low, (values - low) / width, 0.0)
