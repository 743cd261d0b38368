"""What this node has to say to the controller, kept in order until the stream can take it.

The parts of the agent say it here, whether there is a session or not; `session.py` sends it.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Final

from edge_agent.link.convert import completion_to_proto
from edge_agent.link.outbox import Outbox
from edge_agent.serving.completion import Completion
from edge_agent.serving.orders import OrderUpdate
from pointsman.convert import ORDER_UPDATE
from pointsman.v1 import fleet_pb2

_POLL_SECONDS: Final = 0.01
"""Only while the agent stops, so a poll will do."""


class Outgoing:
    """Facts, progress and reports on their way. Belongs to the event loop.

    Progress is merged while the stream is slow, so what waits to be sent is bounded by the text of
    the running answers; completions wait in the outbox until they are acknowledged.

    Args:
        address: of the controller, for people.

    Attributes:
        last_error: why the last attempt to connect failed; None once connected.
    """

    def __init__(self, address: str) -> None:
        self._outbox: Outbox[fleet_pb2.ConnectRequest] = Outbox()
        self._unsent_facts: list[fleet_pb2.ConnectRequest] = []
        self._order_updates: dict[str, fleet_pb2.OrderUpdate] = {}
        self._progress: dict[tuple[str, int], tuple[list[str], int]] = {}
        self._urgent: list[fleet_pb2.ConnectRequest] = []
        self._has_models = False
        self._something = asyncio.Event()
        self._connected_at: float | None = None
        self.last_error: str | None = f"no answer from {address} yet"

    @property
    def is_connected(self) -> bool:
        """Whether the controller has welcomed this session."""
        return self._connected_at is not None

    @property
    def connected_seconds(self) -> float | None:
        """How long this session has lasted; None while there is none."""
        return None if self._connected_at is None else time.monotonic() - self._connected_at

    @property
    def unacknowledged_completions(self) -> int:
        """Completions, and ends of orders, that the controller has not confirmed."""
        return len(self._outbox)

    # -- what the agent has to say ----------------------------------------------------------------

    def progressed(self, request_id: str, attempt: int, text: str, tokens: int) -> None:
        """Tokens came; dropped while there is no session, since the request ends with it."""
        if not self.is_connected:
            return
        pieces, count = self._progress.get((request_id, attempt), ([], 0))
        if text:
            pieces.append(text)
        self._progress[request_id, attempt] = (pieces, count + tokens)
        self._something.set()

    def completed(self, completion: Completion) -> None:
        """An order ended; kept until the controller has it."""
        self._keep(fleet_pb2.ConnectRequest(completion=completion_to_proto(completion)))

    def order_updated(self, update: OrderUpdate) -> None:
        """An order goes on, of which only the latest word is sent, or has ended, which is kept."""
        message = ORDER_UPDATE.write(update)
        if update.is_last:
            self._order_updates.pop(update.order_id, None)
            self._keep(fleet_pb2.ConnectRequest(order_update=message))
        elif self.is_connected:
            self._order_updates[update.order_id] = message
            self._something.set()

    def _keep(self, fact: fleet_pb2.ConnectRequest) -> None:
        fact.sequence = self._outbox.add(fact)
        self._unsent_facts.append(fact)
        self._something.set()

    def models_changed(self) -> None:
        """The models' list is sent again."""
        self._has_models = True
        self._something.set()

    async def say_goodbye(self, reason: str, seconds: float) -> None:
        """Say that this node takes nothing new; waits for nothing else."""
        if self.is_connected:
            goodbye = fleet_pb2.Goodbye(reason=reason)
            self._urgent.append(fleet_pb2.ConnectRequest(goodbye=goodbye))
            self._something.set()
            await self._wait_until(lambda: not self._urgent, seconds)

    async def flush(self, seconds: float) -> None:
        """Wait until the controller has every fact, for at most this long."""
        await self._wait_until(lambda: not len(self._outbox), seconds)

    async def _wait_until(self, is_done: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not is_done() and self.is_connected and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)

    # -- for the session --------------------------------------------------------------------------

    def welcomed(self, acked_sequence: int) -> None:
        """A session has begun; the controller has every fact up to this number."""
        self._outbox.acknowledge(acked_sequence)
        self._unsent_facts = [fact for _, fact in self._outbox.pending()]
        self._progress.clear()
        self._order_updates.clear()
        self._urgent.clear()
        self._has_models = True  # what changed since the Hello was made
        self._connected_at = time.monotonic()
        self.last_error = None
        self._something.set()

    def lost(self, reason: str) -> bool:
        """There is no session now; returns whether there was one."""
        was_connected = self.is_connected
        self._connected_at = None
        self.last_error = reason
        self._progress.clear()
        return was_connected

    def acknowledge(self, sequence: int) -> None:
        """The controller has every fact up to this number."""
        self._outbox.acknowledge(sequence)

    def echo(self, echo: fleet_pb2.ProbeEcho) -> None:
        """Ahead of everything queued, so that it measures the path."""
        self._urgent.insert(0, fleet_pb2.ConnectRequest(probe_echo=echo))
        self._something.set()

    def report_health(self, health: fleet_pb2.HealthSample) -> None:
        """One waiting sample is enough; an old one says nothing that a new one does not."""
        self._urgent = [m for m in self._urgent if m.WhichOneof("message") != "health"]
        self._urgent.append(fleet_pb2.ConnectRequest(health=health))
        self._something.set()

    async def wait(self) -> None:
        """Return when there may be something to send."""
        await self._something.wait()
        self._something.clear()

    def messages(
        self, models: Callable[[], list[fleet_pb2.ModelState]]
    ) -> Iterator[fleet_pb2.ConnectRequest]:
        """All there is to say now: urgent things first, an answer's text before its end.

        Args:
            models: asked when they are reported.
        """
        while self._urgent:
            yield self._urgent.pop(0)
        if self._has_models:
            self._has_models = False
            yield fleet_pb2.ConnectRequest(models=fleet_pb2.ModelReport(models=models()))
        updates, self._order_updates = self._order_updates, {}
        for update in updates.values():
            yield fleet_pb2.ConnectRequest(order_update=update)
        facts, self._unsent_facts = self._unsent_facts, []
        progress, self._progress = self._progress, {}
        for (request_id, attempt), (pieces, tokens) in progress.items():
            yield fleet_pb2.ConnectRequest(
                progress=fleet_pb2.WorkProgress(
                    request_id=request_id, attempt=attempt, text="".join(pieces), tokens=tokens
                )
            )
        yield from facts
