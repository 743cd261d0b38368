"""Orders from this machine's own command line, over a local socket.

One connection is one order: a JSON object comes in, and a JSON object goes out for each step of it.
"""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from edge_agent.errors import AgentError, UsageError
from edge_agent.local_socket import ASK_SECONDS, connect, listen, stop_listening
from edge_agent.serving.orders import (
    GivenOrder,
    ManageModel,
    MeasureSpeed,
    ModelAction,
    OrderDesk,
    OrderUpdate,
)

_MEASURE: Final = "measure"
"""Asks for a `MeasureSpeed`; every other action is one of `ModelAction`."""

_SILENCE_SECONDS: Final = 30.0
"""The agent shows a sign of life every five seconds."""


class ControlServer:
    """Takes orders on a Unix socket.

    Args:
        path: of the socket; made for the agent's user and group only.
        desk: carries the orders out.
    """

    def __init__(self, path: Path, desk: OrderDesk) -> None:
        self._path = path
        self._desk = desk
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen; whoever holds the status socket may take this one.

        Raises:
            AgentError: the path cannot be used.
        """
        self._server = await listen(self._path, self._answer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await asyncio.wait_for(reader.readline(), ASK_SECONDS)
            updates = _Updates()
            self._desk.accept(_order(line), updates)
            while True:
                update = await updates.queue.get()
                writer.write(json.dumps(_to_json(update)).encode() + b"\n")
                await asyncio.wait_for(writer.drain(), ASK_SECONDS)
                if update.is_last:
                    return
        except UsageError as error:
            writer.write(json.dumps({"phase": "failed", "message": str(error)}).encode() + b"\n")
        except (OSError, asyncio.TimeoutError):
            pass  # whoever asked has gone; the order goes on
        finally:
            writer.close()

    async def close(self) -> None:
        """Stop listening and remove the socket."""
        if self._server is not None:
            stop_listening(self._server, self._path)


class _Updates:
    """Collects what is told of one order; there are few, so the queue needs no bound."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[OrderUpdate] = asyncio.Queue()

    def order_updated(self, update: OrderUpdate) -> None:
        self.queue.put_nowait(update)


def _order(line: bytes) -> GivenOrder:
    try:
        asked = json.loads(line)
        model = asked["model"]
        action = None if asked["action"] == _MEASURE else ModelAction(asked["action"])
        counts = [asked.get("slots"), asked.get("context_tokens")]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError("this agent does not know such an order; update it") from error
    if not isinstance(model, str) or not all(
        count is None or (isinstance(count, int) and not isinstance(count, bool))
        for count in counts
    ):
        raise UsageError("an order names a model, and whole numbers of slots and context_tokens")
    order = MeasureSpeed(model or None) if action is None else ManageModel(action, model, *counts)
    return GivenOrder(f"local-{uuid.uuid4().hex}", order)


def _to_json(update: OrderUpdate) -> dict[str, Any]:
    return {
        "order_id": update.order_id,
        "phase": update.phase.value,
        "message": update.message,
        "progress_ratio": update.progress_ratio,
    }


async def give_order(
    path: Path,
    action: str,
    model: str,
    slots: int | None = None,
    context_tokens: int | None = None,
) -> AsyncIterator[dict[str, Any]]:
    """Give an order to the agent that runs here, and hear how it goes.

    Args:
        action: a `ModelAction`'s value, or "measure".

    Yields:
        objects with phase ("running", "done", "failed"), message and progress_ratio; the last one
        is not "running".

    Raises:
        NotRunningError: nobody answers.
        AgentError: the socket may not be used, or the agent went away or fell silent.
    """
    reader, writer = await connect(path)
    try:
        asked = {
            "action": action,
            "model": model,
            "slots": slots,
            "context_tokens": context_tokens,
        }
        writer.write(json.dumps(asked).encode() + b"\n")
        while True:
            line = await asyncio.wait_for(reader.readline(), _SILENCE_SECONDS)
            update = json.loads(line)
            yield update
            if update["phase"] != "running":
                return
    except (OSError, ValueError, KeyError, TypeError, asyncio.TimeoutError) as error:
        raise AgentError(
            f"{path}: the agent went away before the order was done; see edge-agent status"
        ) from error
    finally:
        writer.close()
