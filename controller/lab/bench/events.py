"""Whether a flood of events is taken without loss, and without making batches wait."""

import asyncio
import dataclasses
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from controller.config import FleetSettings, RoutingSettings
from controller.domain.batch import BatchDecision, Candidate, Placement, Weights
from controller.domain.cluster import Calibration, NodeKind, PowerProfile, TokenPrice
from controller.domain.completion import Completion, FinishReason, Usage
from controller.domain.node_report import (
    Health,
    ModelPhase,
    NodeAttributes,
    NodeHello,
    ReportedModel,
)
from controller.domain.request import InferenceRequest, Sampling
from controller.domain.request_record import Account, RequestRecord, RequestState
from controller.fleet.links import NodeLinks
from controller.fleet.registry import Registry
from controller.fleet.state_keeper import StateKeeper
from controller.ids import BatchId, ModelName, NodeId, RequestId
from controller.profiler.events import (
    HealthReported,
    NodeConnected,
    RequestDispatched,
    RequestEnded,
    TokensStreamed,
)
from controller.profiler.request_monitor import Claim
from controller.profiler.state import ProfilerState
from controller.request_manager.decider import GIL_SWITCH_SECONDS, Decider
from controller.storage.base import ControllerStore
from controller.storage.sqlite import SqliteStore

NODES: Final = 44
BATCH: Final = 30
_ROUNDS: Final = 3
_TICK_SECONDS: Final = 0.02
_PAUSE_SECONDS: Final = 0.05
_TEACH_SECONDS: Final = 60.0
_MODEL: Final = ModelName("model-8b")
_EVENTS_OF_A_REQUEST: Final = 4

_TAUGHT_REQUESTS: Final = 20 * NODES
"""Finished before anything is measured: what completions teach takes time in every decision, and
must not be taken for a delay by those that come meanwhile."""


@dataclass(frozen=True, slots=True)
class EventRow:
    """One load on profiler and store.

    Attributes:
        wanted_per_second: events offered; 0 for none, None for as many as are taken.
        events: taken by the profiler; each fourth one ends a request, which is kept with its node.
        taken_per_second: while batches were decided.
        lost: finished requests that are not in the database afterwards.
        decide_milliseconds_p50, decide_milliseconds_p95: from snapshot to placements of a batch
            of 30 on 44 nodes with two models each, under a search budget of 10 ms.
        loop_delay_milliseconds_p95: how much later than asked the event loop woke up.
    """

    wanted_per_second: int | None
    events: int
    taken_per_second: float
    lost: int
    decide_milliseconds_p50: float
    decide_milliseconds_p95: float
    loop_delay_milliseconds_p95: float


def bench_events(
    seconds: float = 10.0, rates: tuple[int | None, ...] = (0, 1000, None)
) -> list[EventRow]:
    """Measure each rate in a few rounds, each with a database of its own.

    Args:
        seconds: of each rate, over all rounds.
        rates: events a second; None offers as many as are taken.
    """
    rounds: list[list[_Round]] = [[] for _ in rates]
    usual = sys.getswitchinterval()
    sys.setswitchinterval(GIL_SWITCH_SECONDS)  # as it is while serving
    try:
        for _ in range(_ROUNDS):  # in turn: what else the machine does falls on all of them
            for rate, done in zip(rates, rounds, strict=True):
                done.append(asyncio.run(_measure(rate, seconds / _ROUNDS)))
    finally:
        sys.setswitchinterval(usual)
    return [_row(rate, done, seconds) for rate, done in zip(rates, rounds, strict=True)]


def rows_as_json(rows: list[EventRow]) -> list[dict[str, Any]]:
    """Plain values."""
    return [asdict(row) for row in rows]


@dataclass(frozen=True, slots=True)
class _Round:
    events: int
    lost: int
    decide_milliseconds: list[float]
    late_milliseconds: list[float]


def _row(rate: int | None, rounds: list[_Round], seconds: float) -> EventRow:
    decide = [one for done in rounds for one in done.decide_milliseconds]
    late = [one for done in rounds for one in done.late_milliseconds]
    events = sum(done.events for done in rounds)
    return EventRow(
        rate,
        events,
        events / seconds,
        sum(done.lost for done in rounds),
        float(np.median(decide)),
        float(np.quantile(decide, 0.95)),
        float(np.quantile(late, 0.95)),
    )


async def _measure(rate: int | None, seconds: float) -> _Round:
    with tempfile.TemporaryDirectory(prefix="pointsman-bench-") as folder:
        store = SqliteStore(Path(folder))
        profiler = _fleet()
        decider = Decider(RoutingSettings(budget_seconds=0.01))
        await decider.warm_up()
        links = NodeLinks(Registry(FleetSettings().lease_seconds))
        flood = _Flood(profiler, store, StateKeeper(store, profiler, links))
        flood.teach()
        stop_at = time.monotonic() + seconds
        feeding = asyncio.create_task(flood.run(rate, stop_at))
        decide, late = [], []
        while time.monotonic() < stop_at:
            started = time.perf_counter()
            await decider.decide(_batch(), profiler.snapshot(time.monotonic()))
            decide.append(1e3 * (time.perf_counter() - started))
            started = time.perf_counter()
            await asyncio.sleep(_PAUSE_SECONDS)
            late.append(1e3 * (time.perf_counter() - started - _PAUSE_SECONDS))
        await feeding
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, store.flush, 120.0)
        kept = len(store.finished(flood.requests + 1))
        store.close(10.0)
    return _Round(flood.events - flood.taught_events, flood.requests - kept, decide, late)


