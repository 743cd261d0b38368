"""The fleet as a profiling run sees it, by the same calls that any operator has."""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import grpc

from controller.client import Client
from pointsman.v1 import admin_pb2, fleet_pb2

_POLL_SECONDS: Final = 1.0
_CALL_SECONDS: Final = 10.0


class DestinationsError(Exception):
    """No destination can be profiled; the text says why, and what to do."""


@dataclass(frozen=True, slots=True, order=True)
class ProfiledTarget:
    """A model on a node."""

    node_id: str
    model: str

    def __str__(self) -> str:
        return f"{self.node_id}/{self.model}"


class FleetView:
    """The nodes as the controller lists them, about a second old at most while `run` runs."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._nodes: dict[str, admin_pb2.NodeStatus] = {}
        self._is_ready: set[ProfiledTarget] = set()

    async def run(self) -> None:
        """Ask again and again until cancelled."""
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            await self.refresh()

    async def refresh(self) -> None:
        """Ask now; while nobody answers, the nodes stay known and none counts as ready."""
        try:
            response = await self._client.admin.ListNodes(
                admin_pb2.ListNodesRequest(), timeout=_CALL_SECONDS
            )
        except grpc.aio.AioRpcError:
            self._is_ready = set()
            return
        self._nodes.update({node.node_id: node for node in response.nodes})
        self._is_ready = {
            ProfiledTarget(node.node_id, model.name)
            for node in response.nodes
            # A ready node is used from its first health sample on.
            if node.state == "ready" and node.HasField("health")
            for model in node.models
            if model.phase == fleet_pb2.MODEL_PHASE_READY
        }

    def node(self, node_id: str) -> admin_pb2.NodeStatus:
        """A node as it was last seen; without any field when it never was."""
        return self._nodes.get(node_id, admin_pb2.NodeStatus(node_id=node_id))

    def model(self, target: ProfiledTarget) -> fleet_pb2.ModelState:
        """A model as its node last reported it; without any field when it never did."""
        for model in self.node(target.node_id).models:
            if model.name == target.model:
                return model
        return fleet_pb2.ModelState(name=target.model)

    def is_ready(self, target: ProfiledTarget) -> bool:
        """Whether it can take a request now."""
        return target in self._is_ready

    async def wait_until_ready(self, target: ProfiledTarget, seconds: float) -> bool:
        """Whether it is ready by then; at once when it is."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not self.is_ready(target):
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(_POLL_SECONDS / 4)
            await self.refresh()
        return True

    def targets(self, nodes: Collection[str], models: Collection[str]) -> list[ProfiledTarget]:
        """The destinations that are ready now, in order of name.

        Args:
            nodes: only these; empty takes all.
            models: only these; empty takes all.

        Raises:
            DestinationsError: one that was asked for is not there, or none is.
        """
        ready = sorted(self._is_ready)
        for kind, asked, known in (
            ("node", nodes, {target.node_id for target in ready}),
            ("model", models, {target.model for target in ready}),
        ):
            missing = sorted(set(asked) - known)
            if missing:
                raise DestinationsError(
                    f"no {kind} {', '.join(missing)} is ready; there are: "
                    f"{', '.join(sorted(known)) or 'none'}"
                )
        chosen = [
            target
            for target in ready
            if (not nodes or target.node_id in nodes) and (not models or target.model in models)
        ]
        if not chosen:
            raise DestinationsError(
                "no destination is ready; start an agent with a model, and see "
                "`edge-controller nodes`"
            )
        return chosen
