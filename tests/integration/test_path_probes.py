"""Round trips and goodput, measured on the agents' own connections over real gRPC."""

import asyncio
from pathlib import Path

import anyio

from controller.config import FleetSettings
from edge_agent.config import ControllerSettings, ModelSettings
from edge_agent.config import Settings as AgentSettings
from edge_agent.engine.fake import FakeEngine
from pointsman.v1 import admin_pb2
from tests.fakes.fleet import RunningAgent, RunningFleet, running_fleet
from tests.fakes.slow_link import slow_link

DELAY_SECONDS = 0.02
SLOW_BYTES_PER_SECOND = 200_000.0
PROBING = FleetSettings(
    health_interval_seconds=0.5,
    lease_seconds=5.0,
    probe_interval_seconds=0.05,
    goodput_interval_seconds=0.05,
)


async def goodput_of(fleet: RunningFleet, node_id: str) -> admin_pb2.NodeStatus:
    """The node, once both directions have been measured a few times."""
    with anyio.fail_after(60):
        while True:
            node = (await fleet.nodes()).get(node_id)
            if node is not None and node.HasField("goodput_age_seconds"):
                return node
            await asyncio.sleep(0.05)


def test_slow_link_is_told_from_a_fast_one_and_both_ways(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            running_fleet(tmp_path, fleet=PROBING) as fleet,
            slow_link(
                fleet.listening.grpc_address, DELAY_SECONDS, SLOW_BYTES_PER_SECOND
            ) as address,
        ):
            agent = RunningAgent(
                AgentSettings(
                    node_id="far",
                    data_dir=tmp_path / "far",
                    drain_seconds=1.0,
                    controller=ControllerSettings(address, insecure=True),
                    models=(ModelSettings("fake-a", slots=2, threads=1),),
                )
            )
            agent.start(FakeEngine)
            fleet.adopt(agent)
            await fleet.add_agent("near")
            await fleet.wait_for_state("far", "ready")
            for _ in range(3):  # the size of the probes settles
                far, near = await goodput_of(fleet, "far"), await goodput_of(fleet, "near")
                await asyncio.sleep(0.3)
            assert far.round_trip_seconds >= 2 * DELAY_SECONDS
            for name in ("receive_bytes_per_second", "transmit_bytes_per_second"):
                assert getattr(far, name) < 2 * SLOW_BYTES_PER_SECOND
                assert getattr(far, name) > SLOW_BYTES_PER_SECOND / 20
                assert getattr(near, name) > 2 * getattr(far, name)

    asyncio.run(scenario())
