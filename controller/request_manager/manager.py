"""From admission to the last token: the queue, the window timer and every waiting client.

One task (`run`) owns the window: it gathers, closes, has the batch decided and dispatches it. The
next window gathers while the last is being decided.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Final

import structlog

from controller.config import BatchingSettings, LimitSettings
from controller.domain.batch import BatchDecision, DecisionTotals, Placement
from controller.domain.completion import Completion, FailureKind, FinishReason
from controller.domain.request import InferenceRequest
from controller.domain.request_record import (
    Account,
    RequestRecord,
    RequestRecords,
    RequestState,
)
from controller.errors import (
    ContextExceededError,
    DuplicateRequestError,
    GenerationFailedError,
    InvalidRequestError,
    NodeLostError,
    QueueFullError,
    RequestTimeoutError,
    RouterError,
    ShuttingDownError,
)
from controller.ids import ModelName, NodeId, RequestId
from controller.profiler.events import Dispatched, Ended, TokensStreamed
from controller.profiler.state import ProfilerState
from controller.request_manager.decider import Decider
from controller.request_manager.inflight import (
    Attempt,
    Fail,
    Finish,
    Outcome,
    Requeue,
    on_completion,
    on_node_lost,
)
from controller.request_manager.refusals import refusal_error
from controller.request_manager.stream import AnswerStream, Done, RoutedTo, Text
from controller.request_manager.window import FleetLoad, Window, WindowLimits, closes_at
from controller.telemetry.metrics import Metrics, Summed

log = structlog.get_logger()

_DEADLINE_SHARE_FOR_WAITING: Final = 0.25
"""A request spends at most this share of its own deadline waiting for company."""

InferEvent = RoutedTo | Text | Account

SendWork = Callable[[NodeId, InferenceRequest, int, Placement, float], bool]
"""(node, request, attempt, placement, time limit) -> whether the order was queued."""

SendCancel = Callable[[NodeId, RequestId, int], None]


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
        send_work: SendWork,
        send_cancel: SendCancel,
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
        self._streams: dict[RequestId, AnswerStream] = {}
        self._waiting: dict[RequestId, None] = {}
        self._window: Window | None = None
        self._changed = asyncio.Event()  # or something else that may close the window
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
        record, stream = self._admit(request)
        try:
            yield self._events(record, stream)
        except RouterError as error:
            self._abandon(record, RequestState.FAILED, str(error))
            raise
        finally:  # also when the client went away
            self._abandon(record, RequestState.CANCELLED, "the client went away")
            if self._streams.get(request.request_id) is stream:  # its id may be another's by now
                del self._streams[request.request_id]

    async def _events(
        self, record: RequestRecord, stream: AnswerStream
    ) -> AsyncIterator[InferEvent]:
        deadline_at = record.admitted_at + self._limits.total_seconds
        while True:
            silence = (
                self._limits.total_seconds  # a waiting request is bounded by the window
                if record.closed_at is None
                else self._limits.first_token_seconds
                if record.first_token_at is None
                else self._limits.progress_seconds
            )
            event = await stream.next(deadline_at, silence)
            if isinstance(event, Done):
                yield self._close_account(record, event.completion)
                return
            yield event

    def _admit(self, request: InferenceRequest) -> tuple[RequestRecord, AnswerStream]:
        if self._is_draining:
            raise ShuttingDownError("The controller is stopping; try again in a moment.")
        if request.request_id in self._records.running:
            raise DuplicateRequestError(
                f"Request {request.request_id!r} is being answered; use another id."
            )
        if len(self._waiting) >= self._batching.max_waiting_requests:
            raise QueueFullError("Too many requests are waiting; try again later.")
        now = time.monotonic()
        record = RequestRecord(request, time.time(), now)
        stream = AnswerStream(self._limits.max_buffered_bytes)
        self._records.add(record)
        self._streams[request.request_id] = stream
        self._enqueue(record)
        return record, stream

    def _enqueue(self, record: RequestRecord) -> None:
        now = time.monotonic()
        self._waiting[record.request.request_id] = None
        window = self._window or Window(now, now, 0)
        self._window = window.with_arrival(now, _start_by(record))
        self._changed.set()

    def _abandon(self, record: RequestRecord, state: RequestState, why: str) -> None:
        """Stop a request wherever it is; nothing happens when it has ended already."""
        request_id = record.request.request_id
        if self._records.running.get(request_id) is not record:
            return
        self._waiting.pop(request_id, None)
        node_id = _node_of(record)
        if record.state in (RequestState.DISPATCHED, RequestState.STREAMING) and node_id:
            self._send_cancel(node_id, request_id, record.attempt_number)
            self._profiler.apply(
                Ended(
                    node_id,
                    request_id,
                    is_failure=state is RequestState.FAILED,
                    is_cancelled=state is RequestState.CANCELLED,
                ),
                time.monotonic(),
            )
        self._records.close(request_id, state, why)
        log.info("request.ended", request_id=request_id, outcome=state.value, reason=why)

    def _close_account(self, record: RequestRecord, completion: Completion) -> Account:
        now = time.monotonic()
        placement, decision = record.placement, record.decision
        if placement is None or placement.chosen is None or decision is None:
            raise GenerationFailedError("A request ended that had never been routed.")
        chosen = placement.chosen
        closed_at = record.closed_at or now
        account = Account(
            request_id=record.request.request_id,
            batch_id=decision.batch_id,
            node_id=chosen.node_id,
            model=chosen.model,
            policy=decision.policy,
            completion=completion,
            window_seconds=closed_at + decision.decision_seconds - record.admitted_at,
            first_token_seconds=(record.first_token_at or now) - record.admitted_at,
            total_seconds=now - record.admitted_at,
            predicted_finish_seconds=chosen.finish_seconds or 0.0,
            measured_finish_seconds=now - closed_at,
            cost_usd=self._cost_usd(record, completion),
            attempts=record.attempts,
            query_class=placement.query_class,
        )
        record.account = account
        self._records.close(account.request_id, RequestState.COMPLETED)
        self._on_finished(record)
        log.info(
            "request.ended",
            request_id=account.request_id,
            batch_id=account.batch_id,
            node_id=account.node_id,
            model=account.model,
            outcome=completion.reason.value,
            window_seconds=round(account.window_seconds, 4),
            queue_seconds=round(completion.usage.queue_seconds, 4),
            prefill_seconds=round(completion.usage.prefill_seconds, 4),
            decode_seconds=round(completion.usage.decode_seconds, 4),
            predicted_finish_seconds=round(account.predicted_finish_seconds, 4),
            measured_finish_seconds=round(account.measured_finish_seconds, 4),
            predicted_prompt_tokens=round(chosen.predicted_prompt_tokens),
            predicted_completion_tokens=round(chosen.predicted_output_tokens),
            prompt_tokens=completion.usage.prompt_tokens,
            completion_tokens=completion.usage.completion_tokens,
            energy_joules=completion.usage.energy_joules,
        )
        return account

    def _cost_usd(self, record: RequestRecord, completion: Completion) -> float:
        chosen = record.placement.chosen if record.placement else None
        node = self._profiler.nodes.get(chosen.node_id) if chosen else None
        for model in node.models if node and chosen else ():
            if chosen and model.name == chosen.model:
                usage, price = completion.usage, model.price
                return (
                    usage.prompt_tokens * price.prompt_usd_per_token
                    + usage.completion_tokens * price.completion_usd_per_token
                    + price.request_usd
                )
        return 0.0

    # -- the window -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Gather, decide and dispatch windows until cancelled."""
        limits = WindowLimits(
            self._batching.window_seconds,
            self._batching.max_requests,
            self._batching.quiet_seconds,
        )
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._window is not None and self._waiting:
                moment, reason = closes_at(self._window, limits, self._fleet_load())
                delay = moment - time.monotonic()
                if delay > 0:
                    timer = asyncio.get_running_loop().call_later(delay, self._changed.set)
                    try:
                        await self._changed.wait()
                    finally:
                        timer.cancel()
                    self._changed.clear()
                    continue
                await self._close_window(reason.value)
            if not self._waiting:
                self._window = None

    def _fleet_load(self) -> FleetLoad:
        return FleetLoad(
            routable_destinations=self._profiler.routable_destinations(time.monotonic()),
            is_idle=self._profiler.inflight_requests() == 0,
        )

    async def _close_window(self, reason: str) -> None:
        batch_ids = list(self._waiting)[: self._batching.max_requests]
        for request_id in batch_ids:
            del self._waiting[request_id]
        now = time.monotonic()
        # What did not fit opens the next window, with the deadlines it came with.
        self._window = None
        for request_id in self._waiting:
            window = self._window or Window(now, now, 0)
            self._window = window.with_arrival(now, _start_by(self._records.running[request_id]))
        records = [self._records.running[request_id] for request_id in batch_ids]
        try:
            decision, placements = await self._decider.decide(
                [record.request for record in records],
                self._profiler.snapshot(
                    time.monotonic(), [record.request.session_id for record in records]
                ),
                [record.excluded_nodes for record in records],
            )
        except RouterError as error:
            for record in records:
                self._fail(record, error)
            return
        except Exception:
            log.exception("batch.failed", requests=len(records))
            for record in records:
                self._fail(record, GenerationFailedError("Routing failed inside the controller."))
            return
        before = self.decisions.get(decision.policy, DecisionTotals())
        self.decisions[decision.policy] = before.plus(decision)
        log.info(
            "batch.routed",
            batch_id=decision.batch_id,
            requests=len(records),
            policy=decision.policy,
            closed_because=reason,
            decide_seconds=round(decision.decision_seconds, 4),
            objective=round(decision.objective, 4),
            fallback=decision.fallback_reason or None,
        )
        for record, placement in zip(records, placements, strict=True):
            try:
                self._dispatch(record, decision, placement, now)
            except Exception:  # one bad request must not stop the window's task
                log.exception("request.dispatch_failed", request_id=record.request.request_id)
                self._fail(
                    record, GenerationFailedError("Dispatching failed inside the controller.")
                )

    def _served_models(self) -> set[ModelName]:
        return {
            model.name
            for node in self._profiler.nodes.values()
            for model in node.models
            if node.is_routable(model)
        }

    def _dispatch(
        self, record: RequestRecord, decision: BatchDecision, placement: Placement, closed_at: float
    ) -> None:
        request = record.request
        if self._records.running.get(request.request_id) is not record:
            return  # cancelled while the batch was decided
        record.decision, record.placement = decision, placement
        record.closed_at = closed_at
        chosen = placement.chosen
        if chosen is None:
            self._fail(record, refusal_error(request, placement, self._served_models()))
            return
        record.attempts += 1
        now = time.monotonic()
        remaining = record.admitted_at + self._limits.total_seconds - now
        # The claim comes first, so that the next snapshot already counts it (case R4).
        self._profiler.apply(
            Dispatched(
                chosen.node_id,
                request.request_id,
                chosen.model,
                chosen.work_seconds,
                chosen.predicted_output_tokens,
                chosen.prefill_seconds,
                chosen.predicted_prompt_tokens,
                request.sampling.max_tokens,
            ),
            now,
        )
        record.state = RequestState.DISPATCHED
        stream = self._streams[request.request_id]
        if self._send_work(chosen.node_id, request, record.attempt_number, placement, remaining):
            stream.routed(
                RoutedTo(chosen.node_id, chosen.model, decision.batch_id, decision.policy)
            )
            return
        # The node went between the snapshot and the claim (case R20): only this one is re-planned.
        self._profiler.apply(Ended(chosen.node_id, request.request_id, True), now)
        self._settle(
            record,
            on_node_lost(
                Attempt(record.attempts, 0),
                "the node went away before it got the request",
                self._batching.max_attempts,
            ),
            is_node_lost=True,
        )

    # -- nodes ------------------------------------------------------------------------------------

    def on_progress(
        self, node_id: NodeId, request_id: RequestId, attempt: int, text: str, tokens: int
    ) -> None:
        """A node made progress; what belongs to an older attempt is ignored."""
        record = self._current(node_id, request_id, attempt)
        if record is None:
            return
        now = time.monotonic()
        if tokens:
            self._profiler.apply(TokensStreamed(node_id, request_id, tokens), now)
        stream = self._streams[request_id]
        if not text and not tokens:
            stream.touch()
            return
        if record.first_token_at is None:
            record.first_token_at = now
        record.state = RequestState.STREAMING
        # Text that came without a token of its own has been shown all the same.
        record.tokens_sent += max(tokens, 1 if text else 0)
        stream.push(text, tokens)
        if stream.is_ended:
            # The reader is so late that it may never ask again; the node must not go on for it.
            self._abandon(record, RequestState.FAILED, "the client read too slowly")

    def on_completion(
        self, node_id: NodeId, request_id: RequestId, attempt: int, completion: Completion
    ) -> bool:
        """A node's last word on a work order; True when the request ends by it."""
        record = self._current(node_id, request_id, attempt)
        if record is None:
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
        reason = completion.reason
        is_whole = reason in (FinishReason.STOP, FinishReason.LENGTH)
        self._profiler.apply(
            Ended(
                node_id,
                request_id,
                is_failure=reason is FinishReason.FAILED,
                is_cancelled=reason is FinishReason.CANCELLED,
                usage=completion.usage if is_whole else None,
                was_cut=reason is FinishReason.LENGTH,
                session_id=record.request.session_id,
            ),
            time.monotonic(),
        )
        self._changed.set()  # an idle fleet may let the open window close
        outcome = on_completion(
            Attempt(record.attempts, record.tokens_sent), completion, self._batching.max_attempts
        )
        self._settle(record, outcome)
        return not isinstance(outcome, Requeue)

    def on_node_lost(self, node_id: NodeId, why: str) -> None:
        """A node's session ended; each of its requests moves or fails."""
        self._changed.set()  # with one destination left the open window has no choice to wait for
        for record in list(self._records.running.values()):
            if self._is_at(node_id, record):
                outcome = on_node_lost(
                    Attempt(record.attempts, record.tokens_sent),
                    f"node {node_id} was lost: {why}",
                    self._batching.max_attempts,
                )
                self._settle(record, outcome, is_node_lost=True)

    def _current(
        self, node_id: NodeId, request_id: RequestId, attempt: int
    ) -> RequestRecord | None:
        record = self._records.running.get(request_id)
        if record is None or record.attempt_number != attempt:
            return None
        return record if self._is_at(node_id, record) else None

    def _is_at(self, node_id: NodeId, record: RequestRecord) -> bool:
        """Whether this running request's end is still up to this node.

        Once the last event is in, it is the client's, who may take its time to read it.
        """
        is_sent = record.state in (RequestState.DISPATCHED, RequestState.STREAMING)
        return (
            is_sent
            and _node_of(record) == node_id
            and not self._streams[record.request.request_id].is_ended
        )

    def _settle(self, record: RequestRecord, outcome: Outcome, is_node_lost: bool = False) -> None:
        match outcome:
            case Finish(completion):
                self._streams[record.request.request_id].finish(completion)
            case Requeue(reason):
                node_id = _node_of(record)
                if node_id:
                    record.excluded_nodes.add(node_id)
                record.state = RequestState.WAITING
                record.first_token_at = None
                log.warning("request.requeued", request_id=record.request.request_id, reason=reason)
                self._enqueue(record)
            case Fail(kind, message):
                self._fail(record, _error_of(kind, message, is_node_lost))

    def _fail(self, record: RequestRecord, error: RouterError) -> None:
        request_id = record.request.request_id
        if self._records.running.get(request_id) is record:  # its id may be another's by now
            self._streams[request_id].fail(error)

    # -- shutdown ---------------------------------------------------------------------------------

    async def drain(self, seconds: float) -> None:
        """Refuse new requests and let running ones end, for at most this long."""
        self._is_draining = True
        deadline = time.monotonic() + seconds
        while self._records.running and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # only while stopping, so a poll will do
        for record in list(self._records.running.values()):
            self._fail(record, ShuttingDownError("The controller is stopping."))


def _start_by(record: RequestRecord) -> float | None:
    """When the window must have closed for this request, monotonic seconds."""
    deadline = record.request.constraints.deadline_seconds
    if deadline is None:
        return None
    return record.admitted_at + _DEADLINE_SHARE_FOR_WAITING * deadline


def _node_of(record: RequestRecord) -> NodeId | None:
    chosen = record.placement.chosen if record.placement else None
    return chosen.node_id if chosen else None


def _error_of(kind: FailureKind, message: str, is_node_lost: bool) -> RouterError:
    if is_node_lost:
        return NodeLostError(message)
    if kind is FailureKind.INVALID_REQUEST:
        return InvalidRequestError(message)
    if kind is FailureKind.CONTEXT_EXCEEDED:
        return ContextExceededError(message)
    if kind is FailureKind.TIME_LIMIT:
        return RequestTimeoutError(message)
    return GenerationFailedError(message)
