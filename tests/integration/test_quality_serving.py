"""Feedback over real gRPC changes where similar prompts go, with the real embedding model."""

import asyncio
from pathlib import Path

import anyio
import grpc
import pytest

from controller.config import QualitySettings
from edge_agent.config import ModelSettings
from pointsman.v1 import admin_pb2, router_pb2, types_pb2
from tests.fakes.fleet import RunningFleet, infer_request, running_fleet

pytestmark = pytest.mark.anyio


async def judge(fleet: RunningFleet, request_id: str, score: float) -> None:
    await fleet.client.router.Feedback(
        router_pb2.FeedbackRequest(request_id=request_id, score_ratio=score), timeout=5
    )


async def test_feedback_changes_where_similar_prompts_go(
    tmp_path: Path, embedding: QualitySettings
) -> None:
    good_at = {"fake-a": "algebra", "fake-b": "poetry"}
    taught = {
        "algebra": ("Solve x + 3 = 7 for x.", "What is the square root of 144?"),
        "poetry": ("Write a haiku about the sea.", "Write two rhyming lines about the moon."),
    }
    asked = {
        "algebra": "Solve 2 * x = 10 for x.",
        "poetry": "Write a short poem about the mountains.",
    }
    async with running_fleet(tmp_path, quality=embedding) as fleet:
        await fleet.add_agent("one", (ModelSettings("fake-a"),))
        await fleet.add_agent("two", (ModelSettings("fake-b"),))
        for subject, prompts in taught.items():
            for prompt in prompts:
                for model in good_at:
                    _, account = await fleet.infer_model(model, prompt)
                    await judge(fleet, account.request_id, float(good_at[model] == subject))
        await fleet.client.admin.SetPolicy(
            admin_pb2.SetPolicyRequest(weights=types_pb2.ObjectiveWeights(quality=1.0)), timeout=5
        )
        requests = [infer_request(prompt).request for prompt in asked.values()]
        with anyio.fail_after(60):  # learning takes a moment
            while True:
                response = await fleet.client.router.Route(
                    router_pb2.RouteRequest(requests=requests), timeout=10
                )
                chosen = [placement.chosen for placement in response.placements]
                if [candidate.model for candidate in chosen] == ["fake-a", "fake-b"] and all(
                    candidate.quality_source == "neighbours" for candidate in chosen
                ):
                    break
                await asyncio.sleep(0.2)
        assert {candidate.quality_count for candidate in chosen} == {4}


async def test_feedback_that_cannot_be_is_refused(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.add_agent("a")
        _, account = await fleet.infer()
        for request_id, score, status in (
            ("no-such", 1.0, grpc.StatusCode.NOT_FOUND),
            (account.request_id, 2.0, grpc.StatusCode.INVALID_ARGUMENT),
            # This controller has no embedding model.
            (account.request_id, 1.0, grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await judge(fleet, request_id, score)
            assert failure.value.code() is status
