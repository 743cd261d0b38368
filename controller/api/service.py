"""What routing a request means; gRPC, HTTP and CLI convert, call this and convert back."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass
from typing import Final, TypeVar

import structlog

from controller.api.validation import check_request
from controller.config import LimitSettings
from controller.domain.batch import BatchDecision, Placement, Weights
from controller.domain.cluster import NodeState
from controller.domain.node_report import ReportedModel
from controller.domain.order import (
    ManageModel,
    MeasureSpeed,
    ModelAction,
    Order,
    OrderPhase,
    OrderUpdate,
)
from controller.domain.policy_choice import PolicyChoice
from controller.domain.request import InferenceRequest
from controller.domain.request_record import Account, RequestRecord
from controller.errors import (
    InvalidRequestError,
    NodeBusyError,
    NodeLostError,
    NoDestinationError,
    RouterError,
    UnknownModelError,
    UnknownNodeError,
    UnknownRequestError,
)
from controller.fleet.sessions import FleetSessions
from controller.ids import ModelName, NodeId, RequestId
from controller.profiler.events import NodeForgotten
from controller.profiler.state import NodeRecord, ProfilerState
from controller.quality.learner import Learner
from controller.request_manager.decider import Decider
from controller.request_manager.manager import InferEvent, RequestManager
from controller.request_manager.refusals import unknown_model_error
from controller.routing.policy import FallbackCause
from controller.storage.base import ControllerStore, StorageError

log = structlog.get_logger()

T = TypeVar("T")

_USUAL_ACCOUNTS: Final = 10_000
_MOST_ACCOUNTS: Final = 100_000
"""Of so many the documents are read in some seconds, and fit in memory."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that the fleet can answer with now; `context_tokens` is the longest of any node."""

    name: ModelName
    family: str
    parameters_billions: float
    quantisation: str
    context_tokens: int
    node_ids: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class Calibrating:
    """How a node's measurement goes; `models` come with its last update."""

    node_id: NodeId
    update: OrderUpdate
    models: tuple[ReportedModel, ...] = ()


