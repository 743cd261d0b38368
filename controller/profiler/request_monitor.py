"""Work in flight at one node, by the controller's own dispatch and completion records.

The paper (III-B) has B <- max(0, B - elapsed) + newly assigned service time. Ours corrects it:
a request's share shrinks with the tokens it has streamed, and is gone when it completes, so B is 0
exactly when nothing is in flight.
"""

from dataclasses import dataclass, replace

from controller.ids import ModelName, RequestId


@dataclass(frozen=True, slots=True)
class InFlight:
    """One dispatched request.

    Attributes:
        work_seconds: predicted executor seconds, as assigned.
        expected_tokens: predicted length of the answer, at least 1.
        streamed_tokens: received so far.
        updated_at: monotonic seconds of dispatch or of the last token.
    """

    model: ModelName
    work_seconds: float
    expected_tokens: float
    streamed_tokens: int
    updated_at: float

    def remaining_seconds(self) -> float:
        """Work that its streamed tokens have not yet paid for.

        An answer that outgrows its prediction keeps a tenth of its work until it ends: it is
        still there, and nobody knows for how long.
        """
        done = min(self.streamed_tokens / self.expected_tokens, 0.9)
        return self.work_seconds * (1.0 - done)


class RequestMonitor:
    """The in-flight view of one node; owned by the profiler's state."""

    def __init__(self) -> None:
        self._in_flight: dict[RequestId, InFlight] = {}

    def __len__(self) -> int:
        return len(self._in_flight)

    def dispatched(
        self,
        request_id: RequestId,
        model: ModelName,
        work_seconds: float,
        expected_tokens: float,
        now: float,
    ) -> None:
        """Record a claim, at decision time, before the order leaves."""
        self._in_flight[request_id] = InFlight(
            model, max(work_seconds, 0.0), max(expected_tokens, 1.0), 0, now
        )

    def progressed(self, request_id: RequestId, tokens: int, now: float) -> None:
        """Record streamed tokens; unknown requests are ignored, since events may cross."""
        entry = self._in_flight.get(request_id)
        if entry is not None:
            streamed = entry.streamed_tokens + max(tokens, 0)  # a node may say anything
            self._in_flight[request_id] = replace(entry, streamed_tokens=streamed, updated_at=now)

    def ended(self, request_id: RequestId) -> bool:
        """Forget a request, however it ended; False when it was not in flight."""
        return self._in_flight.pop(request_id, None) is not None

    def clear(self) -> int:
        """Forget everything: the node is gone; returns how many requests were lost with it."""
        lost = len(self._in_flight)
        self._in_flight.clear()
        return lost

    def backlog_seconds(self, now: float) -> float:
        """B: predicted executor seconds of work ahead of a new batch at `now`.

        The executor works on one thing or another all the time, so what passed since the last sign
        of progress is taken off the sum, but never below what the longest request may still need
        at the least, which guards against a silent node looking idle.
        """
        if not self._in_flight:
            return 0.0
        remaining = [entry.remaining_seconds() for entry in self._in_flight.values()]
        elapsed = now - max(entry.updated_at for entry in self._in_flight.values())
        return max(sum(remaining) - max(elapsed, 0.0), 0.1 * max(remaining))
