"""What is remembered from one decision to the next: the only state of routing."""

from collections.abc import Callable
from typing import Any, Final, TypeVar

from controller.domain.cluster import ClusterSnapshot
from controller.routing.answer_tokens import FleetAnswerLengths, lengths_of
from controller.routing.fleet_columns import FleetColumns, fleet_columns

T = TypeVar("T")

_FORGET: Final = 0.9
"""Factor by which the longest pause remembered shrinks with each decision."""


class DecisionMemory:
    """Tables of the fleet, each kept until what it was made from changes, and the longest pause.

    Whoever decides owns one, for the snapshots of one profiler, and passes it to what makes a
    decision. To forget the tables costs time and changes no decision. A snapshot without a
    `fleet_version` is read in full and leaves no trace. Several threads may ask: each looks at what
    is kept once, and replaces it whole.

    Attributes:
        pause_seconds: how long this machine has lately kept searches waiting, for a core or for
            the GIL; of `Budget.pause_seconds`.
    """

    def __init__(self) -> None:
        self.pause_seconds = 0.0
        self._kept: dict[str, tuple[object, Any]] = {}

    def columns(self, snapshot: ClusterSnapshot) -> FleetColumns:
        """The destinations as arrays.

        Raises:
            MalformedArray: a destination names a node that is not in the snapshot.
        """
        return self._of_version("columns", snapshot, lambda last: fleet_columns(snapshot, last))

    def answer_lengths(self, snapshot: ClusterSnapshot) -> FleetAnswerLengths:
        """How long the destinations' answers get."""
        return self._of_version(
            "answer lengths", snapshot, lambda last: lengths_of(snapshot.destinations, last)
        )

    def kept(self, name: str, key: object, make: Callable[[], T]) -> T:
        """What `make` gave when it was last called under this name, while the key is equal."""
        last = self._kept.get(name)
        if last is not None and last[0] == key:
            found: T = last[1]
            return found
        made = make()
        self._kept[name] = (key, made)
        return made

    def paused(self, seconds: float) -> None:
        """Take in the longest pause that a decision has met; a longer one is forgotten slowly."""
        self.pause_seconds = max(seconds, _FORGET * self.pause_seconds)

    def _of_version(self, name: str, snapshot: ClusterSnapshot, make: Callable[[T | None], T]) -> T:
        if snapshot.fleet_version is None:
            return make(None)
        last = self._kept.get(name)
        return self.kept(
            name, snapshot.fleet_version, lambda: make(None if last is None else last[1])
        )
