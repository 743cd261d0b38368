"""Controller and agents over real gRPC in one event loop, with fake engines."""

import asyncio
from pathlib import Path

import anyio
import grpc
import pytest

from edge_agent.config import ModelSettings
from edge_agent.engine.base import EngineSettings
from edge_agent.engine.fake import FakeEngine, FakeSpeeds
from pointsman.v1 import admin_pb2, router_pb2, types_pb2
from tests.fakes.fleet import infer_request, running_fleet


def slow(settings: EngineSettings) -> FakeEngine:
    """About 50 tokens a second."""
    return FakeEngine(settings, speeds=FakeSpeeds(decode_rate=50.0, saturated_decode_rate=400.0))


def test_request_is_routed_answered_and_explained(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path) as fleet:
            await fleet.add_agent("pi")
            await fleet.add_agent("vm", kind="cloud")
            text, account = await fleet.infer("What is the capital of France?", seed=1)
            assert text
            assert account.node_id in ("pi", "vm")
            assert account.finish_reason == types_pb2.FINISH_REASON_STOP
            assert account.usage.completion_tokens > 0
            assert account.usage.HasField("energy_joules")
            assert account.usage.energy_source == types_pb2.POWER_SOURCE_ESTIMATE
            explained = await fleet.client.router.Explain(
                router_pb2.ExplainRequest(request_id=account.request_id)
            )
            assert explained.state == "completed"
            assert explained.placement.chosen.node_id == account.node_id
            assert len(explained.placement.others) == 1
            assert explained.decision.batch_id == account.batch_id
            nodes = await fleet.nodes()
            assert nodes[account.node_id].completed_requests == 1
            assert all(node.inflight_requests == 0 for node in nodes.values())

    asyncio.run(scenario())


def test_batch_sent_together_is_decided_together(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path) as fleet:
            await fleet.add_agent("a")
            await fleet.add_agent("b")
            answers = await asyncio.gather(*(fleet.infer(f"Question {i}?") for i in range(12)))
            batches = {account.batch_id for _, account in answers}
            assert len(batches) == 1
            assert {account.node_id for _, account in answers} == {"a", "b"}

    asyncio.run(scenario())


@pytest.mark.parametrize("policy", ["memetic", "round-robin", "least-loaded"])
def test_dry_run_places_every_request_and_sends_nothing(tmp_path: Path, policy: str) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path) as fleet:
            await fleet.add_agent("a")
            await fleet.add_agent("b")
            requests = [infer_request(f"Question {i}?").request for i in range(6)]
            response = await fleet.client.router.Route(
                router_pb2.RouteRequest(requests=requests, policy=policy), timeout=10
            )
            assert response.decision.policy == policy
            assert response.decision.fallback_reason == ""
            assert [p.HasField("chosen") for p in response.placements] == [True] * 6
            nodes = await fleet.nodes()
            assert all(node.completed_requests == 0 for node in nodes.values())

    asyncio.run(scenario())


def test_killed_agent_ends_its_stream_with_an_error_and_is_used_again(tmp_path: Path) -> None:
    """Case S5: an interrupted answer never looks finished, and the others go on."""

    async def scenario() -> None:
        async with running_fleet(tmp_path) as fleet:
            doomed = await fleet.add_agent("doomed", (ModelSettings("fake-a"),), slow)
            await fleet.add_agent("other", (ModelSettings("fake-b"),), slow)
            events: list[str] = []
            other = asyncio.create_task(fleet.infer_model("fake-b"))

            async def stream() -> None:
                call = fleet.client.router.Infer(infer_request("Go on.", "fake-a"), timeout=20)
                async for event in call:
                    events.append(event.WhichOneof("event") or "")
                    if events.count("text") == 3:
                        asyncio.create_task(doomed.kill())  # noqa: RUF006

            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await stream()
            assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "account" not in events
            _, account = await other
            assert account.node_id == "other"
            await fleet.wait_for_state("doomed", "offline")
            doomed.start(FakeEngine)
            await fleet.wait_for_state("doomed", "ready")
            _, account = await fleet.infer_model("fake-a")
            assert account.node_id == "doomed"

    asyncio.run(scenario())


def test_request_that_streamed_nothing_moves_when_its_node_is_lost(tmp_path: Path) -> None:
    async def scenario() -> None:
        def stuck(settings: EngineSettings) -> FakeEngine:
            return FakeEngine(settings, speeds=FakeSpeeds(prefill_rate=0.1))

        async with running_fleet(tmp_path) as fleet:
            doomed = await fleet.add_agent("doomed", make_engine=stuck)
            call = asyncio.create_task(fleet.infer("A prompt that takes for ever to read."))
            while (await fleet.nodes())["doomed"].inflight_requests == 0:
                await asyncio.sleep(0.01)
            await fleet.add_agent("spare")
            await doomed.kill()
            _, account = await call
            assert account.node_id == "spare"
            assert account.attempts == 2

    asyncio.run(scenario())


def test_client_that_goes_away_frees_the_slot(tmp_path: Path) -> None:
    """Case S1."""

    async def scenario() -> None:
        async with running_fleet(tmp_path) as fleet:
            agent = await fleet.add_agent("a", make_engine=slow)
            call = fleet.client.router.Infer(infer_request("Go on.", max_tokens=2000), timeout=20)
            async for event in call:
                if event.WhichOneof("event") == "text":
                    break
            call.cancel()
            with anyio.fail_after(3):
                while agent.engines[0].stats().busy_slots:
                    await asyncio.sleep(0.01)
                while (await fleet.nodes())["a"].inflight_requests:
                    await asyncio.sleep(0.01)

    asyncio.run(scenario())


def test_drained_node_gets_nothing_until_it_is_lifted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path) as fleet:
            await fleet.add_agent("a")
            await fleet.add_agent("b")
            await fleet.client.admin.DrainNode(
                admin_pb2.DrainNodeRequest(node_id="a", is_draining=True), timeout=5
            )
            answers = await asyncio.gather(*(fleet.infer(f"Question {i}?") for i in range(6)))
            assert {account.node_id for _, account in answers} == {"b"}
            await fleet.client.admin.DrainNode(
                admin_pb2.DrainNodeRequest(node_id="a", is_draining=False), timeout=5
            )
            answers = await asyncio.gather(*(fleet.infer(f"Question {i}?") for i in range(6)))
            assert {account.node_id for _, account in answers} == {"a", "b"}

    asyncio.run(scenario())


def test_stopping_agent_finishes_what_it_has(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path) as fleet:
            agent = await fleet.add_agent("a", make_engine=slow)
            call = asyncio.create_task(fleet.infer("Go on."))
            while (await fleet.nodes())["a"].inflight_requests == 0:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            await agent.stop()
            text, account = await call
            assert text
            assert account.finish_reason == types_pb2.FINISH_REASON_STOP
            await fleet.wait_for_state("a", "offline")

    asyncio.run(scenario())


def test_status_answers_with_the_controller_away(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path) as fleet:
            agent = await fleet.add_agent("a")
            assert (await agent.status())["state"] == "ready"
            fleet.stop_controller.set()
            with anyio.fail_after(5):
                while (status := await agent.status())["controller"]["is_connected"]:
                    await asyncio.sleep(0.02)
            assert status["state"] == "degraded"
            assert status["models"][0]["phase"] == "ready"
            assert any("controller_unreachable" in issue for issue in status["issues"])

    asyncio.run(scenario())
