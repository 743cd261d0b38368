import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from controller.config import FleetSettings
from controller.domain.batch import Candidate, Placement
from controller.domain.completion import Completion, FinishReason
from controller.domain.order import MeasureSpeed
from controller.domain.request import InferenceRequest
from controller.fleet.convert import ATTRIBUTES, MODEL, BadReportError
from controller.fleet.links import NodeLink, NodeLinks
from controller.fleet.registry import Registry
from controller.fleet.sessions import FleetSessions, IncompatibleVersionError
from controller.ids import ModelName, NodeId, RequestId
from controller.profiler.events import RequestDispatched, RequestEnded
from controller.profiler.request_monitor import Claim
from controller.profiler.state import ProfilerState
from pointsman.v1 import fleet_pb2, types_pb2
from tests.fakes.reports import hello, reported_model, routable_nodes
from tests.fakes.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

PI = NodeId("pi")
SETTINGS = FleetSettings(health_interval_seconds=0.5, lease_seconds=5.0)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Fleet:
    """Sessions whose callbacks are written down."""

    def __init__(self, settings: FleetSettings = SETTINGS) -> None:
        self.profiler = ProfilerState(settings.lease_seconds)
        registry = Registry(settings.lease_seconds)
        self.links = NodeLinks(registry)
        self.heard: list[tuple[Any, ...]] = []
        self.settled: list[tuple[str, tuple[str, int]]] = []
        self.is_kept_later = False
        self.sessions = FleetSessions(
            settings, self.profiler, registry, self.links, self, self._settled
        )

    def on_progress(self, *heard: Any) -> None:
        self.heard.append(("progress", *heard))

    def on_completion(self, *heard: Any) -> bool:
        self.heard.append(("completion", *heard))
        return self.is_kept_later

    def on_node_lost(self, *heard: Any) -> None:
        self.heard.append(("lost", *heard))

    def _settled(self, node_id: NodeId) -> None:
        self.settled.append((node_id, self.links.last_settled(node_id)))
        if not self.is_kept_later:
            self.links.acknowledge(node_id, *self.links.last_settled(node_id))

    def connect(
        self,
        instance_id: str = "first",
        versions: tuple[int, int] = (1, 1),
        node_id: str = "pi",
    ) -> NodeLink:
        return self.sessions.connect(introduction(instance_id, versions, node_id))

    def receive(self, link: NodeLink, instance_id: str = "first", **message: Any) -> None:
        self.sessions.receive(link, fleet_pb2.ConnectRequest(**message), instance_id)


def introduction(
    instance_id: str = "first", versions: tuple[int, int] = (1, 1), node_id: str = "pi"
) -> fleet_pb2.Hello:
    return fleet_pb2.Hello(
        node_id=node_id,
        instance_id=instance_id,
        min_protocol_version=versions[0],
        max_protocol_version=versions[1],
        attributes=ATTRIBUTES.write(hello().attributes),
        models=[MODEL.write(reported_model())],
    )


async def sent(link: NodeLink, kind: str | None) -> fleet_pb2.ConnectResponse:
    """The next order of this kind that waits in a link."""
    while True:
        message = await link.next_message()
        assert message is not None
        if message.WhichOneof("message") == kind:
            return message


def answer(attempt: int = 1) -> fleet_pb2.Completion:
    return fleet_pb2.Completion(
        request_id="r1", attempt=attempt, finish_reason=types_pb2.FINISH_REASON_STOP
    )


HEALTH = fleet_pb2.HealthSample(uptime_seconds=1.0)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


# -- the first message -----------------------------------------------------------------------------


@pytest.mark.parametrize(("low", "high"), [(1, 1), (0, 1), (1, 99), (0, 5)])
async def test_highest_common_version_is_spoken(fleet: Fleet, low: int, high: int) -> None:
    link = fleet.connect(versions=(low, high))
    welcome = (await sent(link, "welcome")).welcome
    assert welcome.protocol_version == 1
    assert welcome.health_interval_seconds == SETTINGS.health_interval_seconds
    assert welcome.lease_seconds == SETTINGS.lease_seconds


