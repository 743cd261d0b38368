"""Nodes with slots that serve their queues first come, first served."""

import heapq
import math
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np

from controller.routing.problem import FloatArray, IntArray

OVERDUE_SECONDS: Final = 1e-3
"""What is taken to be left of a request that runs longer than predicted."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A request that was served: seconds of the simulation's clock."""

    request: int
    node: int
    started: float
    finished: float


@dataclass(slots=True, eq=False)
class _Job:
    request: int
    node: int
    predicted: float
    real: float
    started: float = math.nan
    is_lost: bool = False


class Cluster:
    """N nodes at a moment of simulated time, which only ever goes forward.

    A node starts a request in the first slot that comes free, in the order in which requests were
    sent to it. Real times are known to the simulation alone; `waits` uses predicted ones.

    Args:
        slots: int64[N]; requests a node serves at once, at least 1.

    Attributes:
        now: seconds since the start.
        up: bool[N]; nodes that take requests. Change it by `fail` and `join` alone.
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
        self._queued_seconds = [0.0] * nodes  # predicted, of what waits
        self._occupied: set[int] = set()
        self._ends: list[tuple[float, int, _Job]] = []
        self._sequence = 0
        self._up_since = np.zeros(nodes)
        self._up_seconds = np.zeros(nodes)

    @property
    def unfinished(self) -> int:
        """Requests that run or wait."""
        return sum(len(self._running[n]) + len(self._queue[n]) for n in self._occupied)

    def next_completion(self) -> float:
        """When the next running request ends; infinite when none runs."""
        while self._ends and self._ends[0][2].is_lost:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else math.inf

    def advance(self, until: float) -> list[Completion]:
        """Let time pass up to and with `until`; what ended on the way, in order of time.

        Raises:
            ValueError: `until` has passed already, or is not finite.
        """
        if not self.now <= until < math.inf:
            raise ValueError(f"time goes forward by finite steps: it is {self.now}, not {until}")
        completed = []
        while self.next_completion() <= until:
            end, _, job = heapq.heappop(self._ends)
            self.now = end
            self._running[job.node].remove(job)
            self.busy_seconds[job.node] += end - job.started
            completed.append(Completion(job.request, job.node, job.started, end))
            if self._queue[job.node]:
                self._start(self._dequeue(job.node))
            elif not self._running[job.node]:
                self._occupied.discard(job.node)
        self.now = until
        return completed

    def send(self, request: int, node: int, predicted: float, real: float) -> None:
        """Put a request at the end of a node's queue, now.

        Args:
            request: any number; it comes back with the completion.
            node: index of a node that is up.
            predicted, real: seconds of service, above 0.

        Raises:
            ValueError: the node is down.
        """
        if not self.up[node]:
            raise ValueError(f"node {node} is down and takes no request")
        job = _Job(request, node, predicted, real)
        self._occupied.add(node)
        if len(self._running[node]) < self._slots[node]:
            self._start(job)
        else:
            self._queue[node].append(job)
            self._queued_seconds[node] += predicted

    def fail(self, node: int) -> list[int]:
        """Take a node down, now; the requests that ran or waited there, oldest first."""
        if not self.up[node]:
            return []
        lost = [*self._running[node], *self._queue[node]]
        for job in self._running[node]:
            job.is_lost = True
            self.busy_seconds[node] += self.now - job.started
            self.wasted_seconds[node] += self.now - job.started
        self._running[node].clear()
        self._queue[node].clear()
        self._queued_seconds[node] = 0.0
        self._occupied.discard(node)
        self.up[node] = False
        self._up_seconds[node] += self.now - self._up_since[node]
        return [job.request for job in lost]

    def join(self, node: int) -> None:
        """Bring a node up, now, with nothing to do."""
        if not self.up[node]:
            self.up[node] = True
            self._up_since[node] = self.now

    def waits(self) -> FloatArray:
        """Predicted seconds until each node can start another request, float64[N].

        Endings are seen when they happen, so a free slot is known to be free.
        """
        found = np.zeros(self.up.size)
        for node in self._occupied:
            found[node] = self._wait(node)
        return found

    def utilisation(self) -> FloatArray:
        """Share of the slot-seconds of each node, while it was up, that was served; float64[N]."""
        running = np.array([sum(self.now - j.started for j in jobs) for jobs in self._running])
        up = self._up_seconds + np.where(self.up, self.now - self._up_since, 0.0)
        there = up * np.array(self._slots)
        served = self.busy_seconds + running
        return np.asarray(np.divide(served, there, out=np.zeros_like(there), where=there > 0.0))

    def _dequeue(self, node: int) -> _Job:
        job = self._queue[node].popleft()
        # An empty queue has exactly nothing, whatever rounding left.
        rest = self._queued_seconds[node] - job.predicted if self._queue[node] else 0.0
        self._queued_seconds[node] = rest
        return job

    def _start(self, job: _Job) -> None:
        job.started = self.now
        self._running[job.node].append(job)
        self._sequence += 1  # equal ends come in the order of their starts
        heapq.heappush(self._ends, (self.now + job.real, self._sequence, job))

    def _wait(self, node: int) -> float:
        running = self._running[node]
        if len(running) < self._slots[node]:
            return 0.0
        left = [max(j.started + j.predicted - self.now, OVERDUE_SECONDS) for j in running]
        if len(left) == 1:
            return left[0] + self._queued_seconds[node]
        heapq.heapify(left)
        for job in self._queue[node]:
            heapq.heapreplace(left, left[0] + job.predicted)
        return left[0]
