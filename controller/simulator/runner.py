"""One policy, one workload, one simulated cluster: what came of it."""

import heapq
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from controller.routing.baselines.greedy_reward import rewards
from controller.routing.policy import UNASSIGNED, Budget, RoutingPolicy
from controller.routing.problem import (
    BoolArray,
    FloatArray,
    IntArray,
    ProblemMetadata,
    RoutingProblem,
)
from controller.simulator.engine import Cluster, Completion
from controller.simulator.scenario import Scenario
from controller.simulator.workload import Workload

DEFAULT_BUDGET: Final = Budget(seconds=None, max_evaluations=20_000)
"""By evaluations, so that a run is the same on every machine."""


@dataclass(frozen=True, slots=True)
class Outage:
    """A node that goes down and may come back.

    Attributes:
        node: its index.
        down_at: seconds; what it had is routed again then, from the start.
        up_at: seconds; infinite if it stays away. With `down_at` 0 a node joins then.
    """

    node: int
    down_at: float
    up_at: float = math.inf


@dataclass(frozen=True, slots=True)
class Window:
    """How long arrivals are gathered before a batch policy decides.

    Attributes:
        seconds: from the first arrival to the decision; 0 decides on each arrival by itself.
        most: a batch of so many is decided at once.
    """

    seconds: float = 0.0
    most: int = 30


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What happened to R requests; times in seconds of the simulation, NaN if never served.

    Attributes:
        destination: int64[R]; where each was sent last; `UNASSIGNED` if nowhere.
        arrived, started, finished: float64[R].
        reward: float64[R]; DRLM's, of the last decision, as seen when it was made.
        correct: float64[R]; the score of the answer.
        decision_seconds: float64[R]; of this machine's clock: its decision's time, shared evenly by
            the batch, without the building of the problem.
        decisions: how often the policy was asked.
        fallbacks: decisions that the policy left to another.
        requeued: times that a request was routed again, because its node went down.
        utilisation: float64[N]; until the last request ended.
        energy_joules, cost_usd: of all service, lost work included.
        wasted_joules: of lost work.
    """

    destination: IntArray
    arrived: FloatArray
    started: FloatArray
    finished: FloatArray
    reward: FloatArray
    correct: FloatArray
    decision_seconds: FloatArray
    decisions: int
    fallbacks: int
    requeued: int
    utilisation: FloatArray
    energy_joules: float
    cost_usd: float
    wasted_joules: float

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


def simulate(
    scenario: Scenario,
    workload: Workload,
    policy: RoutingPolicy,
    weights: FloatArray,
    seed: int = 0,
    window: Window | None = None,
    outages: Sequence[Outage] = (),
    budget: Budget = DEFAULT_BUDGET,
) -> Outcome:
    """Send the workload through the cluster until every request that can be served is.

    The time a decision takes is measured, but passes outside the simulation: with a budget of
    evaluations alone, the same arguments give the same outcome but for `decision_seconds`.

    Args:
        weights: float64[4]; quality, cost, energy, time.
        seed: of the policy's randomness.
        window: None decides on each arrival by itself.

    Raises:
        ValueError: an outage names no node, or ends before it begins; the policy sent a request
            where it cannot go.
    """
    for outage in outages:
        if not 0 <= outage.node < scenario.nodes or not 0.0 <= outage.down_at <= outage.up_at:
            raise ValueError(
                f"{outage} does not fit {scenario.nodes} nodes or ends before it began"
            )
    run = _Run(scenario, workload, policy, weights, seed, window or Window(), budget)
    return run.to_the_end(outages)


# At one moment, nodes change before requests are routed.
_DOWN, _UP, _ARRIVAL, _CLOSE = range(4)


class _Run:
    def __init__(
        self,
        scenario: Scenario,
        workload: Workload,
        policy: RoutingPolicy,
        weights: FloatArray,
        seed: int,
        window: Window,
        budget: Budget,
    ) -> None:
        self.scenario, self.workload, self.policy = scenario, workload, policy
        self.weights, self.seed, self.window, self.budget = weights, seed, window, budget
        self.cluster = Cluster(scenario.slots)
        self.kind_of = scenario.kind_of_node[scenario.node_of]
        self.metadata = ProblemMetadata(
            model_of=scenario.model_of,
            slots=scenario.slots[scenario.node_of],
            parameters_billions=scenario.parameters_billions[scenario.model_of],
            node_key=scenario.node_keys,
            model_key=scenario.model_keys[scenario.model_of],
        )
        size = workload.arrivals.size
        self.destination = np.full(size, UNASSIGNED, dtype=np.int64)
        self.started, self.finished = np.full(size, np.nan), np.full(size, np.nan)
        self.reward, self.correct = np.full(size, np.nan), np.full(size, np.nan)
        self.thought = np.zeros(size)
        self.timeline: list[tuple[float, int, int]] = []
        self.gathered: list[int] = []
        self.held: list[int] = []
        self.unserved = size
        self.batches = self.decisions = self.fallbacks = self.requeued = 0

    def to_the_end(self, outages: Sequence[Outage]) -> Outcome:
        for request, moment in enumerate(self.workload.arrivals):
            heapq.heappush(self.timeline, (float(moment), _ARRIVAL, request))
        for outage in outages:
            heapq.heappush(self.timeline, (outage.down_at, _DOWN, outage.node))
            if math.isfinite(outage.up_at):
                heapq.heappush(self.timeline, (outage.up_at, _UP, outage.node))
        # Nodes that come or go after the last request has ended change nothing.
        while self.unserved:
            moment = self.timeline[0][0] if self.timeline else math.inf
            ending = self.cluster.next_completion()
            if ending <= moment and math.isfinite(ending):
                self._record(self.cluster.advance(ending))
            elif self.timeline:
                _, kind, item = heapq.heappop(self.timeline)
                self.cluster.advance(moment)
                self._handle(kind, item)
            else:
                break  # what is held has nowhere to go
        scenario, cluster = self.scenario, self.cluster
        return Outcome(
            destination=self.destination,
            arrived=self.workload.arrivals,
            started=self.started,
            finished=self.finished,
            reward=self.reward,
            correct=self.correct,
            decision_seconds=self.thought,
            decisions=self.decisions,
            fallbacks=self.fallbacks,
            requeued=self.requeued,
            utilisation=cluster.utilisation(),
            energy_joules=float(cluster.busy_seconds @ scenario.watts),
            cost_usd=float(cluster.busy_seconds @ scenario.usd_per_second),
            wasted_joules=float(cluster.wasted_seconds @ scenario.watts),
        )

    def _record(self, completions: Sequence[Completion]) -> None:
        self.unserved -= len(completions)
        for completion in completions:
            request = completion.request
            self.started[request] = completion.started
            self.finished[request] = completion.finished
            model = self.scenario.model_of[self.destination[request]]
            self.correct[request] = self.scenario.correct[self.workload.query[request], model]

    def _handle(self, kind: int, item: int) -> None:
        if kind == _ARRIVAL:
            self._gather([item])
        elif kind == _CLOSE:
            if item == self.batches and self.gathered:
                self._close()
        elif kind == _DOWN:
            lost = self.cluster.fail(item)
            self.requeued += len(lost)
            self.destination[lost] = UNASSIGNED
            self.reward[lost] = np.nan
            self._gather(lost)
        else:
            self.cluster.join(item)
            waiting, self.held = self.held, []
            self._gather(waiting)

    def _gather(self, requests: Sequence[int]) -> None:
        for request in requests:
            self.gathered.append(request)
            if self.window.seconds <= 0.0 or len(self.gathered) >= self.window.most:
                self._close()
            elif len(self.gathered) == 1:
                closing = self.cluster.now + self.window.seconds
                heapq.heappush(self.timeline, (closing, _CLOSE, self.batches))

    def _close(self) -> None:
        batch, self.gathered = np.array(self.gathered, dtype=np.int64), []
        self.batches += 1
        problem = self._problem(batch)
        rng = np.random.default_rng((self.seed, self.decisions))
        started = time.perf_counter()
        decision = self.policy.decide(problem, rng, self.budget)
        self.thought[batch] += (time.perf_counter() - started) / batch.size
        self.decisions += 1
        self.fallbacks += bool(decision.fallback_reason)
        backlog = problem.backlog_seconds.copy()
        for row, (request, chosen) in enumerate(zip(batch, decision.assignment, strict=True)):
            if chosen == UNASSIGNED:
                self.held.append(int(request))
            else:
                self._send(problem, row, int(request), int(chosen), backlog)

    def _send(
        self, problem: RoutingProblem, row: int, request: int, chosen: int, backlog: FloatArray
    ) -> None:
        if not problem.feasible[row, chosen]:
            raise ValueError(f"{self.policy.name} sent a request to a node that is down")
        node = int(problem.node_of[chosen])
        feasible = np.flatnonzero(problem.feasible[row])
        late = problem.latency_seconds[row, feasible] + backlog[problem.node_of[feasible]]
        gained = rewards(problem.quality[row, feasible], late)
        self.reward[request] = gained[np.searchsorted(feasible, chosen)]
        backlog[node] += problem.work_seconds[row, chosen]
        self.destination[request] = chosen
        predicted = float(problem.latency_seconds[row, chosen])
        noise = self.scenario.noise
        real = predicted * math.exp(noise * self.workload.luck[request] - 0.5 * noise**2)
        self.cluster.send(request, node, predicted, real)

    def _problem(self, batch: IntArray) -> RoutingProblem:
        scenario = self.scenario
        query = self.workload.query[batch][:, None]
        seconds = scenario.seconds[query, scenario.model_of, self.kind_of]
        node = scenario.node_of
        return RoutingProblem(
            quality=scenario.quality[query, scenario.model_of],
            cost_usd=seconds * scenario.usd_per_second[node],
            energy_joules=seconds * scenario.watts[node],
            # A node with all slots busy finishes `slots` requests in the time of one.
            work_seconds=seconds / scenario.slots[node],
            latency_seconds=seconds,
            network_seconds=np.zeros_like(seconds),
            node_of=node,
            backlog_seconds=self.cluster.waits(),
            feasible=np.broadcast_to(self.cluster.up[node], seconds.shape),
            weights=self.weights,
            metadata=self.metadata,
        )
