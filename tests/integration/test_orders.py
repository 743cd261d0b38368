"""Orders from an operator to a node's models, over real gRPC on both sides."""

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result

from controller.cli import main
from controller.config import OrderSettings
from pointsman.v1 import admin_pb2, fleet_pb2
from tests.fakes.agent_session import scripted_agent
from tests.fakes.fleet import RunningFleet, running_fleet

LOAD = admin_pb2.ManageModelRequest(
    node_id="pi", action=fleet_pb2.MODEL_ACTION_LOAD, model="small", slots=2
)


async def follow(fleet: RunningFleet, request: admin_pb2.ManageModelRequest) -> list[str]:
    return [
        f"{fleet_pb2.OrderPhase.Name(r.update.phase).removeprefix('ORDER_PHASE_')} "
        f"{r.update.message}".strip()
        async for r in fleet.client.admin.ManageModel(request, timeout=60)
    ]


async def command(fleet: RunningFleet, *arguments: str) -> Result:
    options = ["--controller", fleet.listening.grpc_address, "--insecure"]
    return await asyncio.to_thread(CliRunner().invoke, main, [*arguments, *options])


def printed(result: Result) -> dict[str, Any]:
    """The JSON object of a command that ran beside the fleet, whose log lines come in between."""
    lines = result.stdout.splitlines()
    first, last = lines.index("{"), len(lines) - lines[::-1].index("}")
    found: dict[str, Any] = json.loads(
        "\n".join(line for line in lines[first:last] if not line.startswith("20"))
    )
    return found


def test_order_goes_down_the_nodes_stream_and_its_updates_come_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            running_fleet(tmp_path) as fleet,
            scripted_agent(fleet.listening.grpc_address) as agent,
        ):
            following = asyncio.create_task(follow(fleet, LOAD))
            (order,) = await agent.until("model_order")
            assert (order.action, order.model, order.slots) == (
                fleet_pb2.MODEL_ACTION_LOAD,
                "small",
                2,
            )
            assert not order.HasField("context_tokens")
            agent.order_update(order.order_id, fleet_pb2.ORDER_PHASE_RUNNING, "downloading")
            agent.order_update(order.order_id, fleet_pb2.ORDER_PHASE_RUNNING, "loading")
            again = aiter(fleet.client.admin.ManageModel(LOAD, timeout=60))  # a repeat joins
            words = [(await anext(again)).update.message]
            agent.order_update(order.order_id, fleet_pb2.ORDER_PHASE_DONE)
            assert await following == ["RUNNING downloading", "RUNNING loading", "DONE"]
            words += [response.update.message async for response in again]
            assert words[-1] == ""
            assert len(await agent.until("model_order")) == 1

    asyncio.run(scenario())


def test_node_lost_in_the_middle_of_an_order_is_a_clear_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            running_fleet(tmp_path) as fleet,
            scripted_agent(fleet.listening.grpc_address) as agent,
        ):
            following = asyncio.create_task(follow(fleet, LOAD))
            (order,) = await agent.until("model_order")
            agent.order_update(order.order_id, fleet_pb2.ORDER_PHASE_RUNNING, "loading")
            agent.leave()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await following
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "pi was lost before the order was done" in (caught.value.details() or "")

    asyncio.run(scenario())


def test_agent_too_old_for_orders_is_found_out_in_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        orders = OrderSettings(accept_seconds=0.1)
        async with (
            running_fleet(tmp_path, orders=orders) as fleet,
            scripted_agent(fleet.listening.grpc_address),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await follow(fleet, LOAD)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "update it" in (caught.value.details() or "")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"node_id": "nobody"}, grpc.StatusCode.NOT_FOUND, "No node is called"),
        ({"action": 0}, grpc.StatusCode.INVALID_ARGUMENT, "action"),
        ({"model": ""}, grpc.StatusCode.INVALID_ARGUMENT, "model"),
        ({"slots": 0}, grpc.StatusCode.INVALID_ARGUMENT, "slots"),
        (
            {"action": fleet_pb2.MODEL_ACTION_PIN},
            grpc.StatusCode.INVALID_ARGUMENT,
            "only when a model is loaded",
        ),
    ],
)
def test_wrong_order_is_refused_before_it_leaves(
    tmp_path: Path, changes: dict[str, object], code: grpc.StatusCode, words: str
) -> None:
    async def scenario() -> None:
        async with (
            running_fleet(tmp_path) as fleet,
            scripted_agent(fleet.listening.grpc_address),
        ):
            request = admin_pb2.ManageModelRequest()
            request.CopyFrom(LOAD)
            for name, value in changes.items():
                setattr(request, name, value)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await follow(fleet, request)
            assert caught.value.code() is code
            assert words in (caught.value.details() or "")

    asyncio.run(scenario())


def test_fleet_is_calibrated_from_the_command_line_and_a_lost_node_stops_nobody(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with (
            running_fleet(tmp_path) as fleet,
            scripted_agent(fleet.listening.grpc_address) as agent,
        ):
            await fleet.add_agent("real")
            done = await command(fleet, "calibrate", "real", "--json")
            assert done.exit_code == 0, done.output
            (measured,) = printed(done)["nodes"]
            assert measured["update"]["phase"] == "ORDER_PHASE_DONE"
            assert measured["models"][0]["calibration"]["decode_tokens_per_second"] > 0
            everybody = asyncio.create_task(command(fleet, "calibrate"))
            await agent.until("calibrate")
            agent.leave()
            result = await everybody
            assert result.exit_code == 1
            assert "pi: Node pi was lost" in result.output
            assert "fake-a" in result.output

    asyncio.run(scenario())


def test_models_are_listed_loaded_and_unloaded_from_the_command_line(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path) as fleet:
            await fleet.add_agent("real")
            loaded = await command(fleet, "models", "load", "real", "fake-b", "--slots", "3")
            assert loaded.exit_code == 0, loaded.output
            assert "fake-b is loaded on real" in loaded.output
            listed = await command(fleet, "models", "--node", "real", "--json")
            (node,) = printed(listed)["nodes"]
            slots = {model["name"]: model["slots"] for model in node["models"]}
            assert slots["fake-b"] == 3
            pinned = await command(fleet, "models", "pin", "real", "fake-b")
            assert pinned.exit_code == 0, pinned.output
            unloaded = await command(fleet, "models", "unload", "real", "fake-a")
            assert unloaded.exit_code == 0, unloaded.output
            table = await command(fleet, "models")
            assert "unloaded" in table.output
            assert "yes" in table.output  # pinned
            _, account = await fleet.infer()
            assert account.model == "fake-b"

    asyncio.run(scenario())
