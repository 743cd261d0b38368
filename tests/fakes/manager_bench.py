"""A request manager with a decider and nodes that do what the test says."""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import anyio

from controller.config import BatchingSettings, LimitSettings
from controller.domain.batch import BatchDecision, Candidate, Placement, Weights
from controller.domain.cluster import ClusterSnapshot
from controller.domain.completion import Completion, FinishReason, Usage
from controller.domain.request import Constraints, InferenceRequest
from controller.ids import BatchId, ModelName, NodeId, RequestId
from controller.profiler.events import NodeDisconnected
from controller.profiler.state import ProfilerState
from controller.request_manager.decider import Decider
from controller.request_manager.manager import InferEvent, RequestManager
from tests.fakes.reports import hello, join
from tests.fakes.waiting import PATIENCE_SECONDS, until

PI, VM = NodeId("pi"), NodeId("vm")
SMALL = ModelName("small")
AT_ONCE = BatchingSettings(window_seconds=0.0)
FOR_LONG = BatchingSettings(window_seconds=30.0)


class FirstAllowed:
    """Sends every request to the first node that is neither excluded nor away."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.may_decide = asyncio.Event()
        self.may_decide.set()
        self.failure: Exception | None = None

    async def decide(
        self,
        requests: Sequence[InferenceRequest],
        snapshot: ClusterSnapshot,
        excluded_nodes: Sequence[Collection[NodeId]] = (),
    ) -> tuple[BatchDecision, list[Placement]]:
        self.batches.append([request.request_id for request in requests])
        failure = self.failure
        await self.may_decide.wait()
        if failure is not None:
            raise failure
        here = [node.node_id for node in snapshot.nodes if node.refusal is None]
        placements = []
        for request, excluded in zip(requests, excluded_nodes, strict=True):
            allowed = [node for node in here if node not in excluded] or here
            chosen = candidate(allowed[0]) if allowed else None
            placements.append(Placement(request.request_id, chosen, ()))
        decision = BatchDecision(
            BatchId(f"batch-{len(self.batches)}"),
            "first-allowed",
            Weights(),
            "payoff",
            0.0,
            0.0,
            0.0,
            0.0,
            0.0,
            None,
            0.0,
            len(requests),
        )
        return decision, placements


def candidate(node_id: NodeId) -> Candidate:
    return Candidate(node_id, SMALL, 0.5, "prior", 0.0, 1.0, 2.0, 2.0, 0.01, 50.0, 2.0)


@dataclass
class Bench:
    """A manager, its profiler and what it sent."""

    manager: RequestManager
    profiler: ProfilerState
    decider: FirstAllowed
    work: list[tuple[NodeId, str, int]] = field(default_factory=list)
    cancelled: list[tuple[NodeId, str, int]] = field(default_factory=list)
    unreachable: set[NodeId] = field(default_factory=set)
    refused: list[tuple[NodeId, str, int]] = field(default_factory=list)
    send_failure: Exception | None = None

    def send_work(self, node_id: NodeId, request: InferenceRequest, attempt: int, *_: Any) -> bool:
        if self.send_failure is not None:
            raise self.send_failure
        if node_id in self.unreachable:
            self.refused.append((node_id, request.request_id, attempt))
            return False
        self.work.append((node_id, request.request_id, attempt))
        return True

    def send_cancel(self, node_id: NodeId, request_id: RequestId, attempt: int) -> None:
        self.cancelled.append((node_id, request_id, attempt))

    async def until_sent(self, count: int) -> None:
        await until(lambda: len(self.work) >= count)

    def lose(self, node_id: NodeId) -> None:
        self.profiler.apply(NodeDisconnected(node_id), asyncio.get_running_loop().time())
        self.manager.on_node_lost(node_id, "power cut")

    def end(self, reason: FinishReason = FinishReason.STOP, **completion: Any) -> None:
        """The node's last word on the latest order."""
        node_id, request_id, attempt = self.work[-1]
        self.manager.on_completion(
            node_id,
            RequestId(request_id),
            attempt,
            Completion(reason, Usage(3, 4), **completion),
        )

    def stream(self, text: str, tokens: int = 1) -> None:
        node_id, request_id, attempt = self.work[-1]
        self.manager.on_progress(node_id, RequestId(request_id), attempt, text, tokens)

    def counts(self) -> dict[str, tuple[int, int, int]]:
        """In flight, completed and failed, by node."""
        return {
            node_id: (len(record.requests), record.completed_requests, record.failed_requests)
            for node_id, record in self.profiler.nodes.items()
        }


@asynccontextmanager
async def bench(
    batching: BatchingSettings = AT_ONCE,
    limits: LimitSettings | None = None,
    nodes: Sequence[NodeId] = (PI, VM),
) -> AsyncIterator[Bench]:
    profiler = ProfilerState(1e6)
    for node_id in nodes:
        join(profiler, asyncio.get_running_loop().time(), hello(node_id))
    decider = FirstAllowed()
    manager = RequestManager(
        batching,
        limits or LimitSettings(),
        profiler,
        cast(Decider, decider),
        lambda *order: made.send_work(*order),
        lambda *order: made.send_cancel(*order),
    )
    made = Bench(manager, profiler, decider)
    running = asyncio.create_task(manager.run())
    try:
        yield made
        assert not running.done(), "the window's task must outlive everything"
    finally:
        running.cancel()
        await asyncio.wait([running])


def request(name: str = "r1", deadline_seconds: float | None = None) -> InferenceRequest:
    constraints = Constraints(deadline_seconds=deadline_seconds)
    return InferenceRequest(RequestId(name), "Hello", constraints=constraints)


async def answered(made: Bench, asked: InferenceRequest) -> list[InferEvent]:
    """Every event of one request."""
    with anyio.fail_after(PATIENCE_SECONDS), made.manager.admitted(asked) as events:
        return [event async for event in events]


def started(made: Bench, asked: InferenceRequest) -> "asyncio.Task[list[InferEvent]]":
    return asyncio.create_task(answered(made, asked))
