"""A metered link from the agent's settings to the account's money, over real gRPC."""

import asyncio
from pathlib import Path

import pytest

from controller.domain.link_traffic import REQUEST_OVERHEAD_BYTES, STREAMED_TOKEN_BYTES
from edge_agent.config import LinkSettings
from pointsman.v1 import router_pb2, types_pb2
from tests.fakes.fleet import running_fleet

PRICED = LinkSettings(receive_usd_per_gigabyte=1e6, transmit_usd_per_gigabyte=2e6)
PROMPT = "word " * 40


def test_price_of_a_link_counts_in_decisions_and_in_the_account(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path) as fleet:
            await fleet.add_agent("paid", link=PRICED)
            node = (await fleet.nodes())["paid"]
            assert node.attributes.is_link_metered
            assert node.attributes.transmit_usd_per_gigabyte == 2e6
            _, account = await fleet.infer(PROMPT, max_tokens=6)
            received = REQUEST_OVERHEAD_BYTES + len(PROMPT)
            sent = STREAMED_TOKEN_BYTES * account.usage.completion_tokens
            assert account.usage.completion_tokens > 0
            assert account.predicted_energy_joules > 0.0  # what `profile report` compares
            assert account.cost_usd == pytest.approx((received * 1e6 + sent * 2e6) / 1e9)

            await fleet.add_agent("free")
            asked = router_pb2.RouteRequest(
                requests=[types_pb2.InferenceRequest(prompt=PROMPT)],
                weights=types_pb2.ObjectiveWeights(cost=1.0),
            )
            routed = await fleet.client.router.Route(asked, timeout=20)
            (placed,) = routed.placements
            candidates = {c.node_id: c for c in (placed.chosen, *placed.others)}
            assert candidates["free"].cost_usd == 0.0
            assert candidates["paid"].cost_usd >= received * 1e6 / 1e9
            assert placed.chosen.node_id == "free"

    asyncio.run(scenario())
