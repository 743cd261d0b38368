"""Nodes with slots that serve their queues first come, first served.

Each node is the engine of `controller.routing.engine_model.slots_alone`; nothing slows anything
here, so an end is known at the start, and one heap of ends steps the whole cluster.
"""

import heapq
import math
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np

from controller.routing.problem import FloatArray, IntArray

OVERDUE_SECONDS: Final = 1e-3
"""What is taken to be left of a request that runs longer than predicted."""

_MOST_COUNTED: Final = 32


@dataclass(frozen=True, slots=True)
class SimulatedCompletion:
    """A request that was served: seconds of the simulation's clock."""

    request: int
    node: int
    started: float
    finished: float


@dataclass(frozen=True, slots=True)
class Lost:
    """A request whose node went away.

    Attributes:
        request: as it was sent.
        served_ratio: share of its service that was done; 0 if it waited.
    """

    request: int
    served_ratio: float


@dataclass(slots=True, eq=False)
class _Job:
    request: int
    node: int
    predicted: float
    real: float
    started: float = math.nan
    is_lost: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ClusterState:
    """What a controller can know of N nodes at one moment, each array of length N.

    Attributes:
        is_up: bool[N]; whether the controller believes that it takes requests.
        busy_slots: int64[N].
        queue_length: int64[N]; requests that wait.
        remaining_seconds: float64[N]; predicted service of all that runs and waits there.
        wait_seconds: float64[N]; predicted, until another request could start.
        utilisation: float64[N]; share of its slot-seconds, while it was up, that were served.
    """

    is_up: np.ndarray
    busy_slots: IntArray
    queue_length: IntArray
    remaining_seconds: FloatArray
    wait_seconds: FloatArray
    utilisation: FloatArray


