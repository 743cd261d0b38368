"""What of a running controller is given to its store, and when."""

import asyncio

from controller.config import FleetSettings, OrderSettings
from controller.domain.cluster import NodeKind, PowerProfile
from controller.domain.node_report import NodeAttributes, NodeHello
from controller.fleet.sessions import FleetSessions
from controller.ids import NodeId
from controller.profiler.state import NodeForgotten, ProfilerState
from controller.storage.base import KnownNode
from controller.storage.keeping import StateKeeper
from controller.storage.memory import MemoryStore
from tests.fakes.records import finished_record

NODE = NodeId("pi-1")


def known(completed: int, acked: int) -> KnownNode:
    attributes = NodeAttributes(
        NodeKind.EDGE, "Raspberry Pi 5", 4, 8 << 30, "Debian 12", "0.1", "llama.cpp 1",
        PowerProfile(3.0, 9.0),
    )  # fmt: skip
    return KnownNode(NodeHello(NODE, "start-1", attributes, ()), False, completed, 0, 0,
                     "start-1", acked)  # fmt: skip


class Recording(MemoryStore):
    """Remembers in which order it was given things."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[str] = []

    def save_node(self, node: KnownNode) -> None:
        self.given.append(f"node {node.acked_sequence}")
        super().save_node(node)

    def save_finished(self, record) -> None:
        self.given.append("request")
        super().save_finished(record)


def keeper_over(store: MemoryStore):
    profiler = ProfilerState(stale_seconds=10.0)
    sessions = FleetSessions(FleetSettings(), profiler, OrderSettings())
    keeper = StateKeeper(store, profiler, sessions)
    asyncio.run(keeper.restore())
    return keeper, profiler, sessions


def test_a_finished_request_is_given_with_the_last_sequence_of_its_node():
    store = Recording()
    store.save_node(known(completed=3, acked=17))
    keeper, _, sessions = keeper_over(store)
    store.given.clear()
    sessions.restore(NODE, False, "start-1", 18)  # one more fact has arrived
    keeper.finished(finished_record())
    assert store.given == ["request", "node 18"]
    assert store.load().nodes == (known(completed=3, acked=18),)


def test_what_has_not_changed_is_not_given_again():
    store = Recording()
    store.save_node(known(completed=3, acked=17))
    keeper, _, _ = keeper_over(store)
    store.given.clear()
    keeper.keep_all()
    keeper.keep_all()
    assert store.given == []


def test_a_request_of_a_forgotten_node_does_not_bring_the_node_back():
    store = Recording()
    store.save_node(known(completed=3, acked=17))
    keeper, profiler, _ = keeper_over(store)
    profiler.apply(NodeForgotten(NODE), 1.0)
    keeper.keep_all()
    keeper.finished(finished_record())
    assert store.load().nodes == ()
