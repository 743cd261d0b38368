"""What the controller's gRPC server promises, seen by peers that speak only the protocol."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from controller.config import FleetSettings
from pointsman.v1 import admin_pb2, fleet_pb2, fleet_pb2_grpc, types_pb2
from tests.fakes.fleet import RunningFleet, infer_request, running_fleet
from tests.fakes.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

CODE = grpc.StatusCode
SERVICES = tuple(f"pointsman.v1.{name}Service" for name in ("Router", "Fleet", "Admin"))
UNKNOWN_FIELD = bytes([0xFA, 0x07, 0x03]) + b"new"
"""Field 127 of three bytes, which no message has yet."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def introduction(node_id: str = "raw", **fields: Any) -> fleet_pb2.Hello:
    fields.setdefault("min_protocol_version", 1)
    fields.setdefault("max_protocol_version", 1)
    fields.setdefault("instance_id", "first")
    return fleet_pb2.Hello(
        node_id=node_id,
        models=[
            fleet_pb2.ModelState(
                name="raw-model",
                phase=fleet_pb2.MODEL_PHASE_READY,
                context_tokens=500,
                slots=1,
                has_chat_template=True,
                calibration=fleet_pb2.Calibration(
                    prefill_tokens_per_second=100.0,
                    decode_tokens_per_second=10.0,
                    saturated_decode_tokens_per_second=10.0,
                    utilisation_ratio=1.0,
                ),
            )
        ],
        **fields,
    )


class RawAgent:
    """An agent that does nothing by itself."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.received: list[fleet_pb2.ConnectResponse] = []

    async def say(self, **message: Any) -> None:
        await self.call.write(fleet_pb2.ConnectRequest(**message))

    async def until(self, kind: str) -> Any:
        """The next message of this kind."""
        while True:
            message = await asyncio.wait_for(self.call.read(), PATIENCE_SECONDS)
            assert message is not grpc.aio.EOF, await self.call.details()
            self.received.append(message)
            if message.WhichOneof("message") == kind:
                return getattr(message, kind)

    async def acknowledged(self, sequence: int) -> None:
        while not any(message.acked_sequence >= sequence for message in self.received):
            message = await asyncio.wait_for(self.call.read(), PATIENCE_SECONDS)
            assert message is not grpc.aio.EOF, await self.call.details()
            self.received.append(message)

    async def ending(self) -> tuple[grpc.StatusCode, str]:
        """The status that the controller ends the stream with."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await asyncio.wait_for(self.call.read(), PATIENCE_SECONDS) is not grpc.aio.EOF:
                pass
        return await self.call.code(), await self.call.details()

    async def report_health(self) -> None:
        await self.say(health=fleet_pb2.HealthSample(uptime_seconds=1.0))


@asynccontextmanager
async def raw_agent(
    fleet: RunningFleet, hello: fleet_pb2.Hello | None = None
) -> AsyncIterator[RawAgent]:
    """A stream that has sent its Hello, or nothing at all."""
    async with grpc.aio.insecure_channel(fleet.listening.grpc_address) as channel:
        stub: fleet_pb2_grpc.FleetServiceAsyncStub = fleet_pb2_grpc.FleetServiceStub(channel)
        agent = RawAgent(stub.Connect())
        if hello is not None:
            await agent.say(hello=hello)
        yield agent
        agent.call.cancel()


# -- first words -----------------------------------------------------------------------------------


