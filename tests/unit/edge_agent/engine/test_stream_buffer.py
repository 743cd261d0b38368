import asyncio

import pytest

from edge_agent.engine.base import (
    Finished,
    GenerationEvent,
    PromptProgress,
    SlowReaderError,
    StopReason,
    TextChunk,
)
from edge_agent.engine.stream_buffer import StreamBuffer

FINISHED = Finished(StopReason.STOP, 1, 1, 0.0, 0.0, 0.0, 0.0)


async def drain(buffer: StreamBuffer) -> list[GenerationEvent]:
    events: list[GenerationEvent] = []
    while not events or not isinstance(events[-1], Finished):
        events.append(await buffer.get())
    return events


def test_events_come_out_in_order() -> None:
    async def scenario() -> None:
        buffer = StreamBuffer()
        events: list[GenerationEvent] = [PromptProgress(3, 3), TextChunk("a", 1), FINISHED]
        assert all(buffer.put(event) for event in events)
        assert await drain(buffer) == events

    asyncio.run(scenario())


def test_a_reader_that_waits_is_woken() -> None:
    async def scenario() -> None:
        buffer = StreamBuffer()
        reader = asyncio.create_task(buffer.get())
        await asyncio.sleep(0)
        buffer.put(FINISHED)
        assert await asyncio.wait_for(reader, 60.0) is FINISHED

    asyncio.run(scenario())


def test_a_late_reader_loses_no_text_and_costs_few_events() -> None:
    async def scenario() -> None:
        buffer = StreamBuffer()
        for number in range(1000):
            assert buffer.put(TextChunk(str(number % 10), 1))
        buffer.put(FINISHED)
        events = await drain(buffer)
        chunks = [event for event in events if isinstance(event, TextChunk)]
        assert len(events) < 100
        assert "".join(chunk.text for chunk in chunks) == "0123456789" * 100
        assert sum(chunk.tokens for chunk in chunks) == 1000

    asyncio.run(scenario())


def test_progress_that_nobody_read_is_replaced_by_newer() -> None:
    async def scenario() -> None:
        buffer = StreamBuffer()
        for read in range(1, 101):
            buffer.put(PromptProgress(read, 100))
        buffer.put(FINISHED)
        assert await drain(buffer) == [PromptProgress(100, 100), FINISHED]

    asyncio.run(scenario())


def test_a_reader_that_leaves_too_much_unread_is_told_so_after_what_was_buffered() -> None:
    """S12."""

    async def scenario() -> None:
        buffer = StreamBuffer(max_unread_characters=10)
        assert buffer.put(TextChunk("12345678", 1))
        assert not buffer.put(TextChunk("9ab", 1))
        assert not buffer.put(TextChunk("c", 1))
        assert await buffer.get() == TextChunk("12345678", 1)
        with pytest.raises(SlowReaderError):
            await buffer.get()

    asyncio.run(scenario())


def test_text_that_was_read_makes_room_again() -> None:
    async def scenario() -> None:
        buffer = StreamBuffer(max_unread_characters=10)
        for _ in range(100):
            assert buffer.put(TextChunk("12345678", 1))
            await buffer.get()

    asyncio.run(scenario())


def test_the_first_error_counts() -> None:
    async def scenario() -> None:
        buffer = StreamBuffer()
        buffer.fail(KeyError("first"))
        buffer.fail(ValueError("second"))
        assert not buffer.put(FINISHED)
        with pytest.raises(KeyError):
            await buffer.get()

    asyncio.run(scenario())
