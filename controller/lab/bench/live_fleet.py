"""A described cluster as a live controller knows it, request by request.

Nodes connect, take requests, stream tokens and complete, so that the profiler's snapshots are those
of a fleet at work: claims, backlogs, and speeds and lengths that completions refine. What a node
does takes the time that was predicted.
"""

import heapq
from dataclasses import dataclass
from typing import Final

import numpy as np

from controller.domain.cluster import (
    Calibration,
    ClusterSnapshot,
    NodeKind,
    PowerProfile,
    TokenPrice,
)
from controller.domain.completion import Usage
from controller.domain.node_report import (
    Health,
    ModelPhase,
    NodeAttributes,
    NodeHello,
    ReportedModel,
)
from controller.domain.request import InferenceRequest
from controller.ids import ModelName, NodeId, RequestId
from controller.lab.simulator.cluster import ClusterDescription
from controller.profiler.events import (
    Dispatched,
    Ended,
    HealthReported,
    NodeConnected,
    TokensStreamed,
)
from controller.profiler.state import ProfilerState
from controller.routing.formulation import FormulatedBatch
from controller.routing.problem import FloatArray

_READING_RATIO: Final = 0.1
"""Of an answer's seconds, for its prompt (ours)."""

_NEVER: Final = 1e9
"""Seconds until silent nodes count as stale: they report their health once."""


def profiler_of(cluster: ClusterDescription) -> ProfilerState:
    """What a live controller knows when a described cluster has connected, idle.

    How fast a model decodes where is made up, and takes no part in what is timed.
    """
    profiler = ProfilerState(stale_seconds=_NEVER)
    of_node: list[list[ReportedModel]] = [[] for _ in cluster.node_names]
    groups = [cluster.groups[at] for at in cluster.group_of_node]
    for at, model in zip(*cluster.destinations, strict=True):
        placed, slots = cluster.models[model], groups[at].slots
        configuration = placed.configuration
        rate = 1e10 / placed.read_bytes * groups[at].speed_ratio
        of_node[at].append(
            ReportedModel(
                ModelName(configuration.name), configuration.family, configuration.billions,
                f"Q{configuration.quantisation_bits}_0", "", ModelPhase.READY, "", 4096,
                slots, Calibration(5.0 * rate, rate, slots * rate), TokenPrice(), True, 4.0,
            )
        )  # fmt: skip
    for name, group, models in zip(cluster.node_names, groups, of_node, strict=True):
        device = cluster.devices[group.device]
        attributes = NodeAttributes(
            NodeKind.EDGE, device.kind, device.cores, device.memory_bytes, "", "", "",
            PowerProfile(group.idle_watts, group.active_watts),
        )  # fmt: skip
        hello = NodeHello(NodeId(name), "start", attributes, tuple(models))
        profiler.apply(NodeConnected(hello, False), 0.0)
        idle = Health(1.0, 0.1, 1 << 30, None, None, "none", None, ())
        profiler.apply(HealthReported(hello.node_id, idle), 0.0)
    return profiler


def speed_ratios(cluster: ClusterDescription, snapshot: ClusterSnapshot) -> FloatArray:
    """float64[D]: how much faster each destination of the cluster's snapshot is than its class."""
    of_node = {
        name: cluster.groups[group].speed_ratio
        for name, group in zip(cluster.node_names, cluster.group_of_node, strict=True)
    }
    return np.array([of_node[destination.node_id] for destination in snapshot.destinations])


@dataclass(frozen=True, slots=True, order=True)
class _Served:
    """A request at a node; in the order of their ends."""

    ends: float
    request_id: RequestId
    node_id: NodeId
    starts: float
    prompt_tokens: int
    tokens: int

    @property
    def writes_from(self) -> float:
        return self.starts + _READING_RATIO * (self.ends - self.starts)

    def streamed_tokens(self, now: float) -> int:
        written = (now - self.writes_from) / (self.ends - self.writes_from)
        return int(self.tokens * min(max(written, 0.0), 1.0))

    def usage(self) -> Usage:
        return Usage(
            self.prompt_tokens,
            self.tokens,
            prefill_seconds=self.writes_from - self.starts,
            decode_seconds=self.ends - self.writes_from,
        )


class LiveFleet:
    """A cluster behind a profiler; nodes serve first come, first served in their slots.

    Args:
        cluster: the fleet, idle at 0 s.
    """

    def __init__(self, cluster: ClusterDescription) -> None:
        self._profiler = profiler_of(cluster)
        groups = (cluster.groups[at] for at in cluster.group_of_node)
        self._free_at = {
            NodeId(name): [0.0] * group.slots
            for name, group in zip(cluster.node_names, groups, strict=True)
        }
        self._served: list[_Served] = []
        self._streamed: dict[RequestId, int] = {}

    def advance(self, now: float) -> None:
        """Let time pass: what is written by then has been streamed, what ends has ended."""
        while self._served and self._served[0].ends <= now:
            done = heapq.heappop(self._served)
            self._stream(done, done.ends)
            ended = Ended(done.node_id, done.request_id, False, usage=done.usage())
            self._profiler.apply(ended, done.ends)
            del self._streamed[done.request_id]
        for one in self._served:
            self._stream(one, now)

    def _stream(self, one: _Served, now: float) -> None:
        more = one.streamed_tokens(now) - self._streamed[one.request_id]
        if more:
            self._streamed[one.request_id] += more
            self._profiler.apply(TokensStreamed(one.node_id, one.request_id, more), now)

    def snapshot(self, now: float) -> ClusterSnapshot:
        """What the profiler tells; after `advance`."""
        return self._profiler.snapshot(now)

    def send(
        self, batch: FormulatedBatch, request: InferenceRequest, column: int, now: float
    ) -> None:
        """Claim the only request of a batch for a destination, as the request manager does."""
        destination = batch.snapshot.destinations[column]
        node_id, problem = destination.node_id, batch.problem
        tokens, prompt = batch.output_tokens[0, column], batch.read_tokens[0, column]
        claim = Dispatched(
            node_id,
            request.request_id,
            destination.model,
            float(problem.work_seconds[0, column]),
            float(tokens),
            float(_READING_RATIO * problem.work_seconds[0, column]),
            float(prompt),
            request.sampling.max_tokens,
        )
        self._profiler.apply(claim, now)
        slots = self._free_at[node_id]
        starts = max(now, heapq.heappop(slots))
        ends = starts + float(problem.latency_seconds[0, column])
        heapq.heappush(slots, ends)
        served = _Served(
            ends, request.request_id, node_id, starts, max(1, round(prompt)), max(1, round(tokens))
        )
        heapq.heappush(self._served, served)
        self._streamed[request.request_id] = 0