async def test_agent_of_another_version_is_refused_and_both_ranges_named(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        hello = introduction(min_protocol_version=99, max_protocol_version=99)
        async with raw_agent(fleet, hello) as agent:
            code, details = await agent.ending()
        assert code is CODE.FAILED_PRECONDITION
        assert "the agent speaks protocol 99 to 99" in details
        assert "this controller 1 to 1" in details
        assert await fleet.nodes() == {}


async def test_agent_that_also_speaks_newer_versions_is_answered_in_ours(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        hello = introduction(max_protocol_version=99)
        async with raw_agent(fleet, hello) as agent:
            assert (await agent.until("welcome")).protocol_version == 1


async def test_fields_of_a_newer_agent_are_ignored(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        hello = fleet_pb2.Hello.FromString(introduction().SerializeToString() + UNKNOWN_FIELD)
        assert hello.SerializeToString().endswith(UNKNOWN_FIELD)
        async with raw_agent(fleet, hello) as agent:
            await agent.until("welcome")
            # A message of a kind that does not exist yet keeps the session, too.
            await agent.call.write(fleet_pb2.ConnectRequest.FromString(UNKNOWN_FIELD))
            await agent.report_health()
            await fleet.wait_for_state("raw", "ready")


@pytest.mark.parametrize(
    ("first", "code", "words"),
    [
        ({"health": fleet_pb2.HealthSample()}, CODE.FAILED_PRECONDITION, "first message is Hello"),
        ({}, CODE.FAILED_PRECONDITION, "first message is Hello"),
        ({"hello": introduction("")}, CODE.INVALID_ARGUMENT, "lacks node_id"),
        ({"hello": introduction(instance_id="")}, CODE.INVALID_ARGUMENT, "instance_id"),
    ],
)
async def test_stream_that_begins_wrongly_is_ended_and_the_rest_goes_on(
    tmp_path: Path, first: dict[str, Any], code: grpc.StatusCode, words: str
) -> None:
    async with running_fleet(tmp_path) as fleet:
        async with raw_agent(fleet) as agent:
            await agent.say(**first)
            ending = await agent.ending()
        assert ending[0] is code
        assert words in ending[1]
        await fleet.add_agent("good")
        await fleet.infer()


async def test_stream_that_is_closed_before_its_first_word_is_ended(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet, raw_agent(fleet) as agent:
        await agent.call.done_writing()
        assert (await agent.ending())[0] is CODE.FAILED_PRECONDITION


async def test_message_of_an_agent_that_cannot_be_read_ends_its_stream_alone(
    tmp_path: Path,
) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.add_agent("good")
        async with grpc.aio.insecure_channel(fleet.listening.grpc_address) as channel:
            agent = RawAgent(channel.stream_stream("/pointsman.v1.FleetService/Connect")())
            await agent.call.write(b"\x12\x06\x0a\x04caf\xe9")
            code, details = await agent.ending()
        assert code is CODE.INVALID_ARGUMENT
        assert "UTF-8" in details
        assert list(await fleet.nodes()) == ["good"]
        await fleet.infer()


async def test_later_message_that_cannot_be_read_ends_the_session(tmp_path: Path) -> None:
    async with (
        running_fleet(tmp_path) as fleet,
        grpc.aio.insecure_channel(fleet.listening.grpc_address) as channel,
    ):
        agent = RawAgent(channel.stream_stream("/pointsman.v1.FleetService/Connect")())
        hello = fleet_pb2.ConnectRequest(hello=introduction())
        await agent.call.write(hello.SerializeToString())
        await asyncio.wait_for(agent.call.read(), PATIENCE_SECONDS)
        await agent.call.write(b"\xff")
        _, details = await agent.ending()
        assert details.startswith("bad report: ")
        await fleet.wait_for_state("raw", "offline")


async def test_report_that_cannot_be_ends_the_session_with_its_reason(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet, raw_agent(fleet, introduction()) as agent:
        await agent.until("welcome")
        bad = fleet_pb2.ModelState(name="bad", parameters_billions=-1.0)
        await agent.say(models=fleet_pb2.ModelReport(models=[bad]))
        _, details = await agent.ending()
        assert details == "bad report: parameters_billions cannot be -1.0"
        await fleet.wait_for_state("raw", "offline")


# -- sessions --------------------------------------------------------------------------------------


async def test_second_agent_of_a_name_supersedes_the_first(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet, raw_agent(fleet, introduction()) as first:
        await first.until("welcome")
        await first.report_health()
        await fleet.wait_for_state("raw", "ready")
        async with raw_agent(fleet, introduction(instance_id="second")) as second:
            await second.until("welcome")
            code, details = await first.ending()
            assert (code, details) == (CODE.UNAVAILABLE, "the agent connected again")
            await second.report_health()
            await fleet.wait_for_state("raw", "ready")
            # What the first still had to say, and its end, change nothing.
            await asyncio.sleep(0.05)
            assert (await fleet.nodes())["raw"].state == "ready"


async def test_frozen_node_is_lost_when_its_lease_runs_out(tmp_path: Path) -> None:
    """It is out of routing at once, listed as offline, and can be forgotten."""
    settings = FleetSettings(
        health_interval_seconds=0.1, lease_seconds=2.0, probe_interval_seconds=0.2
    )
    async with (
        running_fleet(tmp_path, fleet=settings) as fleet,
        raw_agent(fleet, introduction()) as agent,
    ):
        await agent.until("welcome")
        await agent.report_health()
        await fleet.wait_for_state("raw", "ready")
        # From here on the agent says nothing, while its connection stays open.
        call = fleet.client.router.Infer(infer_request("Hello"), timeout=PATIENCE_SECONDS)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for _ in call:
                pass
        assert failure.value.code() is CODE.UNAVAILABLE
        code, details = await agent.ending()
        assert code is CODE.UNAVAILABLE
        assert details == "nothing was heard for 2 s"
        node = (await fleet.nodes())["raw"]
        assert node.state == "offline"
        assert node.inflight_requests == 0
        assert node.failed_requests == 1
        assert node.last_seen_seconds >= 2.0
        await fleet.client.admin.ForgetNode(admin_pb2.ForgetNodeRequest(node_id="raw"), timeout=60)
        assert await fleet.nodes() == {}


async def test_completion_that_is_sent_again_is_acknowledged_and_counted_once(
    tmp_path: Path,
) -> None:
    async with running_fleet(tmp_path) as fleet, raw_agent(fleet, introduction()) as agent:
        await agent.until("welcome")
        await agent.report_health()
        await fleet.wait_for_state("raw", "ready")
        answering = asyncio.create_task(fleet.infer("Hello"))
        order = await agent.until("work")
        progress = fleet_pb2.WorkProgress(
            request_id=order.request_id, attempt=1, text="Hi", tokens=1
        )
        completion = fleet_pb2.Completion(
            request_id=order.request_id,
            attempt=1,
            model="raw-model",
            finish_reason=types_pb2.FINISH_REASON_STOP,
            usage=types_pb2.Usage(prompt_tokens=2, completion_tokens=1),
        )
        await agent.say(progress=progress)
        for _ in range(3):
            await agent.say(sequence=1, completion=completion)
        text, account = await answering
        assert text == "Hi"
        assert not account.usage.HasField("energy_joules")
        await agent.acknowledged(1)
        assert (await fleet.nodes())["raw"].completed_requests == 1
        agent.call.cancel()
        async with raw_agent(fleet, introduction()) as again:
            assert (await again.until("welcome")).acked_sequence == 1


async def test_path_of_a_node_is_measured_by_its_echoes(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet, raw_agent(fleet, introduction()) as agent:
        for _ in range(3):
            probe = await agent.until("probe")
            await agent.say(probe_echo=fleet_pb2.ProbeEcho(nonce=probe.nonce))
        node = (await fleet.nodes())["raw"]
        assert 0.0 < node.round_trip_seconds < PATIENCE_SECONDS


# -- health and reflection -------------------------------------------------------------------------


async def test_health_is_told_by_service(tmp_path: Path) -> None:
    async with (
        running_fleet(tmp_path) as fleet,
        grpc.aio.insecure_channel(fleet.listening.grpc_address) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", *SERVICES):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.Check(health_pb2.HealthCheckRequest(service="no.such"), timeout=60)
        assert failure.value.code() is CODE.NOT_FOUND


async def test_stopping_controller_says_so_and_ends_what_outlasts_its_grace(
    tmp_path: Path,
) -> None:
    """1. an answer runs; 2. the controller is told to stop; 3. its grace period passes."""
    async with (
        running_fleet(tmp_path) as fleet,
        grpc.aio.insecure_channel(fleet.listening.grpc_address) as channel,
        raw_agent(fleet, introduction()) as agent,
    ):
        await agent.until("welcome")
        await agent.report_health()
        await fleet.wait_for_state("raw", "ready")
        answering = asyncio.create_task(fleet.infer("Hello"))
        await agent.until("work")
        watching = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=SERVICES[0]), timeout=10
        )
        statuses = aiter(watching)
        assert (await anext(statuses)).status == health_pb2.HealthCheckResponse.SERVING
        fleet.stop_controller.set()
        assert (await anext(statuses)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watching.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await fleet.infer("Too late")
        with pytest.raises(grpc.aio.AioRpcError) as cut_off:
            await answering
        for failure in (refused, cut_off):
            assert failure.value.code() is CODE.UNAVAILABLE
            assert "The controller is stopping" in (failure.value.details() or "")


async def test_reflection_lists_the_services_and_describes_them(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        async with grpc.aio.insecure_channel(fleet.listening.grpc_address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            requests = [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICES[0]),
            ]
            answers = [answer async for answer in stub.ServerReflectionInfo(iter(requests))]
        listed = {service.name for service in answers[0].list_services_response.service}
        assert listed >= {*SERVICES, "grpc.health.v1.Health"}
        assert b"Infer" in answers[1].file_descriptor_response.file_descriptor_proto[0]
