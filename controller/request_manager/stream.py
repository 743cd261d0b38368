"""The way from a node's tokens to one client.

Text waits in a bounded buffer and is handed over in one piece, so a slow reader costs at most the
bound and is then cancelled instead of slowing the node or the others.
"""

import asyncio
from dataclasses import dataclass

from controller.domain.completion import Completion
from controller.errors import RequestTimeoutError, RouterError, SlowReaderError
from controller.ids import BatchId, ModelName, NodeId


@dataclass(frozen=True, slots=True)
class RoutedTo:
    """The request was dispatched."""

    node_id: NodeId
    model: ModelName
    batch_id: BatchId
    policy: str


@dataclass(frozen=True, slots=True)
class Text:
    """Whole characters, and the tokens they stand for."""

    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Done:
    """The answer is complete."""

    completion: Completion


StreamEvent = RoutedTo | Text | Done


class AnswerStream:
    """Events for one client, in order; belongs to the event loop.

    Args:
        max_buffered_bytes: unread text beyond this ends the stream with SlowReaderError.
    """

    def __init__(self, max_buffered_bytes: int) -> None:
        self._max_buffered_bytes = max_buffered_bytes
        self._routed: list[RoutedTo] = []
        self._text: list[str] = []
        self._tokens = 0
        self._buffered_bytes = 0
        self._ending: Done | RouterError | None = None
        self._changed = asyncio.Event()
        self._progress_at = asyncio.get_running_loop().time()

    @property
    def is_ended(self) -> bool:
        """Whether the last event is in."""
        return self._ending is not None

    def routed(self, event: RoutedTo) -> None:
        """The request was dispatched, for the first time or anew."""
        self._routed.append(event)
        self.touch()

    def touch(self) -> None:
        """The engine made progress without text to show."""
        self._progress_at = asyncio.get_running_loop().time()
        self._changed.set()

    def push(self, text: str, tokens: int) -> None:
        """Text arrived."""
        if self._ending is not None:
            return
        self._buffered_bytes += len(text.encode())
        if self._buffered_bytes > self._max_buffered_bytes:
            self.fail(SlowReaderError("The answer was read too slowly and has been cancelled."))
            return
        self._text.append(text)
        self._tokens += tokens
        self.touch()

    def finish(self, completion: Completion) -> None:
        """The answer is complete; ignored when the stream has ended."""
        if self._ending is None:
            self._ending = Done(completion)
            self._changed.set()

    def fail(self, error: RouterError) -> None:
        """The answer will not come; ignored when the stream has ended."""
        if self._ending is None:
            self._ending = error
            self._changed.set()

    async def next(self, deadline_at: float, progress_seconds: float) -> StreamEvent:
        """The next event.

        Args:
            deadline_at: loop time after which the request as a whole is too late.
            progress_seconds: longest silence of the engine.

        Raises:
            RouterError: the answer will not come.
            RequestTimeoutError: a deadline passed.
        """
        loop = asyncio.get_running_loop()
        while True:
            if self._routed:
                return self._routed.pop(0)
            if self._text:
                event = Text("".join(self._text), self._tokens)
                self._text.clear()
                self._tokens = self._buffered_bytes = 0
                return event
            if isinstance(self._ending, Done):
                return self._ending
            if self._ending is not None:
                raise self._ending
            until = min(deadline_at, self._progress_at + progress_seconds)
            remaining = until - loop.time()
            if remaining <= 0:
                if until == deadline_at:
                    raise RequestTimeoutError(
                        "The request did not end within its time limit; try again."
                    )
                raise RequestTimeoutError(
                    f"The node made no progress for {progress_seconds:g} s; try again."
                )
            self._changed.clear()
            # Not `wait_for`: before Python 3.12 it loses a cancellation that comes in the same
            # turn of the loop as the event, and then nobody frees the node's slot.
            timer = loop.call_later(remaining, self._changed.set)
            try:
                await self._changed.wait()
            finally:
                timer.cancel()
