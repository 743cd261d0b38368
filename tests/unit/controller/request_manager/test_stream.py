import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.domain.completion import Completion, FinishReason, Usage
from controller.errors import NodeLostError, RequestTimeoutError, RouterError, SlowReaderError
from controller.ids import BatchId, ModelName, NodeId
from controller.request_manager.stream import AnswerStream, Done, RoutedTo, StreamEvent, Text

pytestmark = pytest.mark.anyio

ROUTED = RoutedTo(NodeId("pi"), ModelName("small"), BatchId("b1"), "memetic")
COMPLETION = Completion(FinishReason.STOP, Usage(3, 4))
PATIENCE = 60.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def soon() -> float:
    return asyncio.get_running_loop().time() + PATIENCE


async def read(stream: AnswerStream) -> StreamEvent:
    return await stream.next(soon(), PATIENCE)


async def test_events_come_in_order_and_text_that_waited_in_one_piece() -> None:
    stream = AnswerStream(100)
    stream.routed(ROUTED)
    stream.push("He", 1)
    stream.push("llo", 2)
    assert await read(stream) == ROUTED
    assert await read(stream) == Text("Hello", 3)
    stream.push("!", 1)
    stream.finish(COMPLETION)
    assert await read(stream) == Text("!", 1)
    assert await read(stream) == Done(COMPLETION)


async def test_reader_that_waits_is_woken() -> None:
    stream = AnswerStream(100)
    reading = asyncio.create_task(read(stream))
    await asyncio.sleep(0)
    stream.push("Hi", 1)
    assert await reading == Text("Hi", 1)


@pytest.mark.parametrize(
    "late",
    [
        lambda stream: stream.finish(Completion(FinishReason.LENGTH, Usage())),
        lambda stream: stream.fail(NodeLostError("lost")),
        lambda stream: stream.push("more", 1),
    ],
)
async def test_stream_ends_once_and_takes_nothing_after_it(
    late: Callable[[AnswerStream], None],
) -> None:
    stream = AnswerStream(100)
    stream.push("Hi", 1)
    stream.finish(COMPLETION)
    late(stream)
    assert stream.is_ended
    assert await read(stream) == Text("Hi", 1)
    assert await read(stream) == Done(COMPLETION)
    assert await read(stream) == Done(COMPLETION)


async def test_failure_is_told_after_the_text_that_came_before_it() -> None:
    stream = AnswerStream(100)
    stream.push("Hi", 1)
    stream.fail(NodeLostError("node pi was lost"))
    stream.finish(COMPLETION)
    assert await read(stream) == Text("Hi", 1)
    for _ in range(2):
        with pytest.raises(NodeLostError, match="node pi was lost"):
            await read(stream)


async def test_slow_reader_costs_at_most_the_bound() -> None:
    """What was buffered is still delivered, and then the cancel with its reason."""
    stream = AnswerStream(10)
    stream.push("12345", 1)
    stream.push("67890", 1)
    assert not stream.is_ended
    stream.push("x", 1)
    assert stream.is_ended
    stream.push("y" * 1000, 1)
    assert await read(stream) == Text("1234567890", 2)
    with pytest.raises(SlowReaderError, match="too slowly"):
        await read(stream)


async def test_bound_counts_bytes_and_starts_anew_when_text_was_read() -> None:
    stream = AnswerStream(10)
    stream.push("ééé", 1)  # 6 bytes
    await read(stream)
    stream.push("ééééé", 1)  # 10 bytes
    assert not stream.is_ended
    stream.push("é", 1)
    assert stream.is_ended


async def test_request_as_a_whole_has_a_deadline() -> None:
    stream = AnswerStream(100)
    with pytest.raises(RequestTimeoutError, match="did not end within its time limit"):
        await stream.next(asyncio.get_running_loop().time(), PATIENCE)


async def test_silent_engine_has_a_deadline() -> None:
    stream = AnswerStream(100)
    with pytest.raises(RequestTimeoutError, match="no progress for 0 s"):
        await stream.next(soon(), 0.0)


async def test_progress_without_text_keeps_a_request_alive() -> None:
    """A long prompt is being read.

    1. the reader waits; 2. half of the allowed silence passes, then the engine says that it
    reads; 3. after the first deadline the request is still waited for; 4. its text comes.
    """
    loop = asyncio.get_running_loop()
    stream = AnswerStream(100)
    reading = asyncio.create_task(stream.next(soon(), 0.1))
    loop.call_later(0.05, stream.touch)
    loop.call_later(0.12, stream.push, "Hi", 1)
    assert await reading == Text("Hi", 1)


async def test_what_is_there_already_is_delivered_even_after_the_deadline() -> None:
    stream = AnswerStream(100)
    stream.push("Hi", 1)
    stream.finish(COMPLETION)
    assert await stream.next(0.0, 0.0) == Text("Hi", 1)
    assert await stream.next(0.0, 0.0) == Done(COMPLETION)


pushes = st.lists(st.tuples(st.text(max_size=8), st.integers(0, 3), st.booleans()), max_size=30)


@given(pushes, st.booleans())
def test_reader_gets_every_character_in_order_and_one_ending(
    pieces: list[tuple[str, int, bool]], fails: bool
) -> None:
    async def scenario() -> None:
        stream = AnswerStream(10_000)
        text, tokens = "", 0
        for piece, count, reads in pieces:
            stream.push(piece, count)
            if reads and piece:
                event = await read(stream)
                assert isinstance(event, Text)
                text, tokens = text + event.text, tokens + event.tokens
        if fails:
            stream.fail(NodeLostError("lost"))
        else:
            stream.finish(COMPLETION)
        ending: StreamEvent | RouterError | None = None
        while ending is None:
            try:
                event = await read(stream)
            except RouterError as error:
                ending = error
                break
            if isinstance(event, Text):
                text, tokens = text + event.text, tokens + event.tokens
            else:
                ending = event
        assert text == "".join(piece for piece, _, _ in pieces)
        assert tokens == sum(count for _, count, _ in pieces)
        assert isinstance(ending, NodeLostError if fails else Done)

    asyncio.run(scenario())


@pytest.mark.parametrize("turns", range(5))
async def test_cancellation_that_comes_with_an_event_is_not_lost(turns: int) -> None:
    """1. a reader waits; 2. text comes; 3. before the reader has it, its client goes away."""
    stream = AnswerStream(100)
    reading = asyncio.create_task(read(stream))
    for _ in range(3):
        await asyncio.sleep(0)
    stream.push("Hi", 1)
    for _ in range(turns):
        await asyncio.sleep(0)
    if not reading.done():
        assert reading.cancel()
        await asyncio.wait([reading])
        assert reading.cancelled()
