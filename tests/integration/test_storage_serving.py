"""A controller that starts again knows what it knew."""

import grpc
import pytest

from controller.config import RoutingSettings, StorageSettings
from pointsman.v1 import admin_pb2, router_pb2, types_pb2
from tests.fakes.fleet import running_fleet

pytestmark = pytest.mark.anyio


async def test_nodes_drains_counts_and_explanations_survive_a_restart(tmp_path):
    async with running_fleet(tmp_path) as fleet:
        await fleet.add_agent("pi-1")
        await fleet.add_agent("pi-2")
        _, account = await fleet.infer("What is a lighthouse?")
        await fleet.client.admin.DrainNode(
            admin_pb2.DrainNodeRequest(node_id="pi-2", is_draining=True), timeout=5
        )
        explained = await fleet.client.router.Explain(
            router_pb2.ExplainRequest(request_id=account.request_id), timeout=5
        )
        done = {name: node.completed_requests for name, node in (await fleet.nodes()).items()}
    async with running_fleet(tmp_path) as fleet:
        nodes = await fleet.nodes()
        assert {name: node.state for name, node in nodes.items()} == {
            "pi-1": "offline",
            "pi-2": "offline",
        }
        assert {name: node.completed_requests for name, node in nodes.items()} == done
        assert nodes["pi-1"].attributes.hardware
        again = await fleet.client.router.Explain(
            router_pb2.ExplainRequest(request_id=account.request_id), timeout=5
        )
        assert again.account == explained.account
        assert again.decision == explained.decision
        assert again.placement.chosen == explained.placement.chosen
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await fleet.client.router.Feedback(
                router_pb2.FeedbackRequest(request_id=account.request_id, score_ratio=1.0),
                timeout=60,
            )
        assert "keep_prompts" in (refused.value.details() or "")
        await fleet.add_agent("pi-2", wait=False)
        await fleet.wait_for_state("pi-2", "draining")
        await fleet.client.admin.ForgetNode(admin_pb2.ForgetNodeRequest(node_id="pi-1"), timeout=60)
    async with running_fleet(tmp_path) as fleet:
        assert set(await fleet.nodes()) == {"pi-2"}


async def test_policy_that_was_set_decides_after_a_restart(tmp_path):
    async with running_fleet(tmp_path) as fleet:
        weights = types_pb2.ObjectiveWeights(quality=3, time=1)
        await fleet.client.admin.SetPolicy(
            admin_pb2.SetPolicyRequest(policy="round-robin", weights=weights), timeout=5
        )
        assert not (await policy_of(fleet)).is_configured
    async with running_fleet(tmp_path) as fleet:
        found = await policy_of(fleet)
        assert (found.policy, found.weights.quality) == ("round-robin", 0.75)
        assert not found.is_configured
        await fleet.add_agent("pi-1")
        _, account = await fleet.infer("What is a lighthouse?")
        assert account.policy == "round-robin"
    changed = RoutingSettings(policy="least-loaded")
    async with running_fleet(tmp_path, routing=changed) as fleet:
        found = await policy_of(fleet)
        assert (found.policy, found.weights.quality) == ("least-loaded", 0.25)
        assert found.is_configured


async def policy_of(fleet) -> admin_pb2.GetPolicyResponse:
    return await fleet.client.admin.GetPolicy(admin_pb2.GetPolicyRequest(), timeout=5)


async def test_without_storage_nothing_is_written(tmp_path):
    async with running_fleet(tmp_path, storage=StorageSettings(is_enabled=False)) as fleet:
        await fleet.add_agent("pi-1")
        await fleet.infer("Anything?")
    assert not (tmp_path / "controller" / "controller.db").exists()


async def test_an_unknown_request_is_still_unknown(tmp_path):
    async with running_fleet(tmp_path) as fleet:
        with pytest.raises(grpc.aio.AioRpcError) as missing:
            await fleet.client.router.Explain(
                router_pb2.ExplainRequest(request_id="never"), timeout=5
            )
        assert missing.value.code() is grpc.StatusCode.NOT_FOUND
