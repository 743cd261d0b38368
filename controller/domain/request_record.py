"""What `explain` knows of each request, running or finished."""

import enum
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from controller.domain.batch import BatchDecision, Placement
from controller.domain.completion import Completion
from controller.domain.request import InferenceRequest
from controller.errors import UnknownRequestError
from controller.ids import BatchId, ModelName, NodeId, RequestId


class RequestState(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    DISPATCHED = "dispatched"
    STREAMING = "streaming"
    SUSPENDED = "suspended"
    REATTACHED = "reattached"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        """Whether nothing more will happen."""
        return self in (RequestState.COMPLETED, RequestState.CANCELLED, RequestState.FAILED)


@dataclass(frozen=True, slots=True)
class Account:
    """The whole story of one finished request; seconds by the controller's monotonic clock."""

    request_id: RequestId
    batch_id: BatchId
    node_id: NodeId
    model: ModelName
    policy: str
    completion: Completion
    window_seconds: float
    first_token_seconds: float
    total_seconds: float
    predicted_finish_seconds: float
    measured_finish_seconds: float
    cost_usd: float
    attempts: int
    query_class: str = ""
    predicted_energy_joules: float | None = None


@dataclass(slots=True)
class RequestRecord:
    """One request; monotonic seconds except `admitted_time`, which is wall time for people.

    Attributes:
        attempts: how often it was dispatched.
        earlier_attempts: dispatches of finished requests that had the same id.
    """

    request: InferenceRequest
    admitted_time: float
    admitted_at: float
    state: RequestState = RequestState.WAITING
    decision: BatchDecision | None = None
    placement: Placement | None = None
    closed_at: float | None = None
    first_token_at: float | None = None
    tokens_sent: int = 0
    attempts: int = 0
    earlier_attempts: int = 0
    account: Account | None = None
    error: str = ""

    @property
    def attempt_number(self) -> int:
        """What the current dispatch is called on the wire.

        It rises over every use of the same id, since a node ignores what it has seen.
        """
        return self.earlier_attempts + self.attempts


class RequestRecords:
    """All running requests and the latest finished ones.

    Args:
        kept: finished requests that stay known.
        on_closed: told of each request once it has ended; what it is given changes no more.

    Attributes:
        ended: how many requests have ended, and how.
    """

    def __init__(
        self, kept: int, on_closed: Callable[[RequestRecord], None] = lambda record: None
    ) -> None:
        self._kept = kept
        self._on_closed = on_closed
        self._running: dict[RequestId, RequestRecord] = {}
        self._finished: OrderedDict[RequestId, RequestRecord] = OrderedDict()
        self.ended: Counter[RequestState] = Counter()

    @property
    def running(self) -> dict[RequestId, RequestRecord]:
        """Requests that have not ended; to be read only."""
        return self._running

    def add(self, record: RequestRecord) -> None:
        """Take in a new request; of a finished one of the same id only its attempts are kept."""
        earlier = self._finished.pop(record.request.request_id, None)
        if earlier is not None:
            record.earlier_attempts = earlier.attempt_number
        self._running[record.request.request_id] = record

    def get(self, request_id: RequestId) -> RequestRecord:
        """The record of a request.

        Raises:
            UnknownRequestError: it never was, or has been dropped.
        """
        record = self._running.get(request_id) or self._finished.get(request_id)
        if record is None:
            raise UnknownRequestError(
                f"There is no record of request {request_id!r}; the last {self._kept} are kept."
            )
        return record

    def is_known(self, request_id: RequestId) -> bool:
        """Whether it runs or is among the latest finished ones."""
        return request_id in self._running or request_id in self._finished

    def close(self, request_id: RequestId, state: RequestState, error: str = "") -> None:
        """Move a request to the finished ones; repeats change nothing."""
        record = self._running.pop(request_id, None)
        if record is None:
            return
        record.state, record.error = state, error
        self.ended[state] += 1
        self._finished[request_id] = record
        self._on_closed(record)
        while len(self._finished) > self._kept:
            self._finished.popitem(last=False)
