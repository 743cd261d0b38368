"""Orders from this machine's own command line."""

import asyncio
import json
from pathlib import Path

import pytest

from edge_agent.control import ControlServer, give_order
from edge_agent.errors import NotRunningError
from edge_agent.serving.orders import (
    GivenOrder,
    ManageModel,
    ModelAction,
    OrderDesk,
    OrderListener,
    OrderPhase,
    OrderUpdate,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class ScriptedDesk(OrderDesk):
    """Tells one step and the end of every order."""

    def __init__(self) -> None:
        self.orders: list[GivenOrder] = []

    def accept(self, given: GivenOrder, listener: OrderListener) -> None:
        self.orders.append(given)
        running = OrderUpdate(given.order_id, OrderPhase.RUNNING, "loading", 0.5)
        listener.order_updated(running)
        listener.order_updated(OrderUpdate(given.order_id, OrderPhase.DONE, "loaded", 1.0))


async def test_order_is_given_and_followed_to_its_end(tmp_path: Path) -> None:
    desk = ScriptedDesk()
    server = ControlServer(tmp_path / "control.sock", desk)
    await server.start()
    try:
        updates = [
            update
            async for update in give_order(tmp_path / "control.sock", "load", "small", 3, None)
        ]
    finally:
        await server.close()
    assert [(u["phase"], u["message"], u["progress_ratio"]) for u in updates] == [
        ("running", "loading", 0.5),
        ("done", "loaded", 1.0),
    ]
    (order,) = desk.orders
    assert order.order == ManageModel(ModelAction.LOAD, "small", 3)
    assert not (tmp_path / "control.sock").exists()


async def test_nobody_there_is_said_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NotRunningError, match="edge-agent run"):
        await anext(aiter(give_order(tmp_path / "control.sock", "pin", "small")))


@pytest.mark.parametrize(
    "line",
    [
        b"nonsense\n",
        b"\n",
        b"[]\n",
        b'{"action": "dance", "model": "a"}\n',
        b'{"action": "load", "model": 5}\n',
        b'{"action": "load", "model": "a", "slots": "many"}\n',
    ],
)
async def test_nonsense_is_refused_and_the_server_goes_on(tmp_path: Path, line: bytes) -> None:
    desk = ScriptedDesk()
    server = ControlServer(tmp_path / "control.sock", desk)
    await server.start()
    try:
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "control.sock"))
        writer.write(line)
        answer = json.loads(await asyncio.wait_for(reader.readline(), 10))
        writer.close()
        assert answer["phase"] == "failed"
        assert not desk.orders
        assert (tmp_path / "control.sock").stat().st_mode & 0o777 == 0o660
    finally:
        await server.close()
