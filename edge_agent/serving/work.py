"""Work orders from the link: admission, token stream, cancellation, drain."""

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, fields, replace
from typing import Final, Protocol

import structlog

from edge_agent.engine.base import (
    Finished,
    GenerationRequest,
    InferenceEngine,
    Message,
    PromptProgress,
    RejectedError,
    RejectionKind,
    ResponseFormat,
    Sampling,
    SlowReaderError,
    StopReason,
    TextChunk,
)
from edge_agent.errors import EngineError, ModelError
from edge_agent.sensors.base import ESTIMATE
from edge_agent.sensors.energy import Charge, Work
from edge_agent.sensors.power_model import PowerModel
from edge_agent.serving.completion import Completion, FailureKind, FinishReason, Usage
from edge_agent.serving.hosted import HostedModel

log = structlog.get_logger()

_KNOWN_ORDERS: Final = 4096
"""Orders remembered after their end, so that a repeat is not worked on twice."""

_CANCEL_SECONDS: Final = 2.0
"""How long an engine may take to end a cancelled answer."""

_REJECTIONS: Final = {
    RejectionKind.CONTEXT_EXCEEDED: FailureKind.CONTEXT_EXCEEDED,
    RejectionKind.INVALID_REQUEST: FailureKind.INVALID_REQUEST,
    RejectionKind.QUEUE_FULL: FailureKind.QUEUE_FULL,
    RejectionKind.NO_CHAT_TEMPLATE: FailureKind.INVALID_REQUEST,
}

_OUTCOMES: Final = {
    StopReason.STOP: FinishReason.STOP,
    StopReason.LENGTH: FinishReason.LENGTH,
    StopReason.CANCELLED: FinishReason.CANCELLED,
}


_COUNTED: Final = tuple(
    field.name for field in fields(Usage) if field.name in {own.name for own in fields(Finished)}
)
"""What an engine counts, it says by the name that the controller knows."""


@dataclass(frozen=True, slots=True)
class WorkOrder:
    """One request for this node; `prompt` is raw text or a chat.

    `response_format` and `session_id` mean what they do in `GenerationRequest`.
    """

    request_id: str
    attempt: int
    model: str
    prompt: str | tuple[Message, ...]
    sampling: Sampling
    time_limit_seconds: float
    response_format: ResponseFormat | None = None
    session_id: str = ""


class WorkListener(Protocol):
    """Who is told about work; none of these waits."""

    def progressed(self, request_id: str, attempt: int, text: str, tokens: int) -> None:
        """Tokens came; empty text and 0 tokens mean that the prompt is being read."""
        ...

    def completed(self, completion: Completion) -> None:
        """An order ended; called exactly once for each."""
        ...


class Meter(Protocol):
    """Who measures this node's energy; none of these waits."""

    def engines_busy(self, requests: Mapping[str, int]) -> None:
        """From now on these engines have this many requests each."""
        ...

    def charge(self, engine: str, work: Work) -> Charge | None:
        """The energy of a request that has just ended; None when it is not known."""
        ...