class Cluster:
    """N nodes at a moment of simulated time, which only ever goes forward.

    A node starts a request in the first slot that comes free, in the order in which requests were
    sent to it. Real times are known to the simulation alone; `waits` uses predicted ones.

    Args:
        slots: int64[N]; requests a node serves at once, at least 1.

    Attributes:
        now: seconds since the start.
        up: bool[N]; nodes that the controller takes to be there. Change it by `fail` and `join`.
        busy_seconds: float64[N]; slot-seconds that were served until now, by requests that ended.
        wasted_seconds: float64[N]; the part of them whose work was lost with the node.
    """

    def __init__(self, slots: IntArray) -> None:
        nodes = int(slots.size)
        self.now = 0.0
        self.up = np.ones(nodes, dtype=np.bool_)
        self.busy_seconds = np.zeros(nodes)
        self.wasted_seconds = np.zeros(nodes)
        self._slots: list[int] = [int(count) for count in slots]
        self._running: list[list[_Job]] = [[] for _ in range(nodes)]
        self._queue: list[deque[_Job]] = [deque() for _ in range(nodes)]
        self._silent: set[int] = set()
        self._ends: list[tuple[float, int, _Job]] = []
        self._sequence = 0
        self._up_since = np.zeros(nodes)
        self._up_seconds = np.zeros(nodes)
        # Of nodes with one slot, so that all their waits are found at once.
        self._queued_seconds = np.zeros(nodes)  # predicted, of what waits
        self._expected_end = np.full(nodes, -math.inf)  # predicted, of what runs
        self._is_full = np.zeros(nodes)  # 1.0 or 0.0
        self._wide = [node for node, count in enumerate(self._slots) if count > 1]

    @property
    def unfinished(self) -> int:
        """Requests that run or wait."""
        return sum(map(len, self._running)) + sum(map(len, self._queue))

    def next_completion(self) -> float:
        """When the next running request ends; infinite when none runs."""
        while self._ends and self._ends[0][2].is_lost:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else math.inf

    def advance(self, until: float) -> list[SimulatedCompletion]:
        """Let time pass up to and with `until`; what ended on the way, in order of time.

        Raises:
            ValueError: `until` has passed already, or is not finite.
        """
        if not self.now <= until < math.inf:
            raise ValueError(f"time goes forward by finite steps: it is {self.now}, not {until}")
        completed = []
        while self.next_completion() <= until:
            end, _, job = heapq.heappop(self._ends)
            node = job.node
            self.now = end
            self._running[node].remove(job)
            self.busy_seconds[node] += end - job.started
            completed.append(SimulatedCompletion(job.request, node, job.started, end))
            if self._queue[node]:
                self._start(self._dequeue(node))
            elif self._slots[node] == 1:
                self._expected_end[node], self._is_full[node] = -math.inf, 0.0
        self.now = until
        return completed

    def send(self, request: int, node: int, predicted: float, real: float) -> None:
        """Put a request at the end of a node's queue, now.

        Args:
            request: any number; it comes back with the completion.
            node: index of a node that is up, or silent.
            predicted, real: seconds of service, above 0.

        Raises:
            ValueError: the node is down.
        """
        if not self.up[node]:
            raise ValueError(f"node {node} is down and takes no request")
        job = _Job(request, node, predicted, real)
        if len(self._running[node]) < self._slots[node] and node not in self._silent:
            self._start(job)
        else:
            self._queue[node].append(job)
            self._queued_seconds[node] += predicted
            self._is_full[node] = 1.0

    def fall_silent(self, node: int) -> None:
        """Stop a node, now, without the controller knowing: it is sent requests until `fail`."""
        if not self.up[node] or node in self._silent:
            return
        self._silent.add(node)
        for job in self._running[node]:
            job.is_lost = True
            job.real = (self.now - job.started) / job.real  # from now on: the share that was done
            self.busy_seconds[node] += self.now - job.started
            self.wasted_seconds[node] += self.now - job.started
        self._up_seconds[node] += self.now - self._up_since[node]

    def fail(self, node: int) -> list[Lost]:
        """Take a node down, now; the requests that ran or waited there, oldest first."""
        if not self.up[node]:
            return []
        self.fall_silent(node)
        self._silent.discard(node)
        lost = [Lost(job.request, job.real) for job in self._running[node]]
        lost += [Lost(job.request, 0.0) for job in self._queue[node]]
        self._running[node].clear()
        self._queue[node].clear()
        self._queued_seconds[node] = self._is_full[node] = 0.0
        self._expected_end[node] = -math.inf
        self.up[node] = False
        return lost

    def join(self, node: int) -> None:
        """Bring a node that is down up, now, with nothing to do."""
        if not self.up[node]:
            self.up[node] = True
            self._up_since[node] = self.now

    def running(self) -> list[SimulatedCompletion]:
        """What runs now, with when it will end; of silent nodes nothing."""
        return [
            SimulatedCompletion(job.request, node, job.started, job.started + job.real)
            for node, jobs in enumerate(self._running)
            if node not in self._silent
            for job in jobs
        ]

    def waits(self) -> FloatArray:
        """Predicted seconds until each node can start another request, float64[N].

        Endings are seen when they happen, so a free slot is known to be free. At a node of several
        slots with a queue of more than 32, all predicted work over the number of slots.
        """
        found = np.maximum(self._expected_end - self.now, OVERDUE_SECONDS)
        found += self._queued_seconds
        found *= self._is_full
        for node in self._wide:
            found[node] = self._wait(node)
        return found

    def utilisation(self) -> FloatArray:
        """Share of the slot-seconds of each node, while it was up, that was served; float64[N]."""
        running = np.array([self._unended(node) for node in range(self.up.size)])
        there = self.up_seconds() * np.array(self._slots)
        served = self.busy_seconds + running
        return np.asarray(np.divide(served, there, out=np.zeros_like(there), where=there > 0.0))

    def up_seconds(self) -> FloatArray:
        """How long each node has been there, float64[N]."""
        counts = self.up.copy()
        counts[list(self._silent)] = False
        return self._up_seconds + np.where(counts, self.now - self._up_since, 0.0)

    def state(self) -> ClusterState:
        """All that a controller can know; slower than `waits` alone."""
        left = [
            sum(max(j.started + j.predicted - self.now, OVERDUE_SECONDS) for j in running)
            + sum(job.predicted for job in queue)
            for running, queue in zip(self._running, self._queue, strict=True)
        ]
        return ClusterState(
            is_up=self.up.copy(),
            busy_slots=np.array([len(jobs) for jobs in self._running], dtype=np.int64),
            queue_length=np.array([len(jobs) for jobs in self._queue], dtype=np.int64),
            remaining_seconds=np.array(left),
            wait_seconds=self.waits(),
            utilisation=self.utilisation(),
        )

    def _unended(self, node: int) -> float:
        if node in self._silent:
            return 0.0
        return sum(self.now - job.started for job in self._running[node])

    def _dequeue(self, node: int) -> _Job:
        job = self._queue[node].popleft()
        # An empty queue has exactly nothing, whatever rounding left.
        rest = self._queued_seconds[node] - job.predicted if self._queue[node] else 0.0
        self._queued_seconds[node] = rest
        return job

    def _start(self, job: _Job) -> None:
        node = job.node
        job.started = self.now
        self._running[node].append(job)
        if self._slots[node] == 1:
            self._expected_end[node] = self.now + job.predicted
            self._is_full[node] = 1.0
        self._sequence += 1  # equal ends come in the order of their starts
        heapq.heappush(self._ends, (self.now + job.real, self._sequence, job))

    def _wait(self, node: int) -> float:
        running, free = self._running[node], self._slots[node] - len(self._running[node])
        if free > len(self._queue[node]):
            return 0.0
        left = [max(job.started + job.predicted - self.now, OVERDUE_SECONDS) for job in running]
        left += [0.0] * free  # of a silent node, which starts nothing
        if len(self._queue[node]) > _MOST_COUNTED:
            return (sum(left) + float(self._queued_seconds[node])) / self._slots[node]
        heapq.heapify(left)
        for job in self._queue[node]:
            heapq.heapreplace(left, left[0] + job.predicted)
        return left[0]
