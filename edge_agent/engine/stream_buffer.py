"""Events of one generation on their way from an engine to a reader that may be late."""

import asyncio
import collections
from typing import Final

from edge_agent.engine.base import GenerationEvent, PromptProgress, SlowReaderError, TextChunk

MAX_UNREAD_CHARACTERS: Final = 32_768
_MERGED_BEYOND_EVENTS: Final = 64


class StreamBuffer:
    """A bounded queue of events that ends once, with an exception or after `Finished`.

    A reader that is a little late loses nothing: beyond some events neighbouring chunks are
    merged, so that only their text takes room. A reader that leaves more than
    `MAX_UNREAD_CHARACTERS` of text gets `SlowReaderError` after what was buffered.
    One reader; everything happens on the event loop.
    """

    def __init__(self, max_unread_characters: int = MAX_UNREAD_CHARACTERS) -> None:
        self._limit = max_unread_characters
        self._events: collections.deque[GenerationEvent] = collections.deque()
        self._unread_characters = 0
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    def put(self, event: GenerationEvent) -> bool:
        """Add an event; False when the buffer has ended, then the event is dropped.

        The caller cancels the generation on False.
        """
        if self._error is not None:
            return False
        if isinstance(event, TextChunk):
            self._unread_characters += len(event.text)
            if self._unread_characters > self._limit:
                self.fail(
                    SlowReaderError(
                        f"The reader left more than {self._limit} characters unread;"
                        " the generation was cancelled."
                    )
                )
                return False
        last = self._events[-1] if self._events else None
        if isinstance(last, PromptProgress) and isinstance(event, PromptProgress):
            self._events[-1] = event
        elif (
            len(self._events) >= _MERGED_BEYOND_EVENTS
            and isinstance(last, TextChunk)
            and isinstance(event, TextChunk)
        ):
            self._events[-1] = TextChunk(last.text + event.text, last.tokens + event.tokens)
        else:
            self._events.append(event)
        self._changed.set()
        return True

    def fail(self, error: Exception) -> None:
        """End with an error, after what is buffered; the first error counts."""
        if self._error is None:
            self._error = error
            self._changed.set()

    async def get(self) -> GenerationEvent:
        """Wait for the next event.

        Raises:
            Exception: the error that the buffer ended with.
        """
        while not self._events:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        event = self._events.popleft()
        if isinstance(event, TextChunk):
            self._unread_characters -= len(event.text)
        return event