class WorkDesk:
    """All work orders of this node. Belongs to the event loop.

    Args:
        models: by name; looked at when an order comes.
        listener: told of progress and ends.
        power: for the energy estimate of answers that the meter knows nothing of.
        meter: measures what each answer took; None leaves everything to the estimate.
        remote_power: of the machine behind a remote engine; None when nobody has said it.
        bring: loads an unloaded model because it was asked for; None leaves it unloaded.
    """

    def __init__(
        self,
        models: Callable[[str], HostedModel | None],
        listener: WorkListener,
        power: PowerModel | None,
        meter: Meter | None = None,
        remote_power: PowerModel | None = None,
        bring: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._models = models
        self._listener = listener
        self._power = power
        self._meter = meter
        self._remote_power = remote_power
        self._bring = bring
        self._metered: dict[tuple[str, int], str] = {}
        self._running: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._known: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._engines: dict[tuple[str, int], InferenceEngine] = {}
        self._asking: set[asyncio.Future[None]] = set()
        self._is_drained_by_order = False
        self._is_stopping = False
        self.recent: deque[Completion] = deque(maxlen=20)
        self.completed_requests = 0
        self.failed_requests = 0
        self.energy_joules = 0.0
        self.prefill_joules = 0.0
        self.decode_joules = 0.0
        self.energy_sources: set[str] = set()

    @property
    def is_draining(self) -> bool:
        """Whether new orders are refused; an agent that stops stays so, whatever is ordered."""
        return self._is_drained_by_order or self._is_stopping

    @is_draining.setter
    def is_draining(self, is_draining: bool) -> None:
        self._is_drained_by_order = is_draining

    @property
    def running_requests(self) -> int:
        """Orders that have not ended."""
        return len(self._running)

    def use_power(self, power: PowerModel | None, remote_power: PowerModel | None) -> None:
        """From now on estimates go by these."""
        self._power, self._remote_power = power, remote_power

    def accept(self, order: WorkOrder) -> None:
        """Start an order; a repeat of a known one is ignored."""
        key = (order.request_id, order.attempt)
        if key in self._known:
            return
        self._known[key] = None
        while len(self._known) > _KNOWN_ORDERS:
            self._known.popitem(last=False)
        task = asyncio.create_task(self._work(order), name=f"work-{order.request_id}")
        self._running[key] = task
        task.add_done_callback(lambda _: self._running.pop(key, None))

    def cancel(self, request_id: str, attempt: int) -> None:
        """Stop an order; unknown ones are ignored.

        The engine is asked first, since it ends the answer with an account of what it cost; one
        that does not listen within `_CANCEL_SECONDS` is left alone with it.
        """
        key = (request_id, attempt)
        task = self._running.get(key)
        if task is None:
            return
        engine = self._engines.get(key)
        if engine is None:
            # After its first step, for a task that is cancelled before it never tells its end.
            asyncio.get_running_loop().call_soon(task.cancel)
            return
        asking = asyncio.ensure_future(engine.cancel(_generation_key(request_id, attempt)))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        asyncio.get_running_loop().call_later(_CANCEL_SECONDS, task.cancel)

    def cancel_all(self) -> None:
        """Stop everything: the controller that asked for it is gone.

        What has ended is forgotten, since whoever comes back may count attempts anew.
        """
        self._known = OrderedDict.fromkeys(self._running)
        for request_id, attempt in list(self._running):
            self.cancel(request_id, attempt)

    async def drain(self, seconds: float) -> None:
        """Take nothing new and let running orders end, for at most this long."""
        self._is_stopping = True
        if self._running:
            await asyncio.wait(list(self._running.values()), timeout=seconds)
        tasks = list(self._running.values())
        self.cancel_all()
        if tasks:
            await asyncio.wait(tasks, timeout=2.0)

    async def _work(self, order: WorkOrder) -> None:
        started = time.monotonic()
        try:
            completion = await asyncio.wait_for(
                self._generate(order, started), order.time_limit_seconds
            )
        except asyncio.CancelledError:
            # Whoever cancelled is told so; what was decoded so far is not an answer.
            completion = self._ended(order, started, FinishReason.CANCELLED)
        except asyncio.TimeoutError:
            completion = self._failed(
                order,
                started,
                FailureKind.TIME_LIMIT,
                f"the answer took longer than {order.time_limit_seconds:g} s",
            )
        except RejectedError as error:
            completion = self._failed(order, started, _REJECTIONS[error.kind], str(error))
        except EngineError as error:
            completion = self._failed(order, started, FailureKind.ENGINE_CRASHED, str(error))
        except ModelError as error:
            completion = self._failed(order, started, FailureKind.MODEL_NOT_LOADED, str(error))
        except SlowReaderError as error:
            completion = self._failed(order, started, FailureKind.INTERNAL, str(error))
        except Exception:
            log.exception("request.failed", request_id=order.request_id)
            completion = self._failed(
                order, started, FailureKind.INTERNAL, "the agent failed; its log says why"
            )
        self._close(completion)

    async def _generate(self, order: WorkOrder, started: float) -> Completion:
        if self.is_draining:
            return self._failed(order, started, FailureKind.DRAINING, "the node is draining")
        model = self._models(order.model)
        if model is not None and not model.is_ready and self._bring is not None:
            await self._bring(order.model)
        engine = _ready_engine(model)
        if engine is None:
            issue = f": {model.issue}" if model and model.issue else ""
            return self._failed(
                order,
                started,
                FailureKind.MODEL_NOT_LOADED,
                f"{order.model} is not loaded on this node{issue}",
            )
        key = (order.request_id, order.attempt)
        request = GenerationRequest(
            _generation_key(*key),
            order.prompt,
            order.sampling,
            order.response_format,
            order.session_id,
        )
        self._engines[key] = engine
        if model is not None:
            model.used(started)
        self._meter_order(key, model)
        try:
            async with aclosing(engine.generate(request)) as events:  # type: ignore[type-var]
                async for event in events:
                    match event:
                        case PromptProgress():
                            self._listener.progressed(*key, "", 0)
                        case TextChunk(text, tokens):
                            self._listener.progressed(*key, text, tokens)
                        case Finished():
                            return self._finished(order, started, event)
        finally:
            del self._engines[key]
            self._meter_order(key, None)
        return self._failed(order, started, FailureKind.INTERNAL, "the engine ended without a word")

    def _finished(self, order: WorkOrder, started: float, event: Finished) -> Completion:
        return Completion(
            request_id=order.request_id,
            attempt=order.attempt,
            model=order.model,
            outcome=_OUTCOMES[event.reason],
            usage=_usage(event, self._charge(order, event)),
            total_seconds=time.monotonic() - started,
        )

    def _charge(self, order: WorkOrder, event: Finished) -> Charge | None:
        hosted = self._models(order.model)
        is_elsewhere = hosted is not None and not hosted.spec.uses_this_machine
        model = self._metered.get((order.request_id, order.attempt))
        work = Work(
            event.prefill_seconds,
            event.decode_seconds,
            event.work_seconds,
            event.prefill_work_seconds,
        )
        if self._meter is not None and model is not None:
            charge = self._meter.charge(model, work)
            if charge is not None:
                return charge
        power = self._remote_power if is_elsewhere else self._power
        if power is None:
            return None
        # The engine was busy for this request alone during its work seconds, at full power.
        joules = event.work_seconds * power.watts(1.0)
        return Charge(joules, ESTIMATE, joules * work.prefill_share)

    def _meter_order(self, key: tuple[str, int], model: HostedModel | None) -> None:
        """Note that an order begins on this model's engine, or with None that it has ended."""
        if self._meter is None:
            return
        if model is None:
            if self._metered.pop(key, None) is None:
                return
        elif model.spec.uses_this_machine:
            self._metered[key] = model.settings.name
        self._meter.engines_busy(Counter(self._metered.values()))

    def _ended(self, order: WorkOrder, started: float, outcome: FinishReason) -> Completion:
        return Completion(
            order.request_id,
            order.attempt,
            order.model,
            outcome,
            total_seconds=time.monotonic() - started,
        )

    def _failed(
        self, order: WorkOrder, started: float, kind: FailureKind, message: str
    ) -> Completion:
        return Completion(
            order.request_id,
            order.attempt,
            order.model,
            FinishReason.FAILED,
            total_seconds=time.monotonic() - started,
            failure=kind,
            message=message,
        )

    def _close(self, completion: Completion) -> None:
        completion = replace(completion, ended_at=time.monotonic())
        self.recent.appendleft(completion)
        if completion.outcome is FinishReason.FAILED:
            self.failed_requests += 1
            log.warning(
                "request.failed",
                request_id=completion.request_id,
                kind=completion.failure.value if completion.failure else None,
                reason=completion.message,
            )
        else:
            self.completed_requests += 1
        self.energy_joules += completion.usage.energy_joules or 0.0
        self.prefill_joules += completion.usage.prefill_joules or 0.0
        self.decode_joules += completion.usage.decode_joules or 0.0
        if completion.usage.energy_joules is not None:
            self.energy_sources.add(completion.usage.energy_source)
        self._listener.completed(completion)


def _usage(event: Finished, charge: Charge | None) -> Usage:
    """What the engine counted, and what the node measured of it."""
    usage = Usage(**{name: getattr(event, name) for name in _COUNTED})
    if charge is None:
        return usage
    return replace(
        usage,
        energy_joules=charge.joules,
        energy_source=charge.source,
        prefill_joules=charge.prefill_joules,
        decode_joules=charge.decode_joules,
    )


def _generation_key(request_id: str, attempt: int) -> str:
    return f"{request_id}#{attempt}"


def _ready_engine(model: HostedModel | None) -> InferenceEngine | None:
    return model.engine if model is not None and model.is_ready else None
