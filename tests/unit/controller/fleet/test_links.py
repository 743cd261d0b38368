import pytest

from controller.fleet.links import NodeLink
from controller.ids import NodeId, SessionId
from pointsman.v1 import fleet_pb2

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def link() -> NodeLink:
    return NodeLink(NodeId("pi"), SessionId("pi-1"))


def order(attempt: int) -> fleet_pb2.ConnectResponse:
    return fleet_pb2.ConnectResponse(work=fleet_pb2.WorkOrder(attempt=attempt))


async def test_orders_come_out_in_the_order_they_went_in(link: NodeLink) -> None:
    for attempt in range(5):
        assert link.send(order(attempt))
    received = [await link.next_message() for _ in range(5)]
    assert [message.work.attempt for message in received if message] == [0, 1, 2, 3, 4]


async def test_closed_link_takes_nothing_and_keeps_its_first_reason(link: NodeLink) -> None:
    link.close("the node left")
    link.close("the controller is stopping")
    assert not link.send(order(1))
    assert await link.next_message() is None
    assert await link.next_message() is None
    assert link.closed_because == "the node left"


async def test_node_that_reads_nothing_is_given_up(link: NodeLink) -> None:
    sent = 0
    while link.send(order(sent)):
        sent += 1
        assert sent < 100_000
    assert link.closed_because == "the node has stopped reading its orders"
    assert await link.next_message() is None
