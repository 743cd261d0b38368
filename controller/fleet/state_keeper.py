"""What of a running controller is kept: asked for now and then, and once more at the end."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import Final

import structlog

from controller.domain.known_calibration import CalibrationKey, KnownCalibration
from controller.domain.request_record import RequestRecord
from controller.fleet.links import NodeLinks
from controller.ids import NodeId
from controller.profiler.state import ProfilerState
from controller.storage.base import ControllerStore, KnownNode

log = structlog.get_logger()

_NODES_SECONDS: Final = 2.0
_CALIBRATIONS_EVERY: Final = 15
"""Calibrations move with every completion; they are kept with every so many looks at the nodes."""


class StateKeeper:
    """Takes up what was kept, and keeps what changes. Belongs to the event loop."""

    def __init__(self, store: ControllerStore, profiler: ProfilerState, links: NodeLinks) -> None:
        self._store = store
        self._profiler = profiler
        self._links = links
        self._nodes: dict[NodeId, KnownNode] = {}
        self._calibrations: dict[CalibrationKey, KnownCalibration] = {}

    async def restore(self) -> None:
        """Take up what an earlier controller has kept; its nodes are offline until they come.

        Raises:
            StorageError: it cannot be read.
        """
        loop = asyncio.get_running_loop()

        def told(nodes: Sequence[KnownNode]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it the links
                loop.call_soon_threadsafe(self._kept, nodes)

        self._store.tell_kept(told)
        remembered = await loop.run_in_executor(None, self._store.load)
        self._profiler.remember(remembered.calibrations)
        now = time.monotonic()
        for node in remembered.nodes:
            self._profiler.restore(
                node.hello,
                node.completed_requests,
                node.failed_requests,
                node.cancelled_requests,
                now,
            )
            self._links.restore(
                node.node_id, node.is_draining, node.instance_id, node.acked_sequence
            )
        self._nodes = {node.node_id: node for node in remembered.nodes}
        self._calibrations = {one.key: one for one in remembered.calibrations}
        if remembered.nodes or remembered.calibrations:
            log.info(
                "storage.restored",
                nodes=len(remembered.nodes),
                calibrations=len(remembered.calibrations),
            )

    def finished(self, record: RequestRecord) -> None:
        """Keep the story of a request that has ended, and with it how far its node has come.

        Both are written in one transaction, so that a completion and the sequence number that
        tells its repeats are kept together or not at all; the node hears of it afterwards.
        """
        self._store.save_finished(record)
        chosen = record.placement.chosen if record.placement else None
        told_by = self._links.settle(record.request.request_id)
        for node_id in {told_by, chosen.node_id if chosen else None}:
            if node_id is not None:
                self.settled(node_id)

    def settled(self, node_id: NodeId) -> None:
        """Keep how far a node has come; it hears of it once that is kept."""
        if node_id in self._profiler.nodes:
            self._keep_node(node_id)

    def _kept(self, nodes: Sequence[KnownNode]) -> None:
        for node in nodes:
            if node.acked_sequence:
                self._links.acknowledge(node.node_id, node.instance_id, node.acked_sequence)

    async def run(self) -> None:
        """Keep what changes, until cancelled."""
        looks = 0
        while True:
            await asyncio.sleep(_NODES_SECONDS)
            looks += 1
            self._keep_nodes()
            if looks % _CALIBRATIONS_EVERY == 0:
                self._keep_calibrations()

    def keep_all(self) -> None:
        """Give everything that has changed since the last look to the store."""
        self._keep_nodes()
        self._keep_calibrations()

    def _keep_nodes(self) -> None:
        current = self._profiler.nodes
        for node_id in current:
            self._keep_node(node_id)
        for node_id in self._nodes.keys() - current.keys():
            self._store.forget_node(node_id)
            del self._nodes[node_id]

    def _keep_node(self, node_id: NodeId) -> None:
        record = self._profiler.nodes[node_id]
        instance_id, acked = self._links.last_settled(node_id)
        node = KnownNode(
            dataclasses.replace(record.hello, models=record.models),
            self._links.is_draining(node_id),
            record.completed_requests,
            record.failed_requests,
            record.cancelled_requests,
            instance_id,
            acked,
        )
        if self._nodes.get(node_id) != node:
            self._store.save_node(node)
            self._nodes[node_id] = node

    def _keep_calibrations(self) -> None:
        known = {one.key: one for one in self._profiler.known_calibrations()}
        changed = [one for key, one in known.items() if self._calibrations.get(key) != one]
        if changed:
            self._store.save_calibrations(changed)
        self._calibrations = known
