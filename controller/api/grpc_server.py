"""The gRPC server: services, health, reflection and keep-alive."""

from typing import Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from controller.api.grpc_errors import ErrorInterceptor
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


class GrpcServer:
    """The server and its health service."""

    def __init__(
        self,
        router: RouterServicer,
        admin: AdminServicer,
        fleet: FleetServicer,
    ) -> None:
        self._server = grpc.aio.server(interceptors=(ErrorInterceptor(),), options=_OPTIONS)
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