@pytest.mark.parametrize(("low", "high"), [(99, 99), (2, 5), (0, 0), (5, 1)])
async def test_no_common_version_is_refused_and_both_ranges_named(
    fleet: Fleet, low: int, high: int
) -> None:
    with pytest.raises(IncompatibleVersionError, match=f"{low} to {high}, this controller 1 to 1"):
        fleet.connect(versions=(low, high))
    assert fleet.profiler.nodes == {}


async def test_node_that_introduces_itself_badly_is_not_taken_in(fleet: Fleet) -> None:
    bad = introduction()
    bad.models[0].calibration.prefill_tokens_per_second = -1.0
    with pytest.raises(BadReportError):
        fleet.sessions.connect(bad)
    assert fleet.profiler.nodes == {}


async def test_second_introduction_in_one_session_is_refused(fleet: Fleet) -> None:
    link = fleet.connect()
    with pytest.raises(BadReportError, match="second Hello"):
        fleet.receive(link, hello=introduction())


# -- facts -----------------------------------------------------------------------------------------


async def test_completion_is_acknowledged_and_taken_in_once(fleet: Fleet) -> None:
    link = fleet.connect()
    fleet.receive(link, sequence=1, completion=answer())
    fleet.receive(link, sequence=1, completion=answer())
    assert [entry[0] for entry in fleet.heard] == ["completion"]
    assert fleet.heard[0][1:4] == (PI, "r1", 1)
    assert isinstance(fleet.heard[0][4], Completion)
    assert fleet.heard[0][4].reason is FinishReason.STOP
    await sent(link, "probe")
    first, second = await link.next_message(), await link.next_message()
    assert first is not None
    assert second is not None
    assert (first.acked_sequence, second.acked_sequence) == (1, 1)


async def test_a_fact_is_acknowledged_only_when_all_up_to_it_is_kept(fleet: Fleet) -> None:
    fleet.is_kept_later = True
    link = fleet.connect()
    await sent(link, "probe")
    instance = introduction().instance_id
    fleet.receive(link, sequence=1, completion=answer())
    fleet.receive(link, sequence=2, order_update=fleet_pb2.OrderUpdate(order_id="o"))
    assert fleet.settled == [(PI, (instance, 0))]  # the first is held, so the second is as well
    fleet.receive(link, sequence=1, completion=answer())
    assert (await sent(link, None)).acked_sequence == 0
    assert fleet.links.settle(RequestId("r1")) == PI
    assert fleet.links.settle(RequestId("r1")) is None
    assert fleet.links.last_settled(PI) == (instance, 2)
    fleet.sessions.disconnect(link, "the network went")
    assert (await sent(fleet.connect(), "welcome")).welcome.acked_sequence == 0
    fleet.links.acknowledge(PI, instance, 2)
    assert (await sent(fleet.connect(), "welcome")).welcome.acked_sequence == 2


async def test_reconnected_agent_is_told_what_had_arrived(fleet: Fleet) -> None:
    link = fleet.connect()
    fleet.receive(link, sequence=3, completion=answer())
    fleet.sessions.disconnect(link, "the network went")
    assert (await sent(fleet.connect(), "welcome")).welcome.acked_sequence == 3
    assert (await sent(fleet.connect("second"), "welcome")).welcome.acked_sequence == 0


async def test_words_of_a_superseded_session_count_for_nothing(fleet: Fleet) -> None:
    """A late message of an older session never overwrites a newer state."""
    old = fleet.connect()
    new = fleet.connect()
    assert fleet.heard == [("lost", PI, "the agent connected again")]
    assert old.closed_because == "the agent connected again"
    fleet.receive(old, health=HEALTH)
    fleet.receive(old, models=fleet_pb2.ModelReport())
    fleet.receive(old, sequence=1, completion=answer())
    assert routable_nodes(fleet.profiler.snapshot(0.0)) == set()
    assert len(fleet.profiler.nodes[PI].models) == 1
    fleet.sessions.disconnect(old, "the old stream ended")
    assert fleet.profiler.nodes[PI].is_connected
    assert len(fleet.heard) == 1
    fleet.receive(new, sequence=1, completion=answer())
    assert fleet.heard[-1][0] == "completion"


