"""Serves an ASGI application over HTTP or HTTPS until it is told to stop."""

import asyncio
import contextlib
import errno
import math
import socket
import ssl
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Final, Protocol

import anyio
import structlog
import uvicorn
from starlette.types import ASGIApp

log = structlog.get_logger()

_LOOKUP_SECONDS: Final = 10.0
_IDLE_CONNECTION_SECONDS: Final = 75  # longer than clients keep theirs, so that they close first
_CLEANUP_SECONDS: Final = 2.0
_DEAD_PEER_MILLISECONDS: Final = 60_000

# A client that vanished without a word is noticed while it waits for a long answer, too.
# Accepted connections inherit what the listening socket has. macOS lacks some of the names.
_SOCKET_OPTIONS: Final = tuple(
    (level, getattr(socket, name), value)
    for level, name, value in (
        (socket.SOL_SOCKET, "SO_REUSEADDR", 1),
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 15),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 5),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", 3),
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", _DEAD_PEER_MILLISECONDS),
    )
    if hasattr(socket, name)
)


class HttpListenError(Exception):
    """The address or the certificate cannot be used; the text says what to change."""


class StopSignal(Protocol):
    """`asyncio.Event` or `anyio.Event`; set once."""

    async def wait(self) -> object:
        """Return when it is time to stop."""
        ...


async def serve_http(
    app: ASGIApp,
    host: str,
    port: int,
    stop: StopSignal,
    *,
    certfile: Path | None = None,
    keyfile: Path | None = None,
    started: Callable[[int], None] | None = None,
    grace_seconds: float = 10.0,
) -> None:
    """Serve until `stop` is set or this is cancelled; running responses may then finish.

    Args:
        host: name or address to listen at; every address of a name is used.
        port: 0 takes a free one.
        certfile: PEM chain; None serves without TLS.
        keyfile: PEM key of the chain, without a passphrase.
        started: is told the real port once connections are accepted.
        grace_seconds: how long responses may go on after the stop; then they are cut. Let it be
            longer than the request manager's drain, which ends streams with a word.

    Raises:
        ListenError: the address or the certificate cannot be used.
    """
    context = _tls_context(certfile, keyfile) if certfile is not None else None
    sockets = await _listen(host, port)
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_IDLE_CONNECTION_SECONDS,
        timeout_graceful_shutdown=max(1, math.ceil(grace_seconds)),
    )
    config.load()
    config.ssl = context
    real_port = sockets[0].getsockname()[1]
    server = _Server(config, lambda: started(real_port) if started else None)
    is_closed = False
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_exit_on, stop, server, name="http-stop")
            # Cancelling this call stops as `stop` does: uvicorn must close what it has opened.
            with anyio.CancelScope(shield=True):
                await server.serve(sockets)
                is_closed = True
            tasks.cancel_scope.cancel()
    finally:
        with anyio.move_on_after(_CLEANUP_SECONDS, shield=True):
            if server.started and not is_closed:  # a plain asyncio cancellation passes the shield
                config.timeout_graceful_shutdown = 0
                await server.shutdown(sockets)
            # Uvicorn cancels what outstays the grace period, and does not wait for it.
            while server.server_state.tasks:
                await asyncio.wait(set(server.server_state.tasks))
        for connection in list(server.server_state.connections):
            connection.transport.abort()  # closed by us, but its client never read to the end
        for sock in sockets:
            sock.close()


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers: signals are the composition root's."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = started

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        log.info("http.listening", addresses=[sock.getsockname()[:2] for sock in sockets or ()])
        self._on_started()


async def _exit_on(stop: StopSignal, server: uvicorn.Server) -> None:
    try:
        await stop.wait()
    finally:
        server.should_exit = True


async def _listen(host: str, port: int) -> list[socket.socket]:
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    advice = "choose another with --http-listen"
    if not 0 <= port <= 65535:
        raise HttpListenError(f"cannot listen on {where}: ports are 0 to 65535; {advice}")
    try:
        with anyio.fail_after(_LOOKUP_SECONDS):
            found = await asyncio.get_running_loop().getaddrinfo(
                host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
    except (socket.gaierror, UnicodeError, TimeoutError) as error:
        raise HttpListenError(f"cannot listen on {where}: no such host; {advice}") from error
    sockets: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            # Port 0 is chosen once, for all addresses of a name.
            chosen = sockets[0].getsockname()[1] if sockets else port
            sockets.append(_listening_socket(family, (address[0], chosen, *address[2:])))
    except OSError as error:
        for sock in sockets:
            sock.close()
        reason = {
            errno.EADDRINUSE: "address already in use",
            errno.EACCES: "permission denied",
            errno.EADDRNOTAVAIL: "this machine does not have that address",
        }.get(error.errno or 0, error.strerror or str(error))
        raise HttpListenError(f"cannot listen on {where}: {reason}; {advice}") from error
    return sockets


def _listening_socket(family: int, address: Sequence[object]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        for option in _SOCKET_OPTIONS:
            sock.setsockopt(*option)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(tuple(address))
        # Not left to uvicorn: with SO_REUSEADDR only listening shows that a port is taken.
        sock.listen(128)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _tls_context(certfile: Path, keyfile: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # Without a password given OpenSSL would ask for one on the terminal, and wait.
        context.load_cert_chain(certfile, keyfile, password=lambda: "")
    except (OSError, ValueError) as error:
        raise HttpListenError(
            f"cannot use the certificate {certfile} with the key {keyfile or certfile}: {error}; "
            "both must be readable PEM files that belong together, the key without a passphrase"
        ) from error
    return context
