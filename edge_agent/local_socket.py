"""Unix sockets by which commands on this machine ask the running agent."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from edge_agent.errors import AgentError, NotRunningError

ASK_SECONDS: Final = 5.0
"""How long one side may keep the other waiting for a line."""

_MAX_LINE_BYTES: Final = 4 * 1024 * 1024

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def listen(path: Path, answer: Answer) -> asyncio.Server:
    """Listen for the agent's user and group only; a socket that a crash has left is replaced.

    Raises:
        AgentError: the path cannot be used.
    """
    try:
        path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(answer, str(path))
        os.chmod(path, 0o660)
    except OSError as error:
        raise AgentError(f"{path}: cannot listen: {error.strerror or error}") from error
    return server


def stop_listening(server: asyncio.Server, path: Path) -> None:
    """Close the server and remove its socket."""
    server.close()
    path.unlink(missing_ok=True)


async def connect(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Reach the agent that listens there.

    Raises:
        NotRunningError: nobody answers.
        AgentError: the socket may not be used.
    """
    try:
        return await asyncio.wait_for(
            asyncio.open_unix_connection(str(path), limit=_MAX_LINE_BYTES), ASK_SECONDS
        )
    except PermissionError as error:
        raise AgentError(
            f"{path}: permission denied; run as the agent's user or join its group"
        ) from error
    except (OSError, asyncio.TimeoutError) as error:
        raise NotRunningError(
            f"no agent answers at {path}; start it with `edge-agent run`, or name its --data-dir"
        ) from error