class RouterService:
    """Route, infer, explain and administer; knows no transport."""

    def __init__(
        self,
        limits: LimitSettings,
        profiler: ProfilerState,
        decider: Decider,
        manager: RequestManager,
        sessions: FleetSessions,
        learner: Learner,
        store: ControllerStore,
    ) -> None:
        self._limits = limits
        self._profiler = profiler
        self._decider = decider
        self._manager = manager
        self._sessions = sessions
        self._learner = learner
        self._store = store

    # -- clients ----------------------------------------------------------------------------------

    async def route(
        self,
        requests: Sequence[InferenceRequest],
        policy: str | None = None,
        weights: Weights | None = None,
    ) -> tuple[BatchDecision, list[Placement]]:
        """Decide for a batch over the fleet as it is now, and send nothing.

        Raises:
            RouterError: the batch is empty, a request or the policy is wrong, or nobody is there.
        """
        if not requests:
            raise InvalidRequestError("The batch is empty; send at least one request.")
        for request in requests:
            self._check(request)
        return await self._decider.dry_run(
            requests,
            self._profiler.snapshot(time.monotonic(), [r.session_id for r in requests]),
            policy,
            weights,
        )

    def admitted(
        self, request: InferenceRequest
    ) -> AbstractContextManager[AsyncIterator[InferEvent]]:
        """Admit a request for as long as the context lasts; see `RequestManager.admitted`.

        Raises:
            RouterError: a field is wrong, the model is unknown, or the controller is full.
        """
        self._check(request)
        return self._manager.admitted(request)

    async def infer(self, request: InferenceRequest) -> AsyncGenerator[InferEvent, None]:
        """Answer one request; closing the iterator cancels it.

        Yields:
            RoutedTo, then Text as it comes, and at last one Account.

        Raises:
            RouterError: the request was refused, or its answer will not come.
        """
        with self.admitted(request) as events:
            async for event in events:
                yield event

    async def explain(self, request_id: RequestId) -> RequestRecord:
        """Why a request went where it went, also after a restart.

        Raises:
            UnknownRequestError: there is no record of it.
        """
        try:
            return self._manager.records.get(request_id)
        except UnknownRequestError:
            found = await self._kept(lambda: self._store.find(request_id))
            if found is None:
                raise
            return found

    async def accounts(self, limit: int | None) -> list[Account]:
        """Of the latest answered requests, newest first, also those of before a restart.

        Args:
            limit: at most so many, and at most 100,000; None gives 10,000.
        """
        most = min(limit or _USUAL_ACCOUNTS, _MOST_ACCOUNTS)
        return await self._kept(lambda: self._store.accounts(most))

    async def _kept(self, read: Callable[[], T]) -> T:
        """What is kept, read beside the event loop."""
        try:
            return await asyncio.get_running_loop().run_in_executor(None, read)
        except StorageError as error:
            log.error("storage.not_read", error=str(error))
            raise

    async def feedback(self, request_id: RequestId, score_ratio: float) -> None:
        """Say how good a finished answer was; the next similar prompts are routed by it.

        Raises:
            UnknownRequestError: there is no record of it.
            InvalidRequestError: the score or the request's state does not allow it.
        """
        self._learner.judged(await self.explain(request_id), score_ratio)

    def models(self) -> list[ServedModel]:
        """Models that the fleet can answer with now, in order of name."""
        found: dict[ModelName, ServedModel] = {}
        for node_id, record in sorted(self._profiler.nodes.items()):
            for model in record.models if record.state is NodeState.READY else ():
                if not record.is_routable(model):
                    continue
                known = found.get(model.name)
                found[model.name] = ServedModel(
                    model.name,
                    model.family,
                    model.parameters_billions,
                    model.quantisation,
                    max(model.context_tokens, known.context_tokens if known else 0),
                    (*(known.node_ids if known else ()), node_id),
                )
        return [found[name] for name in sorted(found)]

    def _check(self, request: InferenceRequest) -> None:
        check_request(request, self._limits.max_prompt_bytes)
        if request.model is None:
            return
        # A model that is loading, or on a node that is away, is known: routing refuses it for now.
        known = {model.name for record in self._profiler.nodes.values() for model in record.models}
        if request.model not in known:
            raise unknown_model_error(request.model, (model.name for model in self.models()))

    # -- operators --------------------------------------------------------------------------------

    def nodes(self) -> list[NodeRecord]:
        """Every known node, in order of name."""
        return [record for _, record in sorted(self._profiler.nodes.items())]

    def issues(self) -> tuple[str, ...]:
        """What an operator should mend about the controller itself."""
        issue = self._store.state.issue
        return (issue,) if issue else ()

    def drain(self, node_id: NodeId, is_draining: bool) -> NodeRecord:
        """Drain a node or lift it; repeats change nothing.

        Raises:
            UnknownNodeError: no node has this name.
        """
        record = self._known(node_id)
        self._sessions.drain(node_id, is_draining)
        return record

    def forget(self, node_id: NodeId) -> None:
        """Drop an offline node from the list.

        Raises:
            UnknownNodeError: no node has this name.
            NodeBusyError: it is connected.
        """
        if self._known(node_id).is_connected:
            raise NodeBusyError(f"Node {node_id!r} is connected; stop its agent first.")
        self._profiler.apply(NodeForgotten(node_id), time.monotonic())

    async def manage_model(
        self, node_id: NodeId, order: ManageModel
    ) -> AsyncGenerator[OrderUpdate, None]:
        """Have a node load, unload, pin or unpin a model, and hear how it goes.

        The same order given twice is one order; closing the iterator does not stop it.

        Raises:
            RouterError: the node is unknown, away or lost meanwhile, a number is wrong, or the
                node does not answer.
        """
        if not order.model:
            raise InvalidRequestError("model: name a model of the node's catalogue.")
        for name, value in (("slots", order.slots), ("context_tokens", order.context_tokens)):
            if value is not None and not 1 <= value < 2**31:
                raise InvalidRequestError(f"{name}: 1 or more, not {value}.")
            if value is not None and order.action is not ModelAction.LOAD:
                raise InvalidRequestError(f"{name}: only when a model is loaded.")
        async with aclosing(self.order(node_id, order)) as updates:
            async for update in updates:
                yield update

    async def order(self, node_id: NodeId, order: Order) -> AsyncGenerator[OrderUpdate, None]:
        """Have a node carry out an order that needs no check, and hear how it goes.

        Raises:
            RouterError: the node is unknown, away or lost meanwhile, or does not answer.
        """
        self._connected(node_id)
        async with aclosing(self._sessions.order(node_id, order)) as updates:
            async for update in updates:
                yield update

    async def calibrate(
        self, node_id: NodeId | None, model: ModelName | None
    ) -> AsyncGenerator[Calibrating, None]:
        """Have nodes measure the speed of their loaded models again, all nodes at once.

        A node that fails or is lost ends with a failed update of its own; the others go on.

        Raises:
            RouterError: the node is unknown or away, nobody is connected, or no node that is asked
                has this model.
        """
        if node_id is not None:
            self._connected(node_id)
            asked = [node_id]
        else:
            asked = [n for n, record in self._profiler.nodes.items() if record.is_connected]
            if not asked:
                raise NoDestinationError("No node is connected; start an agent.")
        if model is not None:
            asked = [
                n for n in asked if any(m.name == model for m in self._profiler.nodes[n].models)
            ]
            if not asked:
                where = f"node {node_id}" if node_id else "any connected node"
                raise UnknownModelError(
                    f"Model {model!r} is not on {where}; see `edge-controller nodes`."
                )
        told: asyncio.Queue[Calibrating] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._calibrate_node(n, MeasureSpeed(model), told)) for n in asked
        ]
        try:
            remaining = len(tasks)
            while remaining:
                event = await told.get()  # each task ends with one, and has its own deadlines
                remaining -= event.update.is_last
                yield event
        finally:
            for task in tasks:
                task.cancel()

    async def _calibrate_node(
        self, node_id: NodeId, order: MeasureSpeed, told: "asyncio.Queue[Calibrating]"
    ) -> None:
        try:
            async with aclosing(self._sessions.order(node_id, order)) as updates:
                async for update in updates:
                    record = self._profiler.nodes.get(node_id) if update.is_last else None
                    models = () if record is None else record.models_now
                    told.put_nowait(Calibrating(node_id, update, models))
        except RouterError as error:
            told.put_nowait(Calibrating(node_id, OrderUpdate("", OrderPhase.FAILED, str(error))))
        except Exception:
            log.exception("node.not_calibrated", node_id=node_id)
            failed = OrderUpdate("", OrderPhase.FAILED, "the controller failed; its log says why")
            told.put_nowait(Calibrating(node_id, failed))

    def _connected(self, node_id: NodeId) -> None:
        if not self._known(node_id).is_connected:
            raise NodeLostError(f"Node {node_id} is not connected; start its agent.")

    @property
    def policy(self) -> PolicyChoice:
        """The policy in force."""
        return self._decider.choice

    @property
    def is_policy_configured(self) -> bool:
        """Whether the policy in force is the settings' own, rather than an operator's choice."""
        return self._decider.is_configured

    @property
    def available_policies(self) -> tuple[str, ...]:
        """Names that `set_policy` takes."""
        return self._decider.available_policies

    @property
    def policy_fallbacks(self) -> Mapping[tuple[str, FallbackCause], int]:
        """Requests that another policy decided, by the policy in force and the cause."""
        return self._decider.fallbacks

    def set_policy(
        self, policy: str | None, weights: Weights | None, normalisation: str | None
    ) -> PolicyChoice:
        """Change what is given, from the next window on; None leaves as it is.

        Raises:
            UnknownPolicyError: no policy has this name.
            InvalidRequestError: no normalisation has this name.
        """
        return self._decider.choose(policy, weights, normalisation)

    def _known(self, node_id: NodeId) -> NodeRecord:
        record = self._profiler.nodes.get(node_id)
        if record is None:
            names = ", ".join(sorted(self._profiler.nodes)) or "none"
            raise UnknownNodeError(f"No node is called {node_id!r}. Known: {names}.")
        return record
