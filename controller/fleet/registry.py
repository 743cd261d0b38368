"""Which nodes are here, and until when.

Pure: takes `now`, monotonic seconds of receipt at the controller. A node's own clock is never
asked, since boards without a clock battery jump after boot.
"""

from dataclasses import dataclass, replace
from typing import Final

from controller.ids import NodeId, SessionId
from controller.profiler.node_profiler import most_are_silent

_NEARLY_OVER_RATIO: Final = 0.25
"""A node with less than this of its lease left has missed several reports."""


@dataclass(frozen=True, slots=True)
class Session:
    """One stream of one agent instance; `leased_until` is monotonic seconds."""

    session_id: SessionId
    node_id: NodeId
    instance_id: str
    leased_until: float


class Registry:
    """Sessions and leases.

    Args:
        lease_seconds: a node that sends nothing for this long counts as gone.
    """

    def __init__(self, lease_seconds: float) -> None:
        self._lease_seconds = lease_seconds
        self._by_node: dict[NodeId, Session] = {}
        self._draining: set[NodeId] = set()
        self._arrived: dict[NodeId, tuple[str, int]] = {}
        self._held: dict[NodeId, set[int]] = {}
        self._kept: dict[NodeId, tuple[str, int]] = {}
        self._checked_at: float | None = None
        self._grace_until: float | None = None

    def begin(
        self, session_id: SessionId, node_id: NodeId, instance_id: str, now: float
    ) -> Session | None:
        """Begin a session; returns the one it replaces, whose stream must be closed."""
        old = self._by_node.get(node_id)
        self._by_node[node_id] = Session(
            session_id, node_id, instance_id, now + self._lease_seconds
        )
        return old

    def is_current(self, session_id: SessionId, node_id: NodeId) -> bool:
        """Whether this session still speaks for its node."""
        session = self._by_node.get(node_id)
        return session is not None and session.session_id == session_id

    def renew(self, node_id: NodeId, now: float) -> None:
        """Something arrived from the node."""
        session = self._by_node.get(node_id)
        if session is not None:
            self._by_node[node_id] = replace(session, leased_until=now + self._lease_seconds)

    def end(self, session_id: SessionId, node_id: NodeId) -> bool:
        """End a session; False when a newer one has replaced it already."""
        if not self.is_current(session_id, node_id):
            return False
        del self._by_node[node_id]
        return True

    def expired(self, now: float) -> list[Session]:
        """Sessions whose lease has run out; call it a few times per lease.

        When the controller itself was stalled since the last call, what the nodes sent meanwhile
        still waits to be read, so everybody gets one more lease. When most of a fleet is
        silent at once, the controller's own network is the likelier fault: nobody is evicted for
        one more lease, and whoever is silent even then has really gone.
        """
        last, self._checked_at = self._checked_at, now
        if last is not None and now - last > self._lease_seconds / 2:
            for node_id in list(self._by_node):
                self.renew(node_id, now)
            return []
        # Leases that began within one interval of reports run out one after the other.
        silent = sum(
            session.leased_until - now <= _NEARLY_OVER_RATIO * self._lease_seconds
            for session in self._by_node.values()
        )
        overdue = [session for session in self._by_node.values() if session.leased_until <= now]
        if not most_are_silent(silent, len(self._by_node)):
            self._grace_until = None
            return overdue
        if self._grace_until is None and overdue:
            self._grace_until = now + self._lease_seconds
        if self._grace_until is not None and now < self._grace_until:
            return []
        return overdue

    # -- numbered facts: they arrive, are settled, are kept, and only then acknowledged ------------

    def accept(self, node_id: NodeId, instance_id: str, sequence: int) -> bool:
        """Take note of a numbered fact; False for one that has arrived before."""
        known_instance, arrived = self._arrived.get(node_id, ("", 0))
        if known_instance != instance_id:  # earlier starts are gone
            self._held.pop(node_id, None)
        elif sequence <= arrived:
            return False
        self._arrived[node_id] = (instance_id, sequence)
        return True

    def hold(self, node_id: NodeId, sequence: int) -> None:
        """A fact that has just arrived is not settled: what it brings is yet to be kept."""
        self._held.setdefault(node_id, set()).add(sequence)

    def settle(self, node_id: NodeId, instance_id: str, sequence: int) -> None:
        """What a held fact brought has been handed over to be kept."""
        if self._arrived.get(node_id, ("", 0))[0] == instance_id:
            self._held.get(node_id, set()).discard(sequence)

    def last_settled(self, node_id: NodeId) -> tuple[str, int]:
        """The start of the agent that spoke last, and up to which fact all of it is settled."""
        instance_id, arrived = self._arrived.get(node_id, ("", 0))
        held = self._held.get(node_id)
        return instance_id, min(held) - 1 if held else arrived

    def keep(self, node_id: NodeId, instance_id: str, sequence: int) -> bool:
        """Everything up to this fact is kept; False when that is no news."""
        if sequence <= self.acked_sequence(node_id, instance_id):
            return False
        self._kept[node_id] = (instance_id, sequence)
        return True

    def acked_sequence(self, node_id: NodeId, instance_id: str) -> int:
        """The last fact of this start of the agent up to which all is kept; 0 for none."""
        known_instance, sequence = self._kept.get(node_id, ("", 0))
        return sequence if known_instance == instance_id else 0

    def set_draining(self, node_id: NodeId, is_draining: bool) -> None:
        """Remember an operator's order over reconnects."""
        if is_draining:
            self._draining.add(node_id)
        else:
            self._draining.discard(node_id)

    def is_draining(self, node_id: NodeId) -> bool:
        """Whether an operator drains this node."""
        return node_id in self._draining
