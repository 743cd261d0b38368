import asyncio
from contextlib import aclosing

import pytest

from controller.config import OrderSettings
from controller.domain.order import (
    ManageModel,
    MeasureSpeed,
    ModelAction,
    Order,
    OrderPhase,
    OrderUpdate,
)
from controller.errors import NodeLostError, OrderTimeoutError, TooManyOrdersError
from controller.fleet.orders import OrderBook
from controller.ids import ModelName, NodeId
from tests.fakes.waiting import until

pytestmark = pytest.mark.anyio

PI, VM = NodeId("pi"), NodeId("vm")
LOAD = ManageModel(ModelAction.LOAD, ModelName("small"), slots=2)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Node:
    """The node's end: writes down the orders it gets."""

    def __init__(self, settings: OrderSettings | None = None) -> None:
        self.book = OrderBook(settings or OrderSettings())
        self.got: list[str] = []
        self.is_there = True

    def send(self, order_id: str) -> bool:
        if self.is_there:
            self.got.append(order_id)
        return self.is_there

    def says(self, phase: OrderPhase, message: str = "", index: int = -1) -> None:
        self.book.updated(PI, OrderUpdate(self.got[index], phase, message))

    async def follow(self, order: Order = LOAD, node_id: NodeId = PI) -> list[OrderUpdate]:
        async with aclosing(self.book.follow(node_id, order, self.send)) as updates:
            return [update async for update in updates]

    async def begin(self, order: Order = LOAD) -> "asyncio.Task[list[OrderUpdate]]":
        count = len(self.got)
        task = asyncio.create_task(self.follow(order))
        await until(lambda: len(self.got) > count or task.done())
        return task


async def test_updates_are_relayed_to_the_last() -> None:
    node = Node()
    task = await node.begin()
    node.says(OrderPhase.RUNNING, "downloading")
    node.says(OrderPhase.RUNNING, "loading")
    node.says(OrderPhase.DONE)
    assert [update.message for update in await task] == ["downloading", "loading", ""]
    assert len(node.book) == 0


async def test_failed_order_ends_with_the_nodes_own_words() -> None:
    node = Node()
    task = await node.begin()
    node.says(OrderPhase.FAILED, "the disk is full")
    (last,) = await task
    assert (last.phase, last.message) == (OrderPhase.FAILED, "the disk is full")


async def test_the_same_order_given_twice_is_one_order() -> None:
    """Whoever repeats it hears where it stands, and its end."""
    node = Node()
    first = await node.begin()
    node.says(OrderPhase.RUNNING, "loading")
    second = asyncio.create_task(node.follow())
    other = await node.begin(MeasureSpeed())
    assert len(node.got) == 2
    node.says(OrderPhase.DONE, index=0)
    assert [u.message for u in await first] == [u.message for u in await second] == ["loading", ""]
    node.says(OrderPhase.DONE)
    await other
    third = await node.begin()  # the first has ended, so this is a new one
    assert len(node.got) == 3
    node.says(OrderPhase.DONE)
    await third


async def test_repeated_and_foreign_updates_change_nothing() -> None:
    node = Node()
    task = await node.begin()
    node.book.updated(VM, OrderUpdate(node.got[0], OrderPhase.FAILED, "not mine"))
    node.book.updated(PI, OrderUpdate("unknown", OrderPhase.FAILED))
    node.says(OrderPhase.DONE)
    node.says(OrderPhase.DONE)
    assert len(await task) == 1


async def test_node_that_is_lost_meanwhile_is_a_clear_error() -> None:
    node = Node()
    task = await node.begin()
    node.says(OrderPhase.RUNNING, "loading")
    node.book.lost(VM, "another")
    node.book.lost(PI, "nothing was heard for 10 s")
    with pytest.raises(NodeLostError, match=r"pi was lost .* nothing was heard for 10 s"):
        await task
    assert len(node.book) == 0


async def test_node_that_is_away_gets_no_order() -> None:
    node = Node()
    node.is_there = False
    with pytest.raises(NodeLostError, match="not connected"):
        await node.follow()
    assert len(node.book) == 0


async def test_agent_that_does_not_know_such_orders_is_told_apart_from_a_slow_one() -> None:
    node = Node(OrderSettings(accept_seconds=0.02, silence_seconds=0.03))
    with pytest.raises(OrderTimeoutError, match="update it"):
        await node.follow()
    task = await node.begin()
    assert len(node.got) == 2  # nobody had taken up the first
    node.says(OrderPhase.RUNNING, "loading")
    with pytest.raises(OrderTimeoutError, match="last status: loading"):
        await task


async def test_order_outlives_the_operator_who_left() -> None:
    node = Node()
    task = await node.begin()
    node.says(OrderPhase.RUNNING, "loading")
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert node.book.is_busy(PI)
    again = asyncio.create_task(node.follow())
    for _ in range(10):  # until it has joined
        await asyncio.sleep(0)
    node.says(OrderPhase.DONE)
    assert (await again)[-1].phase is OrderPhase.DONE
    assert len(node.got) == 1
    assert not node.book.is_busy(PI)


async def test_orders_are_bounded() -> None:
    node = Node(OrderSettings(max_running=1))
    task = await node.begin()
    with pytest.raises(TooManyOrdersError):
        await node.follow(MeasureSpeed())
    node.says(OrderPhase.DONE)
    await task
