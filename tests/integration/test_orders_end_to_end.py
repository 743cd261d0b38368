"""Orders from the controller's API to an agent and back, over real gRPC."""

import pytest

from edge_agent.config import ModelSettings
from pointsman.v1 import admin_pb2, fleet_pb2
from tests.fakes.fleet import RunningFleet, running_fleet

pytestmark = pytest.mark.anyio

MODELS = (
    ModelSettings("fake-a", slots=2, threads=1),
    ModelSettings("fake-b", slots=2, threads=1, load_at_start=False),
)


async def order(
    fleet: RunningFleet, action: "fleet_pb2.ModelAction.ValueType", model: str
) -> list[fleet_pb2.OrderUpdate]:
    request = admin_pb2.ManageModelRequest(node_id="pi-1", action=action, model=model)
    return [answer.update async for answer in fleet.client.admin.ManageModel(request, timeout=60)]


async def phases(fleet: RunningFleet) -> dict[str, "fleet_pb2.ModelPhase.ValueType"]:
    return {model.name: model.phase for model in (await fleet.nodes())["pi-1"].models}


async def test_a_model_is_loaded_pinned_and_unloaded_by_order(tmp_path):
    async with running_fleet(tmp_path) as fleet:
        await fleet.add_agent("pi-1", MODELS)
        assert (await phases(fleet))["fake-b"] == fleet_pb2.MODEL_PHASE_UNLOADED
        updates = await order(fleet, fleet_pb2.MODEL_ACTION_LOAD, "fake-b")
        assert updates[-1].phase == fleet_pb2.ORDER_PHASE_DONE
        assert (await phases(fleet))["fake-b"] == fleet_pb2.MODEL_PHASE_READY
        _, account = await fleet.infer_model("fake-b", "Say something.")
        assert account.model == "fake-b"
        updates = await order(fleet, fleet_pb2.MODEL_ACTION_PIN, "fake-b")
        assert updates[-1].phase == fleet_pb2.ORDER_PHASE_DONE
        pinned = {model.name: model.is_pinned for model in (await fleet.nodes())["pi-1"].models}
        assert pinned == {"fake-a": False, "fake-b": True}
        updates = await order(fleet, fleet_pb2.MODEL_ACTION_UNLOAD, "fake-b")
        assert updates[-1].phase == fleet_pb2.ORDER_PHASE_DONE
        assert (await phases(fleet))["fake-b"] == fleet_pb2.MODEL_PHASE_UNLOADED


async def test_speeds_are_measured_anew_by_order(tmp_path):
    async with running_fleet(tmp_path) as fleet:
        await fleet.add_agent("pi-1", MODELS)
        request = admin_pb2.CalibrateRequest(node_id="pi-1")
        answers = [a async for a in fleet.client.admin.Calibrate(request, timeout=60)]
        assert answers[-1].update.phase == fleet_pb2.ORDER_PHASE_DONE
        speeds = {model.name: model.calibration for model in answers[-1].models}
        assert speeds["fake-a"].decode_tokens_per_second > 0


async def test_a_model_that_nobody_has_fails_with_words(tmp_path):
    async with running_fleet(tmp_path) as fleet:
        await fleet.add_agent("pi-1", MODELS)
        updates = await order(fleet, fleet_pb2.MODEL_ACTION_UNLOAD, "never-heard-of")
        assert updates[-1].phase == fleet_pb2.ORDER_PHASE_FAILED
        assert "never-heard-of" in updates[-1].message
