import asyncio
from pathlib import Path

import pytest

from edge_agent.engine.base import (
    EngineSettings,
    Finished,
    GenerationRequest,
    Message,
    RejectedError,
    RejectionKind,
    Sampling,
    SlowReaderError,
    TextChunk,
)
from edge_agent.engine.fake import FakeEngine, FakeSpeeds, count_fake_tokens
from edge_agent.errors import EngineError, EngineFailure


class FakeTime:
    """Sleeps pass at once and move the clock."""

    def __init__(self) -> None:
        self.now = 100.0

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


def settings(slots: int = 2) -> EngineSettings:
    return EngineSettings(Path("fake.gguf"), context_tokens=512, slots=slots)


async def answer_of(engine: FakeEngine, request: GenerationRequest) -> tuple[str, Finished]:
    text = ""
    async for event in engine.generate(request):
        if isinstance(event, TextChunk):
            text += event.text
        if isinstance(event, Finished):
            return text, event
    raise AssertionError("no account")


def test_speeds_set_the_seconds_of_one_sequence() -> None:
    async def scenario() -> None:
        time = FakeTime()
        engine = FakeEngine(
            settings(),
            speeds=FakeSpeeds(
                prefill_tokens_per_second=100.0, decode_tokens_per_second=10.0, load_seconds=5.0
            ),
            answer=lambda prompt, seed: "one two three four",
            sleep=time.sleep,
            clock=time.clock,
        )
        await engine.load()
        assert time.now == 105.0
        text, account = await answer_of(engine, GenerationRequest("k", "word " * 50))
        assert text == "one two three four"
        assert account.prompt_tokens == 50
        assert account.completion_tokens == 4
        assert account.prefill_seconds == pytest.approx(0.5)
        assert account.decode_seconds == pytest.approx(0.4)
        assert account.work_seconds == pytest.approx(0.9)
        assert engine.stats().busy_seconds_total == pytest.approx(0.9)

    asyncio.run(scenario())


def test_a_chat_is_refused_without_a_template_and_taken_with_one_from_the_settings() -> None:
    async def scenario() -> None:
        chat = GenerationRequest("k", (Message("user", "hello"),))
        engine = FakeEngine(settings(), has_chat_template=False)
        await engine.load()
        with pytest.raises(RejectedError) as caught:
            await answer_of(engine, chat)
        assert caught.value.kind is RejectionKind.NO_CHAT_TEMPLATE
        overridden = EngineSettings(Path("fake.gguf"), chat_template="{{ messages }}")
        engine = FakeEngine(overridden, has_chat_template=False)
        await engine.load()
        text, _ = await answer_of(engine, chat)
        assert text

    asyncio.run(scenario())


def test_a_load_failure_is_raised_and_shown() -> None:
    async def scenario() -> None:
        failure = EngineError(EngineFailure.OUT_OF_MEMORY, "Too big.")
        engine = FakeEngine(settings(), load_failure=failure)
        with pytest.raises(EngineError):
            await engine.load()
        assert engine.stats().issue == "engine_out_of_memory: Too big."
        engine.load_failure = None
        await engine.load()
        assert engine.stats().issue is None

    asyncio.run(scenario())


def test_a_reader_that_never_reads_is_cancelled_and_frees_its_slot() -> None:
    """S12."""

    async def scenario() -> None:
        engine = FakeEngine(
            settings(slots=1),
            answer=lambda prompt, seed: "word " * 400,
            max_unread_characters=1000,
        )
        await engine.load()
        request = GenerationRequest("slow", "hi", Sampling(max_tokens=400))
        stream = engine.generate(request)
        await anext(stream)
        while engine.stats().busy_slots:
            await asyncio.sleep(0)
        with pytest.raises(SlowReaderError):
            assert not [event async for event in stream if isinstance(event, Finished)]

    asyncio.run(scenario())


def test_tokens_are_words_with_the_space_after_them() -> None:
    assert count_fake_tokens("one two  three") == 3
    assert count_fake_tokens("") == 0
