"""Every error of the table over real gRPC, from calls that answer once and from streams."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import grpc
import pytest
import structlog

from controller.api.grpc_server import GrpcServer
from controller.api.grpc_servicer import AdminServicer, RouterServicer
from controller.api.service import RouterService
from controller.config import BatchingSettings
from controller.errors import PUBLIC_ERRORS
from controller.fleet.servicer import FleetServicer
from controller.fleet.sessions import FleetSessions
from controller.request_manager.manager import InferEvent
from controller.request_manager.stream import Text
from pointsman.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    fleet_pb2,
    fleet_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
    types_pb2,
)
from tests.fakes.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.anyio


class FailingService:
    """Fails at everything; `infer` after `texts` pieces of text, or never."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.texts = 0
        self.admissions = 0

    async def explain(self, request_id: str) -> None:
        raise self._failure

    def drain(self, node_id: str, is_draining: bool) -> None:
        raise self._failure

    async def manage_model(self, node_id: str, order: object) -> AsyncIterator[None]:
        raise self._failure
        yield

    @contextmanager
    def admitted(self, request: object) -> Iterator[AsyncIterator[InferEvent]]:
        self.admissions += 1
        try:
            yield self._events()
        finally:
            self.admissions -= 1

    async def _events(self) -> AsyncIterator[InferEvent]:
        for _ in range(self.texts):
            yield Text("a", 1)
        if self.failure is None:
            await asyncio.Event().wait()
        raise self._failure

    @property
    def _failure(self) -> Exception:
        assert self.failure is not None
        return self.failure


class FailingSessions:
    """Takes in no agent."""

    def connect(self, hello: fleet_pb2.Hello) -> None:
        raise RuntimeError("a secret")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def service() -> FailingService:
    return FailingService()


@pytest.fixture
async def channel(service: FailingService) -> AsyncIterator[grpc.aio.Channel]:
    router = cast(RouterService, service)
    server = GrpcServer(
        RouterServicer(router),
        AdminServicer(router, BatchingSettings()),
        FleetServicer(cast(FleetSessions, FailingSessions())),
    )
    port = server.bind("127.0.0.1:0", None)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as opened:
        yield opened
    await server.stop(0)


INFER = router_pb2.InferRequest(request=types_pb2.InferenceRequest(prompt="Hello"))
EXPLAIN = router_pb2.ExplainRequest(request_id="x")


def explain(channel: grpc.aio.Channel) -> Any:
    return router_pb2_grpc.RouterServiceStub(channel).Explain(EXPLAIN, timeout=PATIENCE_SECONDS)


def drain(channel: grpc.aio.Channel) -> Any:
    request = admin_pb2.DrainNodeRequest(node_id="pi")
    return admin_pb2_grpc.AdminServiceStub(channel).DrainNode(request, timeout=PATIENCE_SECONDS)


def manage(channel: grpc.aio.Channel) -> Any:
    request = admin_pb2.ManageModelRequest(
        node_id="pi", model="m", action=fleet_pb2.MODEL_ACTION_PIN
    )
    return admin_pb2_grpc.AdminServiceStub(channel).ManageModel(request, timeout=PATIENCE_SECONDS)


def infer(channel: grpc.aio.Channel) -> Any:
    return router_pb2_grpc.RouterServiceStub(channel).Infer(INFER, timeout=PATIENCE_SECONDS)


CALLS = {"unary": explain, "unary, not awaited": drain, "stream": infer, "stream of orders": manage}
Call = Callable[[grpc.aio.Channel], Any]


async def failure_of(call: Any) -> tuple[int, grpc.aio.AioRpcError]:
    """How many messages came before the error, and the error."""
    messages: list[object] = []

    async def read() -> None:
        if not hasattr(call, "__aiter__"):
            await call
            return
        async for message in call:
            messages.append(message)  # noqa: PERF401 - those before the error count

    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await read()
    return len(messages), failure.value


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("kind", PUBLIC_ERRORS, ids=lambda kind: kind.__name__)
async def test_every_error_has_its_status_its_code_and_its_sentence(
    channel: grpc.aio.Channel, service: FailingService, kind: type[Exception], call: Call
) -> None:
    service.failure = kind("It is so.")
    _, failure = await failure_of(call(channel))
    assert failure.code() is PUBLIC_ERRORS[kind].grpc_status  # type: ignore[index]
    assert failure.details() == "It is so."
    metadata = dict(failure.trailing_metadata() or ())  # type: ignore[arg-type]
    assert metadata["pointsman-error-code"] == PUBLIC_ERRORS[kind].code  # type: ignore[index]


@pytest.mark.parametrize("kind", PUBLIC_ERRORS, ids=lambda kind: kind.__name__)
async def test_stream_that_has_begun_ends_with_the_same_status(
    channel: grpc.aio.Channel, service: FailingService, kind: type[Exception]
) -> None:
    service.failure, service.texts = kind("It is so."), 2
    messages, failure = await failure_of(infer(channel))
    assert messages == 3  # that it was admitted, and two pieces of text
    assert failure.code() is PUBLIC_ERRORS[kind].grpc_status  # type: ignore[index]
    assert failure.details() == "It is so."
    assert service.admissions == 0


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
async def test_fault_of_ours_is_a_bland_internal_and_the_log_has_the_cause(
    channel: grpc.aio.Channel, service: FailingService, call: Call
) -> None:
    service.failure = RuntimeError("a secret")
    with structlog.testing.capture_logs() as logs:
        _, failure = await failure_of(call(channel))
    assert failure.code() is grpc.StatusCode.INTERNAL
    assert failure.details() == "The controller failed at this request; its log says why."
    assert [entry["event"] for entry in logs] == ["rpc.failed"]
    assert logs[0]["exc_info"]


async def test_fault_of_ours_at_an_agent_is_a_bland_internal_too(
    channel: grpc.aio.Channel,
) -> None:
    async def introduction() -> AsyncIterator[fleet_pb2.ConnectRequest]:
        yield fleet_pb2.ConnectRequest(hello=fleet_pb2.Hello(node_id="pi"))

    call = fleet_pb2_grpc.FleetServiceStub(channel).Connect(introduction())
    _, failure = await failure_of(call)
    assert failure.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (failure.details() or "")


async def test_call_that_its_client_cancels_is_cancelled_and_is_no_fault(
    channel: grpc.aio.Channel, service: FailingService
) -> None:
    call = infer(channel)
    await call.read()
    assert service.admissions == 1
    with structlog.testing.capture_logs() as logs:
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.read()
        await until(lambda: service.admissions == 0)
    assert logs == []
