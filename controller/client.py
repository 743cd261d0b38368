"""A connection to a running controller, for the command line and the demonstration."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from pointsman.v1 import admin_pb2_grpc, router_pb2_grpc

CONNECT_SECONDS: Final = 5.0

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


class ConnectError(Exception):
    """Nobody answers at the controller's address."""


@dataclass(frozen=True, slots=True)
class Connection:
    """Where the controller is.

    Attributes:
        address: host:port.
        insecure: no TLS.
        ca_file: PEM to trust instead of the system's authorities.
    """

    address: str
    insecure: bool
    ca_file: Path | None


class Client:
    """Stubs of one connection."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.router: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(
            channel
        )
        self.admin: admin_pb2_grpc.AdminServiceAsyncStub = admin_pb2_grpc.AdminServiceStub(channel)


@asynccontextmanager
async def connected(connection: Connection) -> AsyncIterator[Client]:
    """A client for as long as the context lasts.

    Raises:
        ConnectError: nobody answers, or the certificate is not trusted.
    """
    if connection.insecure:
        channel = grpc.aio.insecure_channel(connection.address, options=_OPTIONS)
    else:
        try:
            roots = connection.ca_file.read_bytes() if connection.ca_file else None
        except OSError as error:
            raise ConnectError(f"{connection.ca_file}: {error.strerror}") from error
        credentials = grpc.ssl_channel_credentials(roots)
        channel = grpc.aio.secure_channel(connection.address, credentials, options=_OPTIONS)
    async with channel:
        try:
            await asyncio.wait_for(_until_ready(channel), CONNECT_SECONDS)
        except (asyncio.TimeoutError, _FailedError) as error:
            hint = (
                "is `edge-controller serve` running there, and without TLS (--insecure)?"
                if connection.insecure
                else "is `edge-controller serve` running there, and does --ca-file name its "
                "authority? (a controller without TLS needs --insecure)"
            )
            raise ConnectError(f"no controller answers at {connection.address}; {hint}") from error
        yield Client(channel)


class _FailedError(Exception):
    """The first attempt at every address of the controller failed."""


async def _until_ready(channel: grpc.aio.Channel) -> None:
    """Wait for the first attempt; gRPC by itself would go on trying in silence."""
    state = channel.get_state(try_to_connect=True)
    while state is not grpc.ChannelConnectivity.READY:
        if state in (
            grpc.ChannelConnectivity.TRANSIENT_FAILURE,
            grpc.ChannelConnectivity.SHUTDOWN,
        ):
            raise _FailedError
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)
