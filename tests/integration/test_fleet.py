"""Controller and agents over real gRPC in one event loop, with fake engines."""

import asyncio
import itertools
import random
from collections.abc import Callable
from pathlib import Path

import anyio
import grpc
import pytest

from controller.config import BatchingSettings, LimitSettings
from edge_agent.config import ModelSettings
from edge_agent.engine.base import EngineSettings
from edge_agent.engine.fake import FakeEngine, FakeSpeeds, fake_answer
from edge_agent.errors import EngineError, EngineFailure
from pointsman.v1 import admin_pb2, router_pb2, router_pb2_grpc, types_pb2
from tests.fakes.fleet import RunningAgent, RunningFleet, infer_request, running_fleet
from tests.fakes.waiting import until


def slow(settings: EngineSettings) -> FakeEngine:
    """About 50 tokens a second."""
    return FakeEngine(
        settings,
        speeds=FakeSpeeds(decode_tokens_per_second=50.0, saturated_decode_tokens_per_second=400.0),
    )


def as_measured(settings: EngineSettings) -> FakeEngine:
    """As fast as `calibrate_fake` says, so that what completions teach changes nothing."""
    return FakeEngine(
        settings,
        speeds=FakeSpeeds(
            prefill_tokens_per_second=2000.0,
            decode_tokens_per_second=200.0,
            saturated_decode_tokens_per_second=200.0 * settings.slots,
        ),
    )


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
    """An interrupted answer never looks finished, and the others go on."""

    async def scenario() -> None:
        async with running_fleet(tmp_path) as fleet:
            doomed = await fleet.add_agent("doomed", (ModelSettings("fake-a"),), slow)
            await fleet.add_agent("other", (ModelSettings("fake-b"),), slow)
            events: list[str] = []
            other = asyncio.create_task(fleet.infer_model("fake-b"))

            async def stream() -> None:
                call = fleet.client.router.Infer(infer_request("Go on.", "fake-a"), timeout=60)
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
            return FakeEngine(settings, speeds=FakeSpeeds(prefill_tokens_per_second=0.1))

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

    async def scenario() -> None:
        async with running_fleet(tmp_path) as fleet:
            agent = await fleet.add_agent("a", make_engine=slow)
            call = fleet.client.router.Infer(infer_request("Go on.", max_tokens=2000), timeout=60)
            async for event in call:
                if event.WhichOneof("event") == "text":
                    break
            call.cancel()
            with anyio.fail_after(60):
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
            for node_id, is_draining in (("a", False), ("b", True)):
                await fleet.client.admin.DrainNode(
                    admin_pb2.DrainNodeRequest(node_id=node_id, is_draining=is_draining), timeout=5
                )
            answers = await asyncio.gather(*(fleet.infer(f"Question {i}?") for i in range(6)))
            assert {account.node_id for _, account in answers} == {"a"}

    asyncio.run(scenario())


def test_stopping_agent_finishes_what_it_has(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path) as fleet:
            agent = await fleet.add_agent("a", make_engine=slow)
            call = asyncio.create_task(fleet.infer("Go on."))
            while (await fleet.nodes())["a"].inflight_requests == 0:
                await asyncio.sleep(0.01)
            await until(lambda: agent.engines[0].stats().busy_slots)
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
            with anyio.fail_after(60):
                while (status := await agent.status())["controller"]["is_connected"]:
                    await asyncio.sleep(0.02)
            assert status["state"] == "degraded"
            assert status["models"][0]["phase"] == "ready"
            assert any("controller_unreachable" in issue for issue in status["issues"])

    asyncio.run(scenario())


# -- many at once ----------------------------------------------------------------------------------


