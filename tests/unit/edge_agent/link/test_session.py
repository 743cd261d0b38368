"""The agent's end of the stream, against a controller that follows a script."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import grpc
import pytest

from edge_agent.config import ControllerSettings
from edge_agent.errors import UsageError
from edge_agent.link.backoff import Backoff
from edge_agent.link.outgoing import Outgoing
from edge_agent.link.session import LinkSession, check_address
from edge_agent.serving.completion import Completion, FinishReason, Usage
from edge_agent.serving.orders import OrderPhase, OrderUpdate
from edge_agent.serving.work import WorkDesk, WorkOrder
from pointsman.v1 import fleet_pb2
from tests.fakes.fleet_service import ScriptedController, ScriptedSession, scripted_controller
from tests.fakes.waiting import until

pytestmark = pytest.mark.anyio

SOON = Backoff(first_seconds=0.01, cap_seconds=0.02)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", autouse=True)
async def one_loop(anyio_backend: str) -> None:
    """One event loop for this file.

    What gRPC still has to say of one test's streams comes during the next test, and must not meet a
    loop that is closed.
    """


class Desk:
    """A work desk that writes down what it is told."""

    def __init__(self) -> None:
        self.is_draining = False
        self.orders: list[WorkOrder] = []
        self.cancelled: list[tuple[str, int]] = []
        self.cancelled_all = 0

    def accept(self, order: WorkOrder) -> None:
        self.orders.append(order)

    def cancel(self, request_id: str, attempt: int) -> None:
        self.cancelled.append((request_id, attempt))

    def cancel_all(self) -> None:
        self.cancelled_all += 1


@dataclass
class Introduction:
    """What the node of a bench says of itself."""

    bench: "Bench"
    node_id: str = "pi"
    instance_id: str = "first-start"

    def attributes(self) -> fleet_pb2.StaticAttributes:
        return fleet_pb2.StaticAttributes(hardware="Board")

    def models(self) -> list[fleet_pb2.ModelState]:
        return list(self.bench.models)

    def health(self) -> fleet_pb2.HealthSample:
        return self.bench.health()


@dataclass
class Bench:
    """A link to a scripted controller."""

    controller: ScriptedController
    address: str
    desk: Desk = field(default_factory=Desk)
    health_failures: int = 0
    models: list[fleet_pb2.ModelState] = field(
        default_factory=lambda: [fleet_pb2.ModelState(name="small")]
    )

    def __post_init__(self) -> None:
        self.outgoing = Outgoing(self.address)
        self.link = LinkSession(
            ControllerSettings(self.address, insecure=True),
            Introduction(self),
            self.outgoing,
            cast(WorkDesk, self.desk),
            None,
            random.Random(1),
            SOON,
        )

    def health(self) -> fleet_pb2.HealthSample:
        if self.health_failures:
            self.health_failures -= 1
            raise RuntimeError("a sensor of a kind that nobody foresaw")
        return fleet_pb2.HealthSample(uptime_seconds=1.0)

    async def connected(self, acked_sequence: int = 0) -> ScriptedSession:
        session = await self.controller.next_session()
        session.welcome(acked_sequence=acked_sequence)
        await until(lambda: self.outgoing.is_connected)
        return session


@asynccontextmanager
async def bench(folder: Path) -> AsyncIterator[Bench]:
    async with scripted_controller(folder) as (controller, address):
        made = Bench(controller, address)
        task = asyncio.create_task(made.link.run())
        try:
            yield made
            assert not task.done(), "the link goes on for ever"
        finally:
            task.cancel()
            await asyncio.wait([task])


def completion(name: str = "r1", attempt: int = 1) -> Completion:
    return Completion(name, attempt, "small", FinishReason.STOP, Usage(completion_tokens=3))


# -- introduction ----------------------------------------------------------------------------------


async def test_agent_introduces_itself_and_reports(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        assert made.outgoing.connected_seconds is None
        session = await made.connected()
        assert (session.hello.node_id, session.hello.instance_id) == ("pi", "first-start")
        assert session.hello.min_protocol_version <= 1 <= session.hello.max_protocol_version
        assert session.hello.attributes.hardware == "Board"
        assert [model.name for model in session.hello.models] == ["small"]
        await session.until("health", 3)
        assert made.outgoing.connected_seconds is not None
        assert made.outgoing.last_error is None


async def test_changed_models_are_reported_anew(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        session = await made.connected()
        await session.until("models")
        made.models.append(fleet_pb2.ModelState(name="large"))
        made.outgoing.models_changed()
        report = (await session.until("models", 2))[-1]
        assert [model.name for model in report.models] == ["small", "large"]


async def test_refused_version_is_shown_and_tried_again(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        made.controller.refusal = (
            grpc.StatusCode.FAILED_PRECONDITION,
            "the agent speaks protocol 1 to 1, this controller 7 to 9",
        )
        refusal = "failed_precondition: the agent speaks protocol 1 to 1, this controller 7 to 9"
        await until(lambda: refusal in (made.outgoing.last_error or ""))
        assert not made.outgoing.is_connected
        made.controller.refusal = None
        await made.connected()
        assert made.outgoing.last_error is None


async def test_controller_that_does_not_say_welcome_first_is_left(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        session = await made.controller.next_session()
        session.say(drain=fleet_pb2.DrainOrder(is_draining=True))
        await until(lambda: made.outgoing.last_error == "the controller did not say Welcome")
        assert not made.desk.is_draining
        await made.connected()


async def test_address_where_nobody_answers_is_named(tmp_path: Path) -> None:
    made = Bench(ScriptedController(), f"unix:{tmp_path / 'nobody.sock'}")
    task = asyncio.create_task(made.link.run())
    assert "nobody.sock" in (made.outgoing.last_error or "")
    await until(lambda: "unavailable" in (made.outgoing.last_error or ""))
    assert "nobody.sock" in (made.outgoing.last_error or "")
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])


# -- orders ----------------------------------------------------------------------------------------


async def test_orders_reach_the_desk(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        session = await made.connected()
        session.say(work=fleet_pb2.WorkOrder(request_id="r1", attempt=2, prompt="Hello"))
        session.say(cancel=fleet_pb2.CancelWork(request_id="r1", attempt=2))
        session.say(drain=fleet_pb2.DrainOrder(is_draining=True))
        await until(lambda: made.desk.is_draining)
        assert [(order.request_id, order.attempt) for order in made.desk.orders] == [("r1", 2)]
        assert made.desk.cancelled == [("r1", 2)]
        session.say(drain=fleet_pb2.DrainOrder(is_draining=False))
        await until(lambda: not made.desk.is_draining)


async def test_drain_is_learned_with_the_welcome(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        (await made.controller.next_session()).welcome(is_draining=True)
        await until(lambda: made.outgoing.is_connected)
        assert made.desk.is_draining


async def test_probe_is_echoed_while_answers_stream(tmp_path: Path) -> None:
    """The path is measured whatever else there is to say."""
    async with bench(tmp_path) as made:
        session = await made.connected()
        for number in range(100):
            made.outgoing.progressed(f"r{number}", 1, "text", 1)
        session.say(probe=fleet_pb2.Probe(nonce=77, padding=b"x" * 100))
        (echo,) = await session.until("probe_echo")
        assert echo.nonce == 77
        assert len(await session.until("progress", 100)) == 100


async def test_probe_asks_for_padding_back_and_gets_no_more_than_a_mebibyte(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path) as made:
        session = await made.connected()
        session.say(probe=fleet_pb2.Probe(nonce=1, echo_bytes=1000))
        session.say(probe=fleet_pb2.Probe(nonce=2, echo_bytes=1 << 31))
        echoes = {echo.nonce: echo for echo in await session.until("probe_echo", 2)}
        assert len(echoes[1].padding) == 1000
        assert len(echoes[2].padding) == 1 << 20


async def test_end_of_an_order_is_sent_again_until_it_is_acknowledged(tmp_path: Path) -> None:
    """1. an order ends, 2. the stream breaks, 3. the end comes again with its number."""
    async with bench(tmp_path) as made:
        session = await made.connected()
        made.outgoing.order_updated(OrderUpdate("o1", OrderPhase.RUNNING, "loading", 0.5))
        (running,) = await session.until("order_update")
        assert (running.message, running.progress_ratio) == ("loading", 0.5)
        made.outgoing.order_updated(OrderUpdate("o1", OrderPhase.DONE, "loaded", 1.0))
        await session.until("order_update", 2)
        numbers = [
            m.sequence for m in session.received if m.WhichOneof("message") == "order_update"
        ]
        assert numbers == [0, 1]
        session.end()
        again = await made.connected()
        (end,) = await again.until("order_update")
        assert end.phase == fleet_pb2.ORDER_PHASE_DONE
        again.say(acked_sequence=1)
        await until(lambda: made.outgoing.unacknowledged_completions == 0)


async def test_order_that_this_agent_does_not_know_is_refused_at_once(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        session = await made.connected()
        session.say(model_order=fleet_pb2.ModelOrder(order_id="o1", model="small"))
        (update,) = await session.until("order_update")
        assert update.phase == fleet_pb2.ORDER_PHASE_FAILED
        assert "update it" in update.message


async def test_message_of_a_newer_controller_is_ignored(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        session = await made.connected()
        unknown_field = bytes([0xFA, 0x07, 0x03]) + b"new"  # field 127, three bytes
        session.outgoing.put_nowait(fleet_pb2.ConnectResponse.FromString(unknown_field))
        order = fleet_pb2.WorkOrder(request_id="r1", attempt=1, prompt="Hello")
        order = fleet_pb2.WorkOrder.FromString(order.SerializeToString() + unknown_field)
        session.say(work=order)
        await until(lambda: made.desk.orders)
        assert made.outgoing.is_connected


# -- answers ---------------------------------------------------------------------------------------


async def test_text_comes_before_its_end_and_is_merged_meanwhile(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        session = await made.connected()
        for number in range(50):
            made.outgoing.progressed("r1", 1, f"{number} ", 1)
            if number % 7 == 0:
                await asyncio.sleep(0)
        made.outgoing.completed(completion())
        await session.until("completion")
        kinds = [
            kind
            for message in session.received
            if (kind := message.WhichOneof("message")) in ("progress", "completion")
        ]
        assert kinds[-1] == "completion"
        assert kinds.count("completion") == 1
        progress = session.all("progress")
        assert "".join(p.text for p in progress) == "".join(f"{n} " for n in range(50))
        assert sum(p.tokens for p in progress) == 50
        assert len(progress) < 50


async def test_answers_of_several_requests_never_mix(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        session = await made.connected()
        for number in range(30):
            for name in ("a", "b", "c"):
                made.outgoing.progressed(name, 1, f"{name}{number} ", 1)
            await asyncio.sleep(0)
        for name in ("a", "b", "c"):
            made.outgoing.completed(completion(name))
        await session.until("completion", 3)
        for name in ("a", "b", "c"):
            text = "".join(p.text for p in session.all("progress") if p.request_id == name)
            assert text == "".join(f"{name}{number} " for number in range(30))


async def test_sign_of_progress_without_text_is_sent(tmp_path: Path) -> None:
    """A long prompt is being read."""
    async with bench(tmp_path) as made:
        session = await made.connected()
        made.outgoing.progressed("r1", 1, "", 0)
        (progress,) = await session.until("progress")
        assert (progress.request_id, progress.text, progress.tokens) == ("r1", "", 0)


async def test_completions_are_numbered_and_kept_until_acknowledged(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        session = await made.connected()
        made.outgoing.completed(completion("r1"))
        made.outgoing.completed(completion("r2"))
        await session.until("completion", 2)
        numbered = [m.sequence for m in session.received if m.HasField("completion")]
        assert numbered == [1, 2]
        assert {m.sequence for m in session.received if not m.HasField("completion")} == {0}
        assert made.outgoing.unacknowledged_completions == 2
        session.say(acked_sequence=1)
        await until(lambda: made.outgoing.unacknowledged_completions == 1)
        session.say(acked_sequence=2, probe=fleet_pb2.Probe(nonce=1))
        await until(lambda: made.outgoing.unacknowledged_completions == 0)


async def test_unacknowledged_completions_are_sent_again_after_a_reconnect(
    tmp_path: Path,
) -> None:
    """1. two answers end, one is acknowledged; 2. the link breaks; 3. another ends meanwhile."""
    async with bench(tmp_path) as made:
        session = await made.connected()
        made.outgoing.completed(completion("r1"))
        made.outgoing.completed(completion("r2"))
        await session.until("completion", 2)
        session.say(acked_sequence=1)
        await until(lambda: made.outgoing.unacknowledged_completions == 1)
        session.end()
        await until(lambda: not made.outgoing.is_connected)
        made.outgoing.completed(completion("r3"))
        again = await made.connected(acked_sequence=1)
        await again.until("completion", 2)
        sent = [(m.sequence, m.completion.request_id) for m in again.received if m.sequence]
        assert sent == [(2, "r2"), (3, "r3")]
        again.end()
        last = await made.connected(acked_sequence=3)
        await last.until("health", 2)
        assert last.all("completion") == []
        assert made.outgoing.unacknowledged_completions == 0


async def test_text_of_a_lost_session_is_not_sent_into_the_next(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        session = await made.connected()
        made.outgoing.progressed("r1", 1, "before", 1)
        await session.until("progress")
        session.end()
        await until(lambda: not made.outgoing.is_connected)
        assert made.desk.cancelled_all >= 1
        made.outgoing.progressed("r1", 1, "between", 1)
        again = await made.connected()
        await again.until("health", 2)
        assert again.all("progress") == []


# -- staying connected -----------------------------------------------------------------------------


async def test_reason_of_a_broken_link_is_shown_until_it_is_back(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        (await made.connected()).end(grpc.StatusCode.UNAVAILABLE, "the controller is stopping")
        await until(lambda: made.outgoing.last_error)
        assert "the controller is stopping" in (made.outgoing.last_error or "")
        await made.connected()
        assert made.outgoing.last_error is None


async def test_health_report_survives_a_sensor_that_fails(tmp_path: Path) -> None:
    """The session goes on, and the next sample is sent."""
    async with bench(tmp_path) as made:
        made.health_failures = 2
        session = await made.connected()
        await session.until("health", 2)
        assert made.controller.sessions.empty()


async def test_order_that_the_agent_trips_over_does_not_end_the_link(tmp_path: Path) -> None:
    """Whatever fails, the agent connects again without a restart."""
    async with bench(tmp_path) as made:
        session = await made.connected()

        def trip(order: WorkOrder) -> None:
            raise KeyError("a bug")

        made.desk.accept = trip  # type: ignore[method-assign]
        session.say(work=fleet_pb2.WorkOrder(request_id="r1", attempt=1, prompt="Hello"))
        await until(lambda: "KeyError" in (made.outgoing.last_error or ""))
        await made.connected()


async def test_goodbye_is_said_and_completions_are_flushed_in_time(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        session = await made.connected()
        await made.outgoing.say_goodbye("update", 5.0)
        (goodbye,) = await session.until("goodbye")
        assert goodbye.reason == "update"
        made.outgoing.completed(completion())
        flushing = asyncio.create_task(made.outgoing.flush(5.0))
        await session.until("completion")
        assert not flushing.done()
        session.say(acked_sequence=1)
        await flushing
        assert made.outgoing.unacknowledged_completions == 0


async def test_stopping_waits_for_nobody_who_is_away(tmp_path: Path) -> None:
    made = Bench(ScriptedController(), f"unix:{tmp_path / 'nobody.sock'}")
    made.outgoing.completed(completion())
    await made.outgoing.say_goodbye("update", 1000.0)
    await made.outgoing.flush(1000.0)
    assert made.outgoing.unacknowledged_completions == 1


# -- addresses -------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["localhost:50551", "10.0.0.1:1", "[::1]:65535", "a.b:80"])
def test_address_of_host_and_port_is_taken(address: str) -> None:
    check_address(ControllerSettings(address))


@pytest.mark.parametrize(
    "address", ["", "localhost", ":50551", "localhost:", "localhost:0", "localhost:65536", "h:http"]
)
def test_address_that_cannot_be_one_says_what_one_looks_like(address: str) -> None:
    with pytest.raises(UsageError, match=r"host:port such as controller\.example:50551"):
        check_address(ControllerSettings(address))
