"""A store that ends with the process: for tests, and for controllers that keep nothing."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from controller.domain.known_calibration import CalibrationKey, KnownCalibration
from controller.domain.policy_choice import KeptChoice
from controller.domain.request_record import Account, RequestRecord, RequestState
from controller.ids import NodeId, RequestId
from controller.storage.base import FinishedRow, KnownNode, Remembered, Retention, StoreState
from controller.storage.documents import RECORD, finished_row, kept_record, record_document


class MemoryStore:
    """Keeps everything in memory, under the same retention."""

    def __init__(self, retention: Retention | None = None) -> None:
        self._retention = retention or Retention()
        self._told: Callable[[Sequence[KnownNode]], None] = lambda nodes: None
        self._choice: KeptChoice | None = None
        self._nodes: dict[NodeId, KnownNode] = {}
        self._calibrations: dict[CalibrationKey, KnownCalibration] = {}
        self._finished: OrderedDict[RequestId, tuple[FinishedRow, bytes]] = OrderedDict()

    def tell_kept(self, told: Callable[[Sequence[KnownNode]], None]) -> None:
        """Have this called with each node as it is given."""
        self._told = told

    def load(self) -> Remembered:
        """What has been given so far."""
        return Remembered(
            tuple(self._nodes[name] for name in sorted(self._nodes)),
            tuple(self._calibrations.values()),
        )

    def save_node(self, node: KnownNode) -> None:
        """Keep a node as it is now."""
        self._nodes[node.node_id] = node
        self._told((node,))

    def forget_node(self, node_id: NodeId) -> None:
        """Drop a node."""
        self._nodes.pop(node_id, None)

    def save_calibrations(self, calibrations: Sequence[KnownCalibration]) -> None:
        """Keep these."""
        self._calibrations.update({one.key: one for one in calibrations})

    def load_choice(self) -> KeptChoice | None:
        """The choice given last."""
        return self._choice

    def save_choice(self, choice: KeptChoice | None) -> None:
        """Keep this one."""
        self._choice = choice

    def save_finished(self, record: RequestRecord) -> None:
        """Keep the story of a request that has ended."""
        keep = self._retention.keep_prompts
        request_id = record.request.request_id
        self._finished.pop(request_id, None)
        self._finished[request_id] = (
            finished_row(record, time.time(), keep),
            record_document(record, keep),
        )
        oldest = time.time() - 86_400 * self._retention.days
        while self._finished and (
            len(self._finished) > self._retention.max_requests
            or next(iter(self._finished.values()))[0].finished_time < oldest
        ):
            self._finished.popitem(last=False)

    def find(self, request_id: RequestId) -> RequestRecord | None:
        """The story of a finished request."""
        found = self._finished.get(request_id)
        return None if found is None else kept_record(found[1])

    def accounts(self, limit: int) -> list[Account]:
        """Of the latest answered requests, newest first."""
        answered = [
            document
            for row, document in list(self._finished.values())[::-1]
            if row.state == RequestState.COMPLETED.value
        ]
        found = [RECORD.validate_json(document).account for document in answered[:limit]]
        return [account for account in found if account is not None]

    def finished(self, limit: int) -> list[FinishedRow]:
        """The latest finished requests, newest first."""
        return [row for row, _ in list(self._finished.values())[::-1][:limit]]

    @property
    def state(self) -> StoreState:
        """Nothing waits."""
        return StoreState()

    def flush(self, seconds: float) -> bool:
        """Nothing waits."""
        return True

    def close(self, seconds: float) -> bool:
        """Nothing is lost but all of it, as promised."""
        return True