async def nothing_is_held(fleet: RunningFleet, *agents: RunningAgent) -> None:
    """Wait until no slot, no order and no claim is left anywhere."""
    for agent in agents:
        stats = agent.engines[-1].stats
        await until(lambda stats=stats: not stats().busy_slots and not stats().queued_requests)
    with anyio.fail_after(60):
        while True:
            running = [(await agent.status())["requests"]["running"] for agent in agents]
            nodes = (await fleet.nodes()).values()
            claims = [(node.inflight_requests, node.backlog_seconds) for node in nodes]
            if set(running) <= {0} and set(claims) <= {(0, 0.0)}:
                return
            await asyncio.sleep(0.02)


def test_two_hundred_requests_at_once_all_end_and_leave_nothing_behind(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path) as fleet:
            agents = [
                await fleet.add_agent(name, make_engine=as_measured) for name in ("a", "b", "c")
            ]
            answers = await asyncio.gather(
                *(fleet.infer(f"Question {i}?", seed=i) for i in range(200))
            )
            assert [text for text, _ in answers] == [
                fake_answer(f"Question {i}?", i) for i in range(200)
            ]
            assert len({account.request_id for _, account in answers}) == 200
            await nothing_is_held(fleet, *agents)
            nodes = await fleet.nodes()
            assert sum(node.completed_requests for node in nodes.values()) == 200
            assert sum(node.failed_requests for node in nodes.values()) == 0
            assert all(node.completed_requests > 20 for node in nodes.values())

    asyncio.run(scenario())


def test_two_clients_of_one_model_take_turns_and_never_see_each_others_text(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path) as fleet:
            await fleet.add_agent("a", make_engine=slow)
            turns: list[int] = []
            texts = ["", ""]

            async def stream(client: int) -> None:
                request = infer_request(f"Client {client} asks.", seed=client)
                async for event in fleet.client.router.Infer(request, timeout=60):
                    if event.WhichOneof("event") == "text":
                        texts[client] += event.text.text
                        turns.append(client)

            await asyncio.gather(stream(0), stream(1))
            assert texts == [fake_answer(f"Client {client} asks.", client) for client in (0, 1)]
            changes = sum(one != other for one, other in itertools.pairwise(turns))
            assert changes > len(turns) / 4

    asyncio.run(scenario())


# -- clients that leave ----------------------------------------------------------------------------


def test_five_hundred_cancels_at_any_moment_leave_no_slot_taken(tmp_path: Path) -> None:

    def quick(settings: EngineSettings) -> FakeEngine:
        speeds = FakeSpeeds(
            prefill_tokens_per_second=2000.0,
            decode_tokens_per_second=2000.0,
            saturated_decode_tokens_per_second=4000.0,
        )
        return FakeEngine(settings, speeds=speeds)

    async def scenario() -> None:
        rng = random.Random(16)
        batching = BatchingSettings(window_seconds=0.02, quiet_seconds=0.005)
        async with running_fleet(tmp_path, batching) as fleet:
            agents = [await fleet.add_agent(name, make_engine=quick) for name in ("a", "b")]
            endings: dict[str, int] = {}

            async def leave_sometime() -> None:
                call = fleet.client.router.Infer(infer_request("Go on.", max_tokens=40), timeout=60)
                asyncio.get_running_loop().call_later(rng.uniform(0.0, 0.15), call.cancel)
                ending = "nothing"
                try:
                    async for event in call:
                        ending = event.WhichOneof("event") or ""
                except asyncio.CancelledError:
                    pass
                endings[ending] = endings.get(ending, 0) + 1

            for _ in range(20):
                await asyncio.gather(*(leave_sometime() for _ in range(25)))
            assert sum(endings.values()) == 500
            # They left at every stage of an answer, or this test has shown little.
            assert {"nothing", "admitted", "routed", "text"} & endings.keys() >= {
                "admitted",
                "text",
            }
            await nothing_is_held(fleet, *agents)
            text, _ = await fleet.infer("And now?")
            assert text

    asyncio.run(scenario())