class _Flood:
    """Requests that run through profiler and store as fast as they are wanted."""

    def __init__(
        self, profiler: ProfilerState, store: ControllerStore, keeper: StateKeeper
    ) -> None:
        self._profiler = profiler
        self._store = store
        self._keeper = keeper
        self.events = 0
        self.taught_events = 0
        self.requests = 0

    def teach(self) -> None:
        """Let every node finish some requests before anybody watches."""
        now = time.monotonic()
        for _ in range(_TAUGHT_REQUESTS):
            self._one(now)
        self._store.flush(_TEACH_SECONDS)
        self.taught_events = self.events

    async def run(self, rate: int | None, stop_at: float) -> None:
        started = time.monotonic()
        while (now := time.monotonic()) < stop_at:
            wanted = (
                self.taught_events + int((now - started) * rate)
                if rate is not None
                else self.events + 100
            )
            while self.events + _EVENTS_OF_A_REQUEST <= wanted:
                self._one(now)
            if rate is None:
                # As many as are taken: what the writer has not kept up with is waited for.
                await asyncio.sleep(0.0 if self._store.state.waiting < 2000 else _TICK_SECONDS)
            else:
                await asyncio.sleep(_TICK_SECONDS)

    def _one(self, now: float) -> None:
        node_id = NodeId(f"node-{self.requests % NODES}")
        request_id = RequestId(f"request-{self.requests}")
        usage = Usage(40, 60, 0.1, 0.2, 2.0, 20.0, "estimate")
        health = Health(now, 0.5, 1 << 30, 60.0, 8.0, "estimate", False, ())
        apply = self._profiler.apply
        apply(HealthReported(node_id, health), now)
        apply(RequestDispatched(node_id, request_id, Claim(_MODEL, 2.0, 60.0)), now)
        apply(TokensStreamed(node_id, request_id, 30), now)
        apply(RequestEnded(node_id, request_id, False, usage=usage), now)
        self._keeper.finished(_finished(request_id, node_id, usage))
        self.events += _EVENTS_OF_A_REQUEST
        self.requests += 1


def _finished(request_id: RequestId, node_id: NodeId, usage: Usage) -> RequestRecord:
    chosen = Candidate(node_id, _MODEL, 0.7, "prior", 0.0, 20.0, 2.0, 2.2, 0.01, 60.0, 2.3)
    batch = BatchId("batch")
    record = RequestRecord(
        InferenceRequest(request_id, "A prompt of some length that nobody keeps."),
        time.time(),
        0.0,
        RequestState.COMPLETED,
        BatchDecision(
            batch, "memetic", Weights(), "payoff", 0.3, 0.0, 20.0, 2.3, 0.4, 0.4, 0.01, BATCH
        ),
        Placement(request_id, chosen, (chosen,) * 8),
    )
    record.account = Account(
        request_id, batch, node_id, _MODEL, "memetic", Completion(FinishReason.STOP, usage),
        0.1, 0.3, 2.4, 2.3, 2.2, 0.0, 1,
    )  # fmt: skip
    return record


def _fleet() -> ProfilerState:
    profiler = ProfilerState(stale_seconds=3600.0)
    now = time.monotonic()
    small = ReportedModel(
        _MODEL, "family", 8.0, "Q4_K_M", "ab", ModelPhase.READY, "", 4096, 4,
        Calibration(200.0, 20.0, 60.0), TokenPrice(0.0, 0.0, 0.0), True, 4.0,
    )  # fmt: skip
    large = dataclasses.replace(small, name=ModelName("model-14b"), digest="cd")
    for number in range(NODES):
        hello = NodeHello(
            NodeId(f"node-{number}"),
            "start",
            NodeAttributes(
                NodeKind.EDGE, f"board {number % 5}", 4, 8 << 30, "Debian 12", "0", "1",
                PowerProfile(3.0, 10.0),
            ),
            (small, large),
        )  # fmt: skip
        profiler.apply(NodeConnected(hello, False), now)
        health = Health(1.0, 0.1, 1 << 30, 50.0, 5.0, "estimate", False, ())
        profiler.apply(HealthReported(hello.node_id, health), now)
    return profiler


def _batch() -> list[InferenceRequest]:
    return [
        InferenceRequest(RequestId(f"batch-{r}"), "Why is the sky blue? " * (1 + r % 9))
        if r % 2
        else InferenceRequest(
            RequestId(f"batch-{r}"), "Name a lighthouse.", sampling=Sampling(max_tokens=64)
        )
        for r in range(BATCH)
    ]
