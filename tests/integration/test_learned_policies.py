"""Learned policies in a live fleet: what they were trained on, and who is a stranger."""

import asyncio
from pathlib import Path

import pytest

from controller.config import RoutingSettings
from edge_agent.config import ModelSettings
from pointsman.v1 import admin_pb2, router_pb2, types_pb2
from tests.fakes.fleet import RunningFleet, running_fleet

torch = pytest.importorskip("torch")


def _train(folder: Path) -> None:
    """Policies for a fleet of nodes a and b with one model each, trained for a moment."""
    import numpy as np

    from controller.lab.training.export import export
    from controller.lab.training.ppo import Trainer, TrainingSettings
    from controller.lab.training.vector_environment import World
    from controller.routing.ppo.observation import Layout
    from controller.routing.problem import name_key

    rng = np.random.default_rng(0)
    layout = Layout(
        model_keys=np.array([name_key("fake-a"), name_key("fake-b")]),
        node_keys=np.array([name_key("a"), name_key("b")]),
        kind_of_node=np.array([0, 1]),
        choice_of_model=np.array([0, 1]),
        level_of_model=np.array([0, 0]),
        deployed=np.array([[True, True], [False, True]]),
    )
    seconds = rng.uniform(0.05, 2.0, (40, 2, 2))
    seconds[:, 1, 0] = np.inf
    world = World(
        layout,
        quality=rng.uniform(0.1, 0.9, (40, 2)),
        correct=rng.uniform(0.0, 1.0, (40, 2)),
        seconds=seconds,
        slots=np.array([2, 2]),
        watts=np.array([5.0, 10.0]),
        usd_per_second=np.zeros(2),
        noise=0.2,
        parameters_billions=np.array([1.0, 2.0]),
    )
    for name, architecture in (("ppo", "factorised"), ("ppo-set", "set")):
        trainer = Trainer(
            [world],
            TrainingSettings(architecture=architecture, episodes=8, requests=20, environments=8),  # type: ignore[arg-type]
        )
        # How fast fake engines are is not the point.
        trainer.train()
        trainer.lowest = np.full_like(trainer.lowest, -5.0)
        trainer.highest = np.full_like(trainer.highest, 5.0)
        export(trainer, folder / name, "test")


async def _decide(fleet: RunningFleet, policy: str) -> router_pb2.RouteResponse:
    requests = [types_pb2.InferenceRequest(prompt=f"Question {i}?") for i in range(3)]
    return await fleet.client.router.Route(
        router_pb2.RouteRequest(requests=requests, policy=policy), timeout=10
    )


@pytest.mark.parametrize("policy", ["ppo", "ppo-set"])
def test_node_that_joins_is_used_and_one_unknown_to_ppo_makes_it_fall_back(
    tmp_path: Path, policy: str
) -> None:
    """1. Node a alone. 2. Node b of the trained fleet joins. 3. Node c, a stranger, joins."""
    _train(tmp_path / "artifacts")

    async def scenario() -> None:
        routing = RoutingSettings(policy=policy, ppo_artifacts=str(tmp_path / "artifacts"))
        async with running_fleet(tmp_path, routing=routing) as fleet:
            await fleet.add_agent("a")
            alone = await _decide(fleet, policy)
            assert alone.decision.policy == policy
            assert alone.decision.fallback_reason == ""
            models = tuple(ModelSettings(name, slots=2, threads=1) for name in ("fake-a", "fake-b"))
            await fleet.add_agent("b", models)
            joined = await _decide(fleet, policy)
            assert joined.decision.fallback_reason == ""
            text, account = await fleet.infer(max_tokens=4)
            assert text
            assert account.node_id in ("a", "b")
            await fleet.add_agent("c", (ModelSettings("fake-c", slots=2, threads=1),))
            strange = await _decide(fleet, policy)
            assert len(strange.placements) == 3
            if policy == "ppo":
                assert "not trained on" in strange.decision.fallback_reason
            else:
                assert strange.decision.fallback_reason == ""
            text, _ = await fleet.infer(max_tokens=4)
            assert text
            # Dry runs do not count; the one live request since the stranger came does.
            told = await fleet.client.admin.GetPolicy(admin_pb2.GetPolicyRequest(), timeout=60)
            counted = [(each.policy, each.cause, each.requests) for each in told.fallbacks]
            assert counted == ([("ppo", "unknown_fleet", 1)] if policy == "ppo" else [])

    asyncio.run(scenario())


def test_ppo_without_an_artifact_serves_by_its_fall_back_and_says_how_to_train(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path, routing=RoutingSettings(policy="ppo")) as fleet:
            await fleet.add_agent("a")
            found = await _decide(fleet, "ppo")
            assert "edge-controller lab train ppo" in found.decision.fallback_reason

    asyncio.run(scenario())
