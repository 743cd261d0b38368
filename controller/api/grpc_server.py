"""The gRPC server: services, health, reflection, keep-alive and the guard against bad messages."""

import inspect
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from controller.api.grpc_servicer import AdminServicer, RouterServicer
from controller.fleet.servicer import FleetServicer
from controller.security.tls import ServerCertificate
from pointsman.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    fleet_pb2,
    fleet_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
)

log = structlog.get_logger()

SERVICE_NAMES: Final = (
    router_pb2.DESCRIPTOR.services_by_name["RouterService"].full_name,
    fleet_pb2.DESCRIPTOR.services_by_name["FleetService"].full_name,
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
)

KEEPALIVE_MILLISECONDS: Final = 20_000
"""How often agents and clients may ping; the agent's channel uses the same (Python's
server would otherwise answer pings more frequent than every five minutes with GOAWAY)."""

_OPTIONS: Final = (
    ("grpc.keepalive_time_ms", KEEPALIVE_MILLISECONDS),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MILLISECONDS // 2),
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a second controller
)


class ListenError(Exception):
    """The address cannot be listened on."""


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """Stands for a message that could not be decoded."""

    why: str


class GuardInterceptor(grpc.aio.ServerInterceptor):
    """Answers what goes wrong outside the handlers, and what they did not foresee, properly.

    A message that is no valid protobuf (such as text that is not UTF-8) is INVALID_ARGUMENT. Left
    alone, the Python server ends such a call as INTERNAL, which tells a client to retry what can
    never work. A fault of ours is INTERNAL and no more: the log gets the cause, the client does
    not.
    """

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Wrap handlers that take one message."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        decode = handler.request_deserializer

        def deserialise(data: bytes) -> object:
            try:
                return decode(data)
            except DecodeError as error:
                return _Unreadable(str(error) or "it is not valid protobuf")

        if handler.response_streaming:
            stream: Any = handler.unary_stream

            async def answer_stream(request: Any, context: Any) -> Any:
                if isinstance(request, _Unreadable):
                    await _refuse(context, request)
                answering = stream(request, context)
                try:
                    if not inspect.isasyncgen(answering):  # it writes to the context, as Watch does
                        await answering
                        return
                    # Closed with this generator, so that a client's leaving reaches the request.
                    async with aclosing(answering):
                        async for response in answering:
                            yield response
                except grpc.aio.AbortError:
                    raise
                except Exception:
                    await _failed(context, handler_call_details.method)

            return grpc.unary_stream_rpc_method_handler(
                answer_stream, deserialise, handler.response_serializer
            )
        unary: Any = handler.unary_unary

        async def answer(request: Any, context: Any) -> Any:
            if isinstance(request, _Unreadable):
                await _refuse(context, request)
            try:
                return await unary(request, context)
            except grpc.aio.AbortError:
                raise
            except Exception:
                await _failed(context, handler_call_details.method)

        return grpc.unary_unary_rpc_method_handler(answer, deserialise, handler.response_serializer)


async def _refuse(context: Any, message: _Unreadable) -> None:
    await context.abort(
        grpc.StatusCode.INVALID_ARGUMENT,
        f"The message cannot be read ({message.why}); text must be valid UTF-8.",
    )


async def _failed(context: Any, method: object) -> None:
    log.exception("rpc.failed", method=method)
    await context.abort(
        grpc.StatusCode.INTERNAL, "The controller failed at this request; its log says why."
    )


class GrpcServer:
    """The server and its health service."""

    def __init__(
        self,
        router: RouterServicer,
        admin: AdminServicer,
        fleet: FleetServicer,
    ) -> None:
        self._server = grpc.aio.server(interceptors=(GuardInterceptor(),), options=_OPTIONS)
        router_pb2_grpc.add_RouterServiceServicer_to_server(router, self._server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, self._server)
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(fleet, self._server)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (*SERVICE_NAMES, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )

    def bind(self, address: str, certificate: ServerCertificate | None) -> int:
        """Take the address, and answer nobody yet; returns the port.

        Raises:
            ListenError: the address is in use or not ours.
        """
        try:
            if certificate is None:
                port = self._server.add_insecure_port(address)
            else:
                credentials = grpc.ssl_server_credentials(
                    [(certificate.key_pem, certificate.chain_pem)]
                )
                port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise ListenError(
                f"cannot listen on {address}: it is in use, or not an address of this machine; "
                "choose another with --listen"
            ) from error
        if port == 0:
            raise ListenError(f"cannot listen on {address}; choose another with --listen")
        return port

    async def start(self) -> None:
        """Answer."""
        await self._server.start()
        for name in ("", *SERVICE_NAMES):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def refuse(self) -> None:
        """Tell health checks that this server takes nothing new."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_seconds: float) -> None:
        """Stop; running calls get this long."""
        await self._server.stop(grace_seconds)
