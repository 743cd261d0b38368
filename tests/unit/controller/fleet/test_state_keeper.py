"""What of a running controller is given to its store, and when."""

import asyncio
from dataclasses import replace

from controller.config import FleetSettings
from controller.domain.cluster import NodeKind, PowerProfile
from controller.domain.node_report import NodeAttributes, NodeHello
from controller.fleet.links import NodeLinks
from controller.fleet.registry import Registry
from controller.fleet.state_keeper import StateKeeper
from controller.ids import NodeId
from controller.profiler.events import NodeForgotten
from controller.profiler.state import ProfilerState
from controller.storage.base import KnownNode
from controller.storage.memory import MemoryStore
from tests.fakes.records import candidate, finished_record
from tests.fakes.reports import SPEEDS, hello, join, reported_model, routable_nodes

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
    links = NodeLinks(Registry(FleetSettings().lease_seconds))
    keeper = StateKeeper(store, profiler, links)
    asyncio.run(keeper.restore())
    return keeper, profiler, links


def test_a_finished_request_is_given_with_the_last_sequence_of_its_node():
    store = Recording()
    store.save_node(known(completed=3, acked=17))
    keeper, _, links = keeper_over(store)
    store.given.clear()
    links.restore(NODE, False, "start-1", 18)  # one more fact has arrived
    keeper.finished(finished_record())
    assert store.given == ["request", "node 18"]
    assert store.load().nodes == (known(completed=3, acked=18),)


def test_what_a_node_told_of_a_request_that_went_on_elsewhere_is_kept_with_it():
    """Its fact is settled by the request's end, wherever that was answered."""
    store = Recording()
    store.save_node(known(completed=3, acked=17))
    keeper, _, links = keeper_over(store)
    store.given.clear()
    links.restore(NODE, False, "start-1", 18)
    moved = finished_record()
    assert moved.placement is not None
    moved.placement = replace(moved.placement, chosen=candidate("elsewhere"))
    links.settle = lambda request_id: NODE
    keeper.finished(moved)
    assert store.given == ["request", "node 18"]


def test_speeds_that_were_learnt_make_a_node_routable_after_a_restart():
    store = MemoryStore()
    keeper, profiler, _ = keeper_over(store)
    join(profiler, 1.0, hello(NODE))
    assert store.load().calibrations == ()
    keeper.keep_all()
    (kept,) = store.load().calibrations
    assert kept.calibration.decode_tokens_per_second == SPEEDS.decode_tokens_per_second
    _, restarted, _ = keeper_over(store)
    join(restarted, 2.0, hello(NODE, models=(reported_model(calibration=None),)))
    assert routable_nodes(restarted.snapshot(2.0)) == {NODE}


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
