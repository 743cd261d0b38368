"""Facts that must reach the controller: numbered, bounded, resent until acknowledged. Pure."""

from collections import deque
from typing import Generic, TypeVar

Fact = TypeVar("Fact")


class Outbox(Generic[Fact]):
    """Completions, and the ends of orders, on their way.

    Args:
        capacity: facts kept; the oldest are dropped beyond it, and counted, since a node that
            has been away for thousands of completions must not run out of memory.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._facts: deque[tuple[int, Fact]] = deque()
        self._capacity = capacity
        self._last_sequence = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._facts)

    def add(self, fact: Fact) -> int:
        """Keep a fact until it is acknowledged; returns its sequence number."""
        self._last_sequence += 1
        self._facts.append((self._last_sequence, fact))
        if len(self._facts) > self._capacity:
            self._facts.popleft()
            self.dropped += 1
        return self._last_sequence

    def acknowledge(self, sequence: int) -> None:
        """Forget everything up to this number."""
        while self._facts and self._facts[0][0] <= sequence:
            self._facts.popleft()

    def pending(self) -> list[tuple[int, Fact]]:
        """What must be sent again after a reconnect, oldest first."""
        return list(self._facts)
