"""What is kept over restarts of the controller, and what keeping it promises."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from controller.domain.known_calibration import KnownCalibration
from controller.domain.node_report import NodeHello
from controller.domain.policy_choice import KeptChoice
from controller.domain.request_record import Account, RequestRecord
from controller.ids import NodeId, RequestId
from controller.telemetry.metrics import Metrics


class StorageError(Exception):
    """What is kept cannot be read or written; the text says what to do."""


@dataclass(frozen=True, slots=True)
class KnownNode:
    """A node as it was last seen.

    Attributes:
        is_draining: by an operator's order.
        instance_id, acked_sequence: up to which fact of this start of its agent all is kept.
    """

    hello: NodeHello
    is_draining: bool = False
    completed_requests: int = 0
    failed_requests: int = 0
    cancelled_requests: int = 0
    instance_id: str = ""
    acked_sequence: int = 0

    @property
    def node_id(self) -> NodeId:
        """Its name."""
        return self.hello.node_id


@dataclass(frozen=True, slots=True)
class Remembered:
    """Everything that a controller takes up again when it starts."""

    nodes: tuple[KnownNode, ...] = ()
    calibrations: tuple[KnownCalibration, ...] = ()


@dataclass(frozen=True, slots=True)
class FinishedRow:
    """One finished request as the measurements see it; None where it is unknown or did not happen.

    Attributes:
        finished_time: wall time, seconds since 1970.
        state: "completed", "cancelled" or "failed".
        prompt: only where the settings keep prompts.
    """

    request_id: str
    finished_time: float
    state: str
    batch_id: str | None
    node_id: str | None
    model: str | None
    policy: str | None
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_prompt_tokens: int | None
    queue_seconds: float | None
    prefill_seconds: float | None
    decode_seconds: float | None
    window_seconds: float | None
    first_token_seconds: float | None
    total_seconds: float | None
    predicted_finish_seconds: float | None
    measured_finish_seconds: float | None
    quality_ratio: float | None
    cost_usd: float | None
    energy_joules: float | None
    energy_source: str | None
    attempts: int
    prompt_characters: int
    prompt: str | None


@dataclass(frozen=True, slots=True)
class StoreState:
    """How the keeping goes.

    Attributes:
        waiting: what has been given and is not yet kept.
        lost: finished requests dropped because they could not be kept for too long.
        issue: what an operator should mend; empty when nothing is wrong.
    """

    waiting: int = 0
    lost: int = 0
    issue: str = ""


@dataclass(frozen=True, slots=True)
class Retention:
    """What bounds the size; the oldest finished requests go first.

    Attributes:
        days: how long finished requests are kept.
        max_requests: how many are kept.
        max_bytes: of the database file.
        keep_prompts: False keeps no prompt text at all.
    """

    days: float = 30.0
    max_requests: int = 1_000_000
    max_bytes: int = 2 << 30
    keep_prompts: bool = False


class ControllerStore(Protocol):
    """Keeps the controller's state.

    The `save_` methods take the value at once and never wait nor fail: it is written soon after by
    one writer, in the order given. What cannot be written stays, is tried again and shows in
    `state`. Nodes and calibrations of the same name replace each other while they wait; of
    finished requests the oldest are dropped, and counted, when too many wait.
    """

    def tell_kept(self, told: Callable[[Sequence[KnownNode]], None]) -> None:
        """Have this called, in any thread, with nodes that are kept now as they were given.

        Whatever was given before them is kept as well.
        """
        ...

    def load(self) -> Remembered:
        """What an earlier controller has kept.

        Raises:
            StorageError: it cannot be read.
        """
        ...

    def save_node(self, node: KnownNode) -> None:
        """Keep a node as it is now."""
        ...

    def forget_node(self, node_id: NodeId) -> None:
        """Drop a node."""
        ...

    def save_calibrations(self, calibrations: Sequence[KnownCalibration]) -> None:
        """Keep what is believed of these, each under its key."""
        ...

    def load_choice(self) -> KeptChoice | None:
        """The policy that an operator has chosen; None for none.

        May read the disk.

        Raises:
            StorageError: it cannot be read.
        """
        ...

    def save_choice(self, choice: KeptChoice | None) -> None:
        """Keep the policy that an operator has chosen; None drops it."""
        ...

    def save_finished(self, record: RequestRecord) -> None:
        """Keep the story of a request that has ended; it must not change any more."""
        ...

    def find(self, request_id: RequestId) -> RequestRecord | None:
        """The story of a finished request; its prompt is empty unless prompts are kept.

        May read the disk.

        Raises:
            StorageError: it cannot be read.
        """
        ...

    def accounts(self, limit: int) -> list[Account]:
        """Of the latest answered requests, newest first; those that wait are among them.

        May read the disk.

        Raises:
            StorageError: they cannot be read.
        """
        ...

    def finished(self, limit: int) -> list[FinishedRow]:
        """The latest finished requests, newest first. May read the disk.

        Raises:
            StorageError: they cannot be read.
        """
        ...

    @property
    def state(self) -> StoreState:
        """How the keeping goes."""
        ...

    def flush(self, seconds: float) -> bool:
        """Wait until everything given is kept; False when that took longer."""
        ...

    def close(self, seconds: float) -> bool:
        """Keep what waits, for at most this long, and end; False when something is lost."""
        ...


def register_store_metrics(metrics: Metrics, store: ControllerStore) -> None:
    """Register how the keeping goes."""
    metrics.gauge(
        "storage_waiting", "Values not yet written to the database.", lambda: store.state.waiting
    )
    metrics.gauge(
        "storage_is_failing",
        "1 while the database cannot be written.",
        lambda: bool(store.state.issue),
    )
    metrics.counter(
        "storage_lost_requests",
        "Finished requests dropped because they could not be written.",
        lambda: store.state.lost,
    )


@dataclass(slots=True)
class Unkept:
    """What waits to be written; of the same thing only the latest."""

    nodes: dict[NodeId, KnownNode | None] = field(default_factory=dict)
    calibrations: dict[object, KnownCalibration] = field(default_factory=dict)
    finished: list[RequestRecord] = field(default_factory=list)
    choices: list[KeptChoice | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.nodes) + len(self.calibrations) + len(self.finished) + len(self.choices)

    def prepend(self, earlier: "Unkept") -> None:
        """Put back what could not be written; what came since is newer."""
        self.nodes = {**earlier.nodes, **self.nodes}
        self.calibrations = {**earlier.calibrations, **self.calibrations}
        self.finished = earlier.finished + self.finished
        self.choices = (earlier.choices + self.choices)[-1:]