def test_client_that_leaves_while_its_window_is_open_is_never_dispatched(tmp_path: Path) -> None:
    async def scenario() -> None:
        batching = BatchingSettings(window_seconds=30.0, quiet_seconds=0.0)
        async with running_fleet(tmp_path, batching) as fleet:
            agents = [await fleet.add_agent(name) for name in ("a", "b")]
            request = infer_request("Go on.")
            request.request.request_id = "leaver"
            call = fleet.client.router.Infer(request, timeout=60)
            events = aiter(call)
            assert (await anext(events)).WhichOneof("event") == "admitted"
            explain = router_pb2.ExplainRequest(request_id="leaver")
            assert (await fleet.client.router.Explain(explain, timeout=60)).state == "waiting"
            call.cancel()
            with anyio.fail_after(60):
                while (await fleet.client.router.Explain(explain, timeout=60)).state == "waiting":
                    await asyncio.sleep(0.01)
            explained = await fleet.client.router.Explain(explain, timeout=60)
            assert explained.state == "cancelled"
            assert not explained.HasField("decision")
            await nothing_is_held(fleet, *agents)
            assert all(not agent.engines[0].stats().busy_seconds_total for agent in agents)

    asyncio.run(scenario())


def test_client_that_stops_reading_is_cut_off_and_costs_its_bound_at_most(tmp_path: Path) -> None:
    """Its node goes free although it never asks again; the others go on."""
    words = 40_000

    def talkative(settings: EngineSettings) -> FakeEngine:
        return FakeEngine(settings, answer=lambda prompt, seed: ("x" * 50 + " ") * words)

    async def scenario() -> None:
        limits = LimitSettings(max_buffered_bytes=50_000)
        async with running_fleet(tmp_path, limits=limits) as fleet:
            models = (ModelSettings("fake-a", slots=2, threads=1, context_tokens=2 * words),)
            agent = await fleet.add_agent("a", models, talkative)
            # Without probing for bandwidth the client's window stays at 64 KiB.
            channel = grpc.aio.insecure_channel(
                fleet.listening.grpc_address, options=(("grpc.http2.bdp_probe", 0),)
            )
            stub: router_pb2_grpc.RouterServiceAsyncStub
            stub = router_pb2_grpc.RouterServiceStub(channel)
            request = infer_request("Tell me everything.", max_tokens=2 * words)
            events = aiter(stub.Infer(request, timeout=60))
            assert (await anext(events)).WhichOneof("event") == "admitted"
            with anyio.fail_after(60):
                while (await fleet.nodes())["a"].failed_requests == 0:
                    await asyncio.sleep(0.02)
            await nothing_is_held(fleet, agent)
            assert (await agent.status())["requests"]["recent"][0]["completion_tokens"] < words
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                [event async for event in events]
            assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "too slowly" in (failure.value.details() or "")
            await channel.close()
            text, _ = await fleet.infer("Only a little.", max_tokens=3)
            assert text

    asyncio.run(scenario())


# -- nodes that fail -------------------------------------------------------------------------------


async def stream_until(
    fleet: RunningFleet, pieces: int, then: Callable[[], object], events: list[str]
) -> None:
    """Read an answer to its end, and do something after so many pieces of text."""
    async for event in fleet.client.router.Infer(infer_request("Go on."), timeout=60):
        kind = event.WhichOneof("event") or ""
        events.append(kind)
        if kind == "text" and events.count("text") == pieces:
            then()


def test_engine_that_crashes_while_it_streams_never_looks_finished(tmp_path: Path) -> None:
    """The others see an error that they may retry, and the agent goes on."""

    async def scenario() -> None:
        async with running_fleet(tmp_path) as fleet:
            agent = await fleet.add_agent("a", make_engine=slow)
            events: list[str] = []
            crash = EngineError(EngineFailure.CRASHED, "died by signal 9")
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await stream_until(fleet, 3, lambda: agent.engines[0].fail(crash), events)
            assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "signal 9" in (failure.value.details() or "")
            assert "account" not in events
            await fleet.wait_for_state("a", "loading")
            agent.engines[0].recover()
            await fleet.wait_for_state("a", "ready")
            _, account = await fleet.infer()
            assert account.node_id == "a"

    asyncio.run(scenario())


