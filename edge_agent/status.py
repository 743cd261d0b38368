"""What `edge-agent status` shows, and the local socket it asks.

The socket answers whether the controller is there or not: one connection, one JSON object.
"""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edge_agent.errors import EXIT_NOT_READY, EXIT_READY, AgentError
from edge_agent.local_socket import ASK_SECONDS, connect, listen, stop_listening

StatusObject = dict[str, Any]


class StatusServer:
    """Answers on a Unix socket.

    Args:
        path: of the socket; made for the agent's user and group only.
        snapshot: makes the status object; called on the event loop, must not block.
    """

    def __init__(self, path: Path, snapshot: Callable[[], StatusObject]) -> None:
        self._path = path
        self._snapshot = snapshot
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen.

        Raises:
            AgentError: another agent uses this data directory, or the path cannot be used.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if await _answers(self._path):
            raise AgentError(
                f"an agent is already running with data directory {self._path.parent}; "
                "stop it, or give this one another --data-dir"
            )
        self._server = await listen(self._path, self._answer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(json.dumps(self._snapshot()).encode() + b"\n")
            await asyncio.wait_for(writer.drain(), ASK_SECONDS)
        except (OSError, asyncio.TimeoutError):
            pass  # whoever asked has gone
        finally:
            writer.close()

    async def close(self) -> None:
        """Stop listening and remove the socket."""
        if self._server is not None:
            stop_listening(self._server, self._path)


async def _answers(path: Path) -> bool:
    try:
        _, writer = await asyncio.wait_for(asyncio.open_unix_connection(str(path)), 1.0)
    except (OSError, asyncio.TimeoutError):
        return False
    writer.close()
    return True


async def ask_status(path: Path) -> StatusObject:
    """Ask a running agent.

    Raises:
        NotRunningError: nobody answers.
        AgentError: the socket may not be used, or answers nonsense.
    """
    reader, writer = await connect(path)
    try:
        line = await asyncio.wait_for(reader.readline(), ASK_SECONDS)
        answer = json.loads(line)
    except (OSError, ValueError, asyncio.TimeoutError) as error:
        raise AgentError(f"{path}: the agent gave no proper answer") from error
    finally:
        writer.close()
    if not isinstance(answer, dict):
        raise AgentError(f"{path}: the agent gave no proper answer")
    return answer


def exit_code_of(status: StatusObject) -> int:
    """0 when the agent is ready, 4 when it runs but is not."""
    return EXIT_READY if status.get("state") == "ready" else EXIT_NOT_READY