async def test_session_that_ends_loses_its_node_once(fleet: Fleet) -> None:
    link = fleet.connect()
    fleet.sessions.disconnect(link, "the stream ended")
    fleet.sessions.disconnect(link, "again")
    assert fleet.heard == [("lost", PI, "the stream ended")]
    assert not fleet.profiler.nodes[PI].is_connected


async def test_progress_and_goodbye_are_passed_on(fleet: Fleet) -> None:
    link = fleet.connect()
    progress = fleet_pb2.WorkProgress(request_id="r1", attempt=2, text="Hi", tokens=1)
    fleet.receive(link, progress=progress)
    assert fleet.heard == [("progress", PI, "r1", 2, "Hi", 1)]
    fleet.receive(link, goodbye=fleet_pb2.Goodbye(reason="update"))
    assert fleet.profiler.nodes[PI].is_draining
    assert fleet.profiler.nodes[PI].is_connected


async def test_echo_of_a_probe_gives_the_round_trip(fleet: Fleet) -> None:
    link = fleet.connect()
    nonce = (await sent(link, "probe")).probe.nonce
    fleet.receive(link, probe_echo=fleet_pb2.ProbeEcho(nonce=nonce + 1000))
    assert fleet.profiler.nodes[PI].round_trip_seconds is None
    fleet.receive(link, probe_echo=fleet_pb2.ProbeEcho(nonce=nonce))
    measured = fleet.profiler.nodes[PI].round_trip_seconds
    assert measured is not None
    assert measured >= 0.0
    fleet.receive(link, probe_echo=fleet_pb2.ProbeEcho(nonce=nonce))
    assert fleet.profiler.nodes[PI].round_trip_seconds == measured


@asynccontextmanager
async def probing() -> AsyncIterator[tuple[Fleet, NodeLink]]:
    """A fleet of one node that is probed all the time; its first probe has been echoed."""
    fleet = Fleet(FleetSettings(probe_interval_seconds=0.005, goodput_interval_seconds=3600.0))
    link = fleet.connect()
    task = asyncio.create_task(fleet.sessions.probe_paths())
    try:
        await echoed(fleet, link)
        yield fleet, link
    finally:
        task.cancel()


async def echoed(fleet: Fleet, link: NodeLink, echo_bytes: int | None = None) -> fleet_pb2.Probe:
    """The node's next probe, answered."""
    probe = (await asyncio.wait_for(sent(link, "probe"), PATIENCE_SECONDS)).probe
    padding = bytes(probe.echo_bytes if echo_bytes is None else echo_bytes)
    fleet.receive(link, probe_echo=fleet_pb2.ProbeEcho(nonce=probe.nonce, padding=padding))
    return probe


async def sizes(fleet: Fleet, link: NodeLink) -> set[bool]:
    """Whether the next probes carry something."""
    probes = [await echoed(fleet, link) for _ in range(4)]
    return {bool(probe.padding or probe.echo_bytes) for probe in probes}


async def test_node_is_probed_again_only_when_it_has_echoed() -> None:
    async with probing() as (fleet, link):
        waiting = (await asyncio.wait_for(sent(link, "probe"), PATIENCE_SECONDS)).probe
        with pytest.raises(asyncio.TimeoutError):  # the interval passes many times over
            await asyncio.wait_for(sent(link, "probe"), 0.2)
        fleet.receive(link, probe_echo=fleet_pb2.ProbeEcho(nonce=waiting.nonce))
        assert (await echoed(fleet, link)).nonce != waiting.nonce


async def test_probe_that_a_lost_session_never_echoed_is_forgotten() -> None:
    async with probing() as (fleet, link):
        await asyncio.wait_for(sent(link, "probe"), PATIENCE_SECONDS)
        again = fleet.connect("second")
        first, second = await echoed(fleet, again), await echoed(fleet, again)
        assert first.nonce != second.nonce