def test_answer_that_outlasts_its_stopping_node_never_looks_finished(tmp_path: Path) -> None:
    """1. an answer streams; 2. its agent stops; 3. the drain's time is over first."""

    def very_slow(settings: EngineSettings) -> FakeEngine:
        return FakeEngine(settings, speeds=FakeSpeeds(decode_tokens_per_second=5.0))

    async def scenario() -> None:
        async with running_fleet(tmp_path) as fleet:
            agent = await fleet.add_agent("a", make_engine=very_slow, drain_seconds=0.1)
            events: list[str] = []
            stopping: list[asyncio.Task[None]] = []

            def stop() -> None:
                stopping.append(asyncio.create_task(agent.stop()))

            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await stream_until(fleet, 1, stop, events)
            assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "account" not in events
            await asyncio.gather(*stopping)

    asyncio.run(scenario())


# -- a controller that goes ------------------------------------------------------------------------


def test_agents_find_a_restarted_controller_by_themselves(tmp_path: Path) -> None:
    """Nobody restarts an agent, and ids that it knows are answered again."""

    async def scenario() -> None:
        request = infer_request("Who are you?", seed=1)
        request.request.request_id = "the same before and after"

        async def answer(fleet: RunningFleet) -> str:
            text = ""
            async for event in fleet.client.router.Infer(request, timeout=60):
                text += event.text.text
            return text

        async with running_fleet(tmp_path) as first:
            address = first.listening.grpc_address
            agent = await first.add_agent("a")
            first.leave_running(agent)
            assert await answer(first) == fake_answer("Who are you?", 1)
        await until(lambda: not agent.is_done)
        async with running_fleet(tmp_path, listen=address) as second:
            second.adopt(agent)
            await second.wait_for_state("a", "ready")
            assert await answer(second) == fake_answer("Who are you?", 1)
            assert len(agent.engines) == 1
            assert (await agent.status())["state"] == "ready"

    asyncio.run(scenario())


def test_status_is_one_object_whose_keys_programs_rely_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path) as fleet:
            agent = await fleet.add_agent("a")
            await fleet.infer(max_tokens=3)
            await nothing_is_held(fleet, agent)
            status = await agent.status()
            assert status.keys() >= {
                "state",
                "node_id",
                "kind",
                "agent_version",
                "hardware",
                "uptime_seconds",
                "controller",
                "models",
                "health",
                "requests",
                "issues",
            }
            assert status["controller"]["is_connected"] is True
            (model,) = status["models"]
            assert (model["phase"], model["slots"], model["busy_slots"]) == ("ready", 2, 0)
            requests = status["requests"]
            assert (requests["running"], requests["completed"], requests["failed"]) == (0, 1, 0)
            assert requests["energy_joules"] >= 0.0
            assert requests["recent"][0]["outcome"] == "length"
            assert status["health"]["power_source"] == "estimate"
            assert status["issues"] == []
            idle = await fleet.add_agent("idle", (), wait=False)
            await fleet.wait_for_state("idle", "loading")
            status = await idle.status()
            assert (status["state"], status["models"]) == ("degraded", [])
            assert status["issues"][0].startswith("no_models: ")

    asyncio.run(scenario())


def test_stopping_everything_leaks_no_task(tmp_path: Path) -> None:
    async def scenario() -> None:
        before = asyncio.all_tasks()
        async with running_fleet(tmp_path) as fleet:
            agent = await fleet.add_agent("a")
            await fleet.infer()
            await agent.stop()
        await until(lambda: asyncio.all_tasks() == before)

    asyncio.run(scenario())
