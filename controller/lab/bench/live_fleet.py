"""A described cluster as a live controller knows it, request by request.

Nodes connect, take requests, stream tokens and complete, so that the profiler's snapshots are those
of a fleet at work: claims, backlogs, and speeds and lengths that completions refine. What a node
does takes the time that was predicted.
"""

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
from controller.lab.simulator.engine import Cluster, SimulatedCompletion
from controller.profiler.events import (
    HealthReported,
    NodeConnected,
    RequestDispatched,
    RequestEnded,
    TokensStreamed,
)
from controller.profiler.request_monitor import Claim
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


@dataclass(slots=True)
class _SentRequest:
    """A request that was sent, and how many of its tokens have been streamed."""

    request_id: RequestId
    node_id: NodeId
    prompt_tokens: int
    tokens: int
    streamed: int = 0


class LiveFleet:
    """A cluster behind a profiler; nodes serve first come, first served in their slots.

    Args:
        cluster: the fleet, idle at 0 s.
    """

    def __init__(self, cluster: ClusterDescription) -> None:
        self._profiler = profiler_of(cluster)
        slots = [group.slots for group in cluster.groups]
        self._engine = Cluster(np.array(slots, dtype=np.int64)[cluster.group_of_node])
        self._node_at = {NodeId(name): at for at, name in enumerate(cluster.node_names)}
        self._sent: list[_SentRequest] = []

    def advance(self, now: float) -> None:
        """Let time pass: what is written by then has been streamed, what ends has ended."""
        for done in self._engine.advance(now):
            sent = self._sent[done.request]
            self._stream(done, done.finished)
            usage = Usage(
                sent.prompt_tokens,
                sent.tokens,
                prefill_seconds=_writes_from(done) - done.started,
                decode_seconds=done.finished - _writes_from(done),
            )
            ended = RequestEnded(sent.node_id, sent.request_id, False, usage=usage)
            self._profiler.apply(ended, done.finished)
        for one in self._engine.running():
            self._stream(one, now)

    def _stream(self, one: SimulatedCompletion, now: float) -> None:
        sent, begins = self._sent[one.request], _writes_from(one)
        written = min(max((now - begins) / (one.finished - begins), 0.0), 1.0)
        more = int(sent.tokens * written) - sent.streamed
        if more:
            sent.streamed += more
            self._profiler.apply(TokensStreamed(sent.node_id, sent.request_id, more), now)

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
        claim = Claim(
            destination.model,
            float(problem.work_seconds[0, column]),
            float(tokens),
            float(_READING_RATIO * problem.work_seconds[0, column]),
            float(prompt),
            request.sampling.max_tokens,
        )
        self._profiler.apply(RequestDispatched(node_id, request.request_id, claim), now)
        seconds = float(problem.latency_seconds[0, column])
        self._engine.send(len(self._sent), self._node_at[node_id], seconds, seconds)
        self._sent.append(
            _SentRequest(request.request_id, node_id, max(1, round(prompt)), max(1, round(tokens)))
        )


def _writes_from(one: SimulatedCompletion) -> float:
    """When the prompt of a request that was served, or is, had been read; seconds."""
    return one.started + _READING_RATIO * (one.finished - one.started)
