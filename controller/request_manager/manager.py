"""From admission to the last token: tells each request's life what happens, and does what follows.

`lifecycle.py` says what each event makes of a request; `gathering.py` when the waiting ones go. One
task (`run`) has batches decided and dispatches them; the next window gathers meanwhile.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import structlog
from typing_extensions import assert_never

from controller.config import BatchingSettings, LimitSettings
from controller.domain.batch import Candidate, DecisionTotals, Placement
from controller.domain.completion import Completion
from controller.domain.request import InferenceRequest
from controller.domain.request_record import (
    Account,
    RequestRecord,
    RequestRecords,
    RequestState,
)
from controller.errors import (
    DuplicateRequestError,
    GenerationFailedError,
    QueueFullError,
    RouterError,
    ShuttingDownError,
    SlowReaderError,
)
from controller.ids import ModelName, NodeId, RequestId
from controller.profiler import events as profiler_events
from controller.profiler.request_monitor import Claim
from controller.profiler.state import ProfilerState
from controller.request_manager import lifecycle
from controller.request_manager.accounts import account_of, log_line
from controller.request_manager.decider import Decider
from controller.request_manager.gathering import Gathering
from controller.request_manager.lifecycle import (
    AnswerFinished,
    Broke,
    Cancelled,
    Close,
    Completed,
    Decided,
    Dequeue,
    Effect,
    Ended,
    Ending,
    Event,
    Fail,
    Finish,
    GaveUp,
    Left,
    Life,
    LinkLost,
    Note,
    NotSent,
    Outcome,
    Progress,
    Push,
    Read,
    Release,
    RequestFailed,
    Requeue,
    SendCancel,
    SendResume,
    SendWork,
    State,
    TakeClaim,
    Touch,
    WindowClosed,
    dispatch_of,
    step,
)
from controller.request_manager.refusals import refusal_error
from controller.request_manager.stream import AnswerStream, Done, RoutedTo, Text
from controller.request_manager.window import CloseReason, FleetLoad
from controller.telemetry.metrics import Metrics, Summed

log = structlog.get_logger()

_DEADLINE_SHARE_FOR_WAITING: Final = 0.25
"""A request spends at most this share of its own deadline waiting for company."""

InferEvent = RoutedTo | Text | Account

_GRACE_SECONDS: Final = 0.0
"""How long a node whose link is lost may come back and go on: nodes cannot yet."""

OnSendWork = Callable[[NodeId, InferenceRequest, int, Placement, float], bool]
"""(node, request, attempt, placement, time limit) -> whether the order was queued."""

OnSendCancel = Callable[[NodeId, RequestId, int], None]

_SHOWN_AS: Final[Mapping[type[State], RequestState]] = {
    lifecycle.Waiting: RequestState.WAITING,
    lifecycle.Deciding: RequestState.WAITING,
    lifecycle.Dispatched: RequestState.DISPATCHED,
    lifecycle.Streaming: RequestState.STREAMING,
    lifecycle.Suspended: RequestState.SUSPENDED,
    lifecycle.Reattached: RequestState.REATTACHED,
}
"""What `explain` says of a request that runs; while it ends it is shown as it last was."""


_NOT_ROUTED: Final = RequestFailed(GenerationFailedError, "Routing failed inside the controller.")

_NOT_DISPATCHED: Final = RequestFailed(
    GenerationFailedError, "Dispatching failed inside the controller."
)

_STOPPING: Final = RequestFailed(ShuttingDownError, "The controller is stopping.")


@dataclass(slots=True, eq=False)
class _Running:
    """One admitted request: its life, and what follows from it."""

    life: Life
    record: RequestRecord
    stream: AnswerStream

    @property
    def request_id(self) -> RequestId:
        """Its name."""
        return self.record.request.request_id

    @property
    def start_by(self) -> float | None:
        """When its window must have closed, monotonic seconds; None when it has no deadline."""
        deadline = self.record.request.constraints.deadline_seconds
        if deadline is None:
            return None
        return self.record.admitted_at + _DEADLINE_SHARE_FOR_WAITING * deadline


class RequestManager:
    """Admits requests, gathers them into windows and sees each to its end.

    Args:
        profiler: the fleet's state; read for snapshots, told of claims and ends.
        decider: turns a batch and a snapshot into placements.
        send_work: gives an order to a node's link.
        send_cancel: tells a node to stop.
        on_finished: told of each answer that is complete.
        on_closed: told of each request that has ended, however it did.

    Attributes:
        decisions: batches so far, by the policy that decided them.
    """

    def __init__(
        self,
        batching: BatchingSettings,
        limits: LimitSettings,
        profiler: ProfilerState,
        decider: Decider,
        send_work: OnSendWork,
        send_cancel: OnSendCancel,
        on_finished: Callable[[RequestRecord], None] = lambda record: None,
        on_closed: Callable[[RequestRecord], None] = lambda record: None,
    ) -> None:
        self._batching = batching
        self._limits = limits
        self._profiler = profiler
        self._decider = decider
        self._send_work = send_work
        self._send_cancel = send_cancel
        self._on_finished = on_finished
        self._records = RequestRecords(limits.kept_records, on_closed)
        self._running: dict[RequestId, _Running] = {}
        self._waiting: Gathering[_Running] = Gathering(batching, self._fleet_load)
        self._is_draining = False
        self.decisions: dict[str, DecisionTotals] = {}

    @property
    def records(self) -> RequestRecords:
        """What is known of each request."""
        return self._records

    @property
    def waiting_requests(self) -> int:
        """Requests that no window has closed on yet."""
        return len(self._waiting)

    def register_metrics(self, metrics: Metrics) -> None:
        """Register the metrics of requests and batches."""
        metrics.gauge(
            "waiting_requests",
            "Requests waiting for their window to close.",
            lambda: self.waiting_requests,
        )
        metrics.gauge(
            "running_requests",
            "Requests that have not ended, the waiting ones included.",
            lambda: len(self._records.running),
        )
        metrics.counter(
            "ended_requests",
            "Requests that have ended, by outcome: completed, cancelled or failed.",
            lambda: {
                (state.value,): self._records.ended[state]
                for state in RequestState
                if state.is_final
            },
            ("outcome",),
        )
        metrics.summary(
            "decision_seconds",
            "Time from the closed window to the decision of its batch, by the policy that decided.",
            lambda: {
                (policy,): Summed(totals.batches, totals.seconds)
                for policy, totals in self.decisions.items()
            },
            ("policy",),
        )
        metrics.counter(
            "decided_requests",
            "Requests in decided batches, by the policy that decided.",
            lambda: {(policy,): totals.requests for policy, totals in self.decisions.items()},
            ("policy",),
        )

    # -- clients ----------------------------------------------------------------------------------

    @contextmanager
    def admitted(self, request: InferenceRequest) -> Iterator[AsyncIterator[InferEvent]]:
        """Admit a request for as long as the context lasts; leaving it early cancels the request.

        Yields:
            the events: RoutedTo, then Text as it comes, and at last one Account. Reading them
            raises RouterError when the answer will not come.

        Raises:
            RouterError: the request was not admitted.
        """
        running = self._admit(request)
        try:
            yield self._events(running)
        except RouterError as error:
            self._happened(running, GaveUp(RequestFailed(type(error), str(error))))
            raise
        finally:  # also when the client went away
            self._happened(running, Left())

    async def _events(self, running: _Running) -> AsyncIterator[InferEvent]:
        record = running.record
        deadline_at = record.admitted_at + self._limits.total_seconds
        while True:
            silence = (
                self._limits.total_seconds  # a waiting request is bounded by the window
                if record.closed_at is None
                else self._limits.first_token_seconds
                if record.first_token_at is None
                else self._limits.progress_seconds
            )
            event = await running.stream.next(deadline_at, silence)
            if not isinstance(event, Done):
                yield event
                continue
            self._happened(running, Read())
            if record.account is not None:
                yield record.account
            return

    def _admit(self, request: InferenceRequest) -> _Running:
        if self._is_draining:
            raise ShuttingDownError("The controller is stopping; try again in a moment.")
        if request.request_id in self._running:
            raise DuplicateRequestError(
                f"Request {request.request_id!r} is being answered; use another id."
            )
        if len(self._waiting) >= self._batching.max_waiting_requests:
            raise QueueFullError("Too many requests are waiting; try again later.")
        now = time.monotonic()
        record = RequestRecord(request, time.time(), now)
        self._records.add(record)
        running = _Running(
            lifecycle.admitted(now, self._batching.max_attempts, record.earlier_attempts),
            record,
            AnswerStream(self._limits.max_buffered_bytes),
        )
        self._running[request.request_id] = running
        self._waiting.add(running)
        return running

    # -- what happens to a request ----------------------------------------------------------------

    def _happened(self, running: _Running, event: Event) -> None:
        """Let an event move a request, and do what follows from it."""
        now = time.monotonic()
        before = running.life
        life, effects = step(before, event, now)
        running.life = life
        if life.story is not before.story:  # it has moved
            shown_as = _SHOWN_AS.get(type(life.state))
            if shown_as is not None:
                running.record.state = shown_as
            running.record.attempts = life.attempts
        for effect in effects:
            self._do(running, effect, now)

    def _do(self, running: _Running, effect: Effect, now: float) -> None:
        record, stream = running.record, running.stream
        request = record.request
        request_id = request.request_id
        match effect:
            case Push(node_id, text, tokens):
                if tokens:
                    streamed = profiler_events.TokensStreamed(node_id, request_id, tokens)
                    self._profiler.apply(streamed, now)
                if record.first_token_at is None:
                    record.first_token_at = now
                # Text that came without a token of its own has been shown all the same.
                record.tokens_sent += max(tokens, 1 if text else 0)
                stream.push(text, tokens)
                if stream.is_ended:
                    # The reader is so late that it may never ask again; the node must not go on.
                    slow = RequestFailed(SlowReaderError, "the client read too slowly")
                    self._happened(running, GaveUp(slow))
            case Touch():
                stream.touch()
            case Dequeue():
                self._waiting.remove(running)
            case Requeue(reason):
                log.warning("request.requeued", request_id=request_id, reason=reason)
                self._waiting.add(running)
            case Note(decision, placement, closed_at):
                record.decision, record.placement = decision, placement
                record.closed_at = closed_at
            case TakeClaim(chosen):
                claimed = profiler_events.RequestDispatched(
                    chosen.node_id, request_id, _claim(request, chosen)
                )
                self._profiler.apply(claimed, now)
            case SendWork(chosen, attempt):
                self._send(running, chosen, attempt, now)
            case SendCancel(node_id, attempt):
                self._send_cancel(node_id, request_id, attempt)
            case SendResume():
                raise AssertionError("No node has said yet that it is back with a request.")
            case Release(node_id, is_failure, is_cancelled, usage, was_cut):
                ended = profiler_events.RequestEnded(
                    node_id,
                    request_id,
                    is_failure=is_failure,
                    is_cancelled=is_cancelled,
                    usage=usage,
                    was_cut=was_cut,
                    session_id=request.session_id,
                )
                self._profiler.apply(ended, now)
                self._waiting.look_again()  # an idle fleet may let the open window close
            case Finish(completion):
                stream.finish(completion)
            case Fail(failure):
                stream.fail(failure.error(failure.message))
            case Close(outcome):
                self._close(running, outcome, now)
            case _:
                assert_never(effect)

    def _send(self, running: _Running, chosen: Candidate, attempt: int, now: float) -> None:
        record = running.record
        placement, decision = record.placement, record.decision
        assert placement is not None
        assert decision is not None
        remaining = record.admitted_at + self._limits.total_seconds - now
        if self._send_work(chosen.node_id, record.request, attempt, placement, remaining):
            running.stream.routed(
                RoutedTo(chosen.node_id, chosen.model, decision.batch_id, decision.policy)
            )
        else:
            self._happened(running, NotSent())

    def _close(self, running: _Running, outcome: Outcome, now: float) -> None:
        record, request_id = running.record, running.request_id
        del self._running[request_id]
        match outcome:
            case Completed(completion):
                chosen = record.placement.chosen if record.placement else None
                node = self._profiler.nodes.get(chosen.node_id) if chosen else None
                account = account_of(
                    record,
                    completion,
                    node.models if node else (),
                    node.hello.attributes if node else None,
                    now,
                )
                record.account = account
                self._records.close(request_id, RequestState.COMPLETED)
                self._on_finished(record)
                log.info("request.ended", **log_line(record, account))
            case Cancelled():
                self._closed(record, RequestState.CANCELLED, "the client went away")
            case RequestFailed(_, message):
                self._closed(record, RequestState.FAILED, message)

    def _closed(self, record: RequestRecord, state: RequestState, why: str) -> None:
        request_id = record.request.request_id
        self._records.close(request_id, state, why)
        log.info("request.ended", request_id=request_id, outcome=state.value, reason=why)

    # -- the window -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Gather, decide and dispatch windows until cancelled."""
        while True:
            await self._close_window(*await self._waiting.batch())

    def _fleet_load(self) -> FleetLoad:
        return FleetLoad(
            routable_destinations=self._profiler.routable_destinations(time.monotonic()),
            is_idle=self._profiler.inflight_requests() == 0,
        )

    async def _close_window(
        self, batch: Sequence[_Running], closed_at: float, reason: CloseReason
    ) -> None:
        for running in batch:
            self._happened(running, WindowClosed())
        requests = [running.record.request for running in batch]
        try:
            decision, placements = await self._decider.decide(
                requests,
                self._profiler.snapshot(
                    time.monotonic(), [request.session_id for request in requests]
                ),
                [running.life.excluded for running in batch],
            )
        except RouterError as error:
            for running in batch:
                self._happened(running, Broke(RequestFailed(type(error), str(error))))
            return
        except Exception:
            log.exception("batch.failed", requests=len(batch))
            for running in batch:
                self._happened(running, Broke(_NOT_ROUTED))
            return
        before = self.decisions.get(decision.policy, DecisionTotals())
        self.decisions[decision.policy] = before.plus(decision)
        log.info(
            "batch.routed",
            batch_id=decision.batch_id,
            requests=len(batch),
            policy=decision.policy,
            closed_because=reason.value,
            decide_seconds=round(decision.decision_seconds, 4),
            objective=round(decision.objective, 4),
            fallback=decision.fallback_reason or None,
        )
        for running, placement in zip(batch, placements, strict=True):
            refusal = None
            try:
                if placement.chosen is None:
                    request = running.record.request
                    refused = refusal_error(request, placement, self._served_models())
                    refusal = RequestFailed(type(refused), str(refused))
                self._happened(running, Decided(decision, placement, closed_at, refusal))
            except Exception:  # one bad request must not stop the window's task
                log.exception("request.dispatch_failed", request_id=placement.request_id)
                self._happened(running, Broke(_NOT_DISPATCHED))

    def _served_models(self) -> set[ModelName]:
        return {
            model.name
            for node in self._profiler.nodes.values()
            for model in node.models
            if node.is_routable(model)
        }

    # -- nodes ------------------------------------------------------------------------------------

    def on_progress(
        self, node_id: NodeId, request_id: RequestId, attempt: int, text: str, tokens: int
    ) -> None:
        """A node made progress; what belongs to an older attempt is ignored."""
        running = self._running.get(request_id)
        if running is not None:
            self._happened(running, Progress(node_id, attempt, text, tokens))

    def on_completion(
        self, node_id: NodeId, request_id: RequestId, attempt: int, completion: Completion
    ) -> bool:
        """A node's last word on a work order; True when the request ends by it."""
        running = self._running.get(request_id)
        if running is None:
            if not self._records.is_known(request_id):
                # Of a controller that ended before it was kept; its client has seen that end.
                log.warning(
                    "completion.unknown",
                    request_id=request_id,
                    node_id=node_id,
                    outcome=completion.reason.value,
                    completion_tokens=completion.usage.completion_tokens,
                    energy_joules=completion.usage.energy_joules,
                )
            return False
        was_over = isinstance(running.life.state, (Ending, Ended))
        self._happened(running, AnswerFinished(node_id, attempt, completion))
        return not was_over and isinstance(running.life.state, (Ending, Ended))

    def on_node_lost(self, node_id: NodeId, why: str) -> None:
        """A node's session ended; each of its requests moves or fails."""
        # With one destination left the open window has no choice to wait for.
        self._waiting.look_again()
        until = time.monotonic() + _GRACE_SECONDS
        for running in list(self._running.values()):
            dispatch = dispatch_of(running.life.state)
            if dispatch is not None and dispatch.node_id == node_id:
                self._happened(running, LinkLost(node_id, why, until))

    # -- shutdown ---------------------------------------------------------------------------------

    async def drain(self, seconds: float) -> None:
        """Refuse new requests and let running ones end, for at most this long."""
        self._is_draining = True
        deadline = time.monotonic() + seconds
        while self._records.running and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # only while stopping, so a poll will do
        for running in list(self._running.values()):
            self._happened(running, Broke(_STOPPING))


def _claim(request: InferenceRequest, chosen: Candidate) -> Claim:
    return Claim(
        chosen.model,
        chosen.work_seconds,
        chosen.predicted_output_tokens,
        chosen.prefill_seconds,
        chosen.predicted_prompt_tokens,
        request.sampling.max_tokens,
    )