async def test_nothing_is_sent_to_measure_goodput_while_a_request_is_under_way() -> None:
    async with probing() as (fleet, link):
        request_id = RequestId("r1")
        fleet.profiler.apply(
            RequestDispatched(PI, request_id, Claim(ModelName("small"), 1.0, 9.0)), 0.0
        )
        await echoed(fleet, link)  # one that was under way already may carry something
        assert await sizes(fleet, link) == {False}
        fleet.profiler.apply(RequestEnded(PI, request_id, False), 1.0)
        assert True in await sizes(fleet, link)


async def test_nothing_is_sent_to_measure_goodput_while_an_order_is_carried_out() -> None:
    async with probing() as (fleet, link):
        order = fleet.sessions.order(PI, MeasureSpeed(None))
        following = asyncio.ensure_future(anext(order))
        await asyncio.sleep(0)
        await echoed(fleet, link)
        assert await sizes(fleet, link) == {False}
        following.cancel()


async def test_echo_that_is_shorter_than_asked_for_tells_nothing_of_the_way_back() -> None:
    """An older agent knows no echo_bytes."""
    async with probing() as (fleet, link):
        probes = [await echoed(fleet, link, echo_bytes=0) for _ in range(6)]
        assert any(probe and probe.echo_bytes for probe in probes)
        record = fleet.profiler.nodes[PI]
        assert record.path.receive_bytes_per_second is not None
        assert record.path.transmit_bytes_per_second is None


async def test_echo_of_another_nodes_probe_counts_for_nobody(fleet: Fleet) -> None:
    link, other = fleet.connect(), fleet.connect(node_id="vm")
    nonce = (await sent(link, "probe")).probe.nonce
    fleet.receive(other, probe_echo=fleet_pb2.ProbeEcho(nonce=nonce))
    assert [record.round_trip_seconds for record in fleet.profiler.nodes.values()] == [None, None]


async def test_message_of_a_newer_agent_is_ignored_and_keeps_the_lease(fleet: Fleet) -> None:
    link = fleet.connect()
    fleet.receive(link)
    assert fleet.heard == []
    assert fleet.profiler.nodes[PI].is_connected


# -- orders ----------------------------------------------------------------------------------------


def placement(node_id: NodeId = PI) -> Placement:
    chosen = Candidate(node_id, ModelName("small"), 0.5, "prior", 0.0, 1.0, 1.0, 1.0, 0.01, 50.0)
    return Placement(RequestId("r1"), chosen, ())


async def test_work_goes_down_the_link_of_its_node(fleet: Fleet) -> None:
    link = fleet.connect()
    request = InferenceRequest(RequestId("r1"), "Hello")
    assert fleet.links.send_work(PI, request, 2, placement(), 9.0)
    order = (await sent(link, "work")).work
    assert (order.request_id, order.attempt, order.model) == ("r1", 2, "small")
    fleet.links.send_cancel(PI, RequestId("r1"), 2)
    cancel = (await sent(link, "cancel")).cancel
    assert (cancel.request_id, cancel.attempt) == ("r1", 2)


async def test_work_for_a_node_that_is_gone_is_not_sent(fleet: Fleet) -> None:
    request = InferenceRequest(RequestId("r1"), "Hello")
    assert not fleet.links.send_work(PI, request, 1, placement(), 9.0)
    fleet.links.send_cancel(PI, RequestId("r1"), 1)
    link = fleet.connect()
    fleet.sessions.disconnect(link, "gone")
    assert not fleet.links.send_work(PI, request, 1, placement(), 9.0)


async def test_drain_reaches_the_node_and_outlives_its_reconnect(fleet: Fleet) -> None:
    link = fleet.connect()
    fleet.sessions.drain(PI, True)
    assert (await sent(link, "drain")).drain.is_draining
    assert fleet.profiler.nodes[PI].is_draining
    again = fleet.connect("second")
    assert (await sent(again, "welcome")).welcome.is_draining
    assert fleet.profiler.nodes[PI].is_draining
    fleet.sessions.drain(PI, False)
    assert not (await sent(again, "drain")).drain.is_draining
    assert not fleet.profiler.nodes[PI].is_draining


async def test_closing_ends_every_link(fleet: Fleet) -> None:
    link = fleet.connect()
    fleet.sessions.close()
    assert link.closed_because == "the controller is stopping"
    assert await link.next_message() is None
