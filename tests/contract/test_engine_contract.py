"""Every engine keeps the promises of `edge_agent/engine/base.py`."""

import asyncio
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from edge_agent.engine.base import (
    EngineSettings,
    Finished,
    FormatKind,
    GenerationEvent,
    GenerationRequest,
    InferenceEngine,
    LoadedModel,
    Message,
    PromptProgress,
    RejectedError,
    RejectionKind,
    ResponseFormat,
    Sampling,
    SlowReaderError,
    StopReason,
    TextChunk,
)
from edge_agent.engine.fake import FakeEngine, FakeSpeeds, fake_answer
from edge_agent.engine.llama.supervisor import SupervisedEngine
from edge_agent.engine.remote.engine import OpenAiEngine
from edge_agent.engine.remote.settings import OpenAiSettings
from edge_agent.errors import EngineError, EngineFailure
from tests.fakes.openai_server import OpenAiServer, answering

pytestmark = pytest.mark.anyio

SLOTS = 2
CONTEXT_TOKENS = 256
WAIT_SECONDS = 200.0
MAX_UNREAD_CHARACTERS = 400
PROMPT = "The old lighthouse keeper wrote in his diary:"

MakeEngine = Callable[[], InferenceEngine]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


def long_answer(prompt: str, seed: int) -> str:
    return " ".join(fake_answer(prompt, seed + part) for part in range(8))


def make_fake() -> FakeEngine:
    settings = EngineSettings(Path("fake.gguf"), context_tokens=CONTEXT_TOKENS, slots=SLOTS)
    speeds = FakeSpeeds(
        prefill_tokens_per_second=20_000.0,
        decode_tokens_per_second=500.0,
        saturated_decode_tokens_per_second=800.0,
    )
    return FakeEngine(
        settings,
        speeds=speeds,
        max_queued=4,
        max_unread_characters=MAX_UNREAD_CHARACTERS,
        answer=long_answer,
    )


class RemoteEngine(OpenAiEngine):
    """An endpoint with its server, which comes and goes with it."""

    def __init__(self) -> None:
        self._behind = make_fake()
        self.server = OpenAiServer(answering(self._behind))
        super().__init__(
            OpenAiSettings(self.server.base_url, slots=SLOTS, context_tokens=CONTEXT_TOKENS),
            max_queued=4,
            first_retry_seconds=0.4,
            max_unread_characters=MAX_UNREAD_CHARACTERS,
        )

    async def load(self) -> LoadedModel:
        await self._behind.load()
        await self.server.start()
        return await super().load()

    async def close(self) -> None:
        await super().close()
        await self.server.close()
        await self._behind.close()


def make_llama() -> InferenceEngine:
    folder = os.environ.get("POINTSMAN_TEST_MODELS") or Path.home() / ".cache/pointsman/models"
    path = Path(folder) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.exists():
        pytest.skip(f"there is no {path}; pull the model or set POINTSMAN_TEST_MODELS")
    settings = EngineSettings(path, context_tokens=CONTEXT_TOKENS, slots=SLOTS, threads=2)
    return SupervisedEngine(
        settings,
        max_queued=4,
        first_restart_seconds=0.1,
        max_unread_characters=MAX_UNREAD_CHARACTERS,
    )


@pytest.fixture(
    scope="module", params=["fake", "openai", pytest.param("llama", marks=pytest.mark.llama)]
)
def make_engine(request: pytest.FixtureRequest) -> MakeEngine:
    makers: dict[str, MakeEngine] = {
        "fake": make_fake,
        "openai": RemoteEngine,
        "llama": make_llama,
    }
    return makers[request.param]


@pytest.fixture(scope="module")
async def engine(make_engine: MakeEngine) -> AsyncIterator[InferenceEngine]:
    engine = make_engine()
    await engine.load()
    yield engine
    await engine.close()


def crash(engine: InferenceEngine) -> None:
    """End what decodes the hard way."""
    if isinstance(engine, FakeEngine):
        engine.fail(EngineError(EngineFailure.CRASHED, "The child was killed by signal 9."))
        asyncio.get_running_loop().call_later(0.05, engine.recover)
    elif isinstance(engine, RemoteEngine):
        engine.server.crash()
    else:
        assert isinstance(engine, SupervisedEngine)
        assert engine.child_pid is not None
        os.kill(engine.child_pid, signal.SIGKILL)


def request_for(key: str, **sampling: object) -> GenerationRequest:
    fields: dict[str, object] = {"max_tokens": 24, "temperature": 0.0, **sampling}
    return GenerationRequest(key, PROMPT, Sampling(**fields))  # type: ignore[arg-type]


async def read_all(engine: InferenceEngine, request: GenerationRequest) -> list[GenerationEvent]:
    async def read() -> list[GenerationEvent]:
        return [event async for event in engine.generate(request)]

    return await asyncio.wait_for(read(), WAIT_SECONDS)


async def read_unfinished(stream: AsyncIterator[GenerationEvent]) -> None:
    async def read() -> None:
        async for event in stream:
            assert not isinstance(event, Finished)

    await asyncio.wait_for(read(), WAIT_SECONDS)


def text_of(events: list[GenerationEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextChunk))


def account_of(events: list[GenerationEvent]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]


async def until(condition: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(poll(), WAIT_SECONDS)


async def test_loading_tells_what_came_out(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert not engine.stats().is_ready
    model = await engine.load()
    try:
        assert model.slots == SLOTS
        assert model.context_tokens == CONTEXT_TOKENS
        assert model.characters_per_token is not None
        assert 1.0 < model.characters_per_token < 20.0
        assert engine.stats().is_ready
        assert engine.stats().issue is None
    finally:
        await engine.close()
    assert not engine.stats().is_ready


async def test_a_generation_ends_with_exactly_one_account(engine: InferenceEngine) -> None:
    events = await read_all(engine, request_for("one"))
    assert [type(e) for e in events].count(Finished) == 1
    account = account_of(events)
    assert account.reason in (StopReason.STOP, StopReason.LENGTH)
    assert account.prompt_tokens > 0
    assert 0 < account.completion_tokens <= 24
    chunks = [e for e in events if isinstance(e, TextChunk)]
    assert all(chunk.text for chunk in chunks)
    assert 0 < sum(chunk.tokens for chunk in chunks) <= account.completion_tokens
    assert account.queue_seconds >= 0
    assert account.prefill_seconds >= 0
    assert account.decode_seconds > 0
    assert account.work_seconds > 0


async def test_progress_of_the_prompt_comes_before_its_answer(engine: InferenceEngine) -> None:
    events = await read_all(engine, request_for("progress"))
    kinds = [type(e) for e in events]
    assert PromptProgress in kinds
    last_progress = max(i for i, kind in enumerate(kinds) if kind is PromptProgress)
    first_text = kinds.index(TextChunk)
    assert last_progress < first_text
    final = events[last_progress]
    assert isinstance(final, PromptProgress)
    assert final.tokens_read == final.tokens_total > 0
    if not isinstance(engine, OpenAiEngine):  # whose server counts at the end of the answer
        assert final.tokens_total == account_of(events).prompt_tokens


async def test_max_tokens_ends_an_answer_with_length(engine: InferenceEngine) -> None:
    account = account_of(await read_all(engine, request_for("short", max_tokens=3)))
    assert account.reason is StopReason.LENGTH
    assert account.completion_tokens == 3


async def test_a_greedy_answer_is_the_same_each_time(engine: InferenceEngine) -> None:
    first = text_of(await read_all(engine, request_for("greedy-1")))
    second = text_of(await read_all(engine, request_for("greedy-2")))
    assert first == second != ""


async def test_the_same_seed_gives_the_same_text_and_another_seed_another(
    engine: InferenceEngine,
) -> None:
    async def sampled(seed: int) -> str:
        request = request_for(f"seed-{seed}", seed=seed, temperature=1.2, top_k=0, top_p=1.0)
        return text_of(await read_all(engine, request))

    assert await sampled(7) == await sampled(7)
    assert len({await sampled(seed) for seed in (1, 2, 2**63 + 1)}) == 3


async def test_text_ends_before_the_first_stop_string(engine: InferenceEngine) -> None:
    whole = text_of(await read_all(engine, request_for("whole")))
    middle = len(whole) // 2
    # Cut within a word, so that the stop string crosses the borders of tokens.
    stop = whole[middle - 4 : middle + 4]
    events = await read_all(engine, request_for("stopped", stop=("never there", stop)))
    assert text_of(events) == whole[: whole.index(stop)]
    assert account_of(events).reason is StopReason.STOP


async def test_a_stop_string_that_does_not_appear_changes_nothing(
    engine: InferenceEngine,
) -> None:
    whole = text_of(await read_all(engine, request_for("plain")))
    # Begins like the end of the answer, so that text is held back until the end.
    stop = whole[-3:] + "\N{SNOWMAN}"
    events = await read_all(engine, request_for("held", stop=(stop,)))
    assert text_of(events) == whole


async def test_two_streams_interleave_and_never_mix(engine: InferenceEngine) -> None:
    prompts = {"a": "One apple, two apples, three", "b": "My favourite colours are red, green"}
    alone = {}
    for key, prompt in prompts.items():
        request = GenerationRequest(f"alone-{key}", prompt, Sampling(24, temperature=0.0))
        alone[key] = text_of(await read_all(engine, request))
    order: list[str] = []
    together: dict[str, str] = {"a": "", "b": ""}

    async def read(key: str) -> None:
        request = GenerationRequest(key, prompts[key], Sampling(24, temperature=0.0))
        async for event in engine.generate(request):
            if isinstance(event, TextChunk):
                order.append(key)
                together[key] += event.text

    await asyncio.wait_for(asyncio.gather(read("a"), read("b")), WAIT_SECONDS)
    assert together == alone
    turns = sum(x != y for x, y in itertools.pairwise(order))
    assert turns > 6


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"seed": -1},
        {"seed": 2**64},
        {"stop": ("",)},
        {"stop": ("\ud800",)},
    ],
)
async def test_sampling_that_means_nothing_is_rejected(
    engine: InferenceEngine, sampling: dict[str, object]
) -> None:
    with pytest.raises(RejectedError) as caught:
        await read_all(engine, request_for("bad", **sampling))
    assert caught.value.kind is RejectionKind.INVALID_REQUEST


@pytest.mark.parametrize(
    "prompt", ["", (), (Message("user", ""),), (Message("robot", "hi"),), "half \ud83d"]
)
async def test_a_prompt_that_means_nothing_is_rejected(
    engine: InferenceEngine, prompt: str | tuple[Message, ...]
) -> None:
    with pytest.raises(RejectedError) as caught:
        await read_all(engine, GenerationRequest("bad", prompt))
    assert caught.value.kind is RejectionKind.INVALID_REQUEST


async def test_a_prompt_longer_than_the_context_is_rejected_and_the_rest_goes_on(
    engine: InferenceEngine,
) -> None:
    """P8."""
    too_long = GenerationRequest("long", "word " * (CONTEXT_TOKENS + 50))
    results = await asyncio.gather(
        read_all(engine, too_long), read_all(engine, request_for("fine")), return_exceptions=True
    )
    assert isinstance(results[0], RejectedError)
    assert results[0].kind is RejectionKind.CONTEXT_EXCEEDED
    assert isinstance(results[1], list)


async def test_an_answer_that_reaches_the_end_of_the_context_ends_with_length(
    engine: InferenceEngine,
) -> None:
    words = "red blue " * ((CONTEXT_TOKENS - 10) // 2)
    request = GenerationRequest("full", words, Sampling(4096, temperature=0.0))
    account = account_of(await read_all(engine, request))
    assert account.reason is StopReason.LENGTH
    assert account.prompt_tokens + account.completion_tokens == CONTEXT_TOKENS


async def test_a_second_request_with_the_same_key_is_rejected(engine: InferenceEngine) -> None:
    stream = engine.generate(request_for("twice", max_tokens=200))
    await anext(stream)
    with pytest.raises(RejectedError) as caught:
        await read_all(engine, request_for("twice"))
    assert caught.value.kind is RejectionKind.INVALID_REQUEST
    await stream.aclose()  # type: ignore[attr-defined]
    await until(lambda: engine.stats().busy_slots == 0)


async def test_more_requests_than_slots_wait_and_more_than_the_queue_are_rejected(
    engine: InferenceEngine,
) -> None:
    """R11: slots and queue hold exactly what they promise."""
    capacity = SLOTS + 4
    results = await asyncio.gather(
        *(read_all(engine, request_for(f"q{i}", max_tokens=12)) for i in range(capacity + 3)),
        return_exceptions=True,
    )
    rejected = [r for r in results if isinstance(r, RejectedError)]
    assert [r.kind for r in rejected] == [RejectionKind.QUEUE_FULL] * 3
    assert sum(isinstance(r, list) for r in results) == capacity
    assert engine.stats().busy_slots == engine.stats().queued_requests == 0


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "count": {"type": "integer"},
        "colour": {"enum": ["red", "green"]},
    },
    "required": ["name", "count", "colour"],
}


async def test_a_response_format_is_kept_or_refused(make_engine: MakeEngine) -> None:
    """Never ignored."""
    engine = make_engine()
    model = await engine.load()
    wanted = ResponseFormat(FormatKind.JSON_SCHEMA, json.dumps(SCHEMA))
    chat = (Message("user", "Describe a ball as JSON."),)
    request = GenerationRequest("json", chat, Sampling(150, temperature=0.0), wanted)
    try:
        if not model.supports_response_format:
            with pytest.raises(RejectedError) as caught:
                await read_all(engine, request)
            assert caught.value.kind is RejectionKind.INVALID_REQUEST
            return
        events = await read_all(engine, request)
        if isinstance(engine, OpenAiEngine):  # whose server here says what it likes
            return
        assert account_of(events).reason is StopReason.STOP
        answer = json.loads(text_of(events))
        assert list(answer) == ["name", "count", "colour"]
        assert len(answer["name"]) <= 10
        assert isinstance(answer["count"], int)
        assert answer["colour"] in ("red", "green")
        cut = GenerationRequest("cut", chat, Sampling(2, temperature=0.0), wanted)
        assert account_of(await read_all(engine, cut)).reason is StopReason.LENGTH
    finally:
        await engine.close()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (FormatKind.JSON_SCHEMA, "{"),
        (FormatKind.JSON_SCHEMA, '{"type":"integer","minimum":1}'),
        (FormatKind.JSON_OBJECT, "x"),
        (FormatKind.GRAMMAR, "no rule"),
        (FormatKind.GRAMMAR, "root ::= missing"),
    ],
)
async def test_a_format_that_cannot_be_kept_is_rejected_and_the_rest_goes_on(
    engine: InferenceEngine, kind: FormatKind, text: str
) -> None:
    bad = GenerationRequest("bad", PROMPT, response_format=ResponseFormat(kind, text))
    results = await asyncio.gather(
        read_all(engine, bad), read_all(engine, request_for("fine")), return_exceptions=True
    )
    if not (
        isinstance(engine, OpenAiEngine) and text == "root ::= missing"
    ):  # its server would know
        assert isinstance(results[0], RejectedError)
        assert results[0].kind is RejectionKind.INVALID_REQUEST
    assert isinstance(results[1], list)


async def test_a_session_counts_what_it_did_not_read_again(engine: InferenceEngine) -> None:
    accounts = []
    for number, prompt in enumerate((PROMPT, f"{PROMPT} it was a calm day, and then")):
        request = GenerationRequest(
            f"turn-{number}", prompt, Sampling(4, temperature=0.0), session_id="talk"
        )
        accounts.append(account_of(await read_all(engine, request)))
    assert accounts[0].cached_prompt_tokens == 0
    assert 0 <= accounts[1].cached_prompt_tokens < accounts[1].prompt_tokens
    if not isinstance(engine, OpenAiEngine):  # whose server may not tell
        assert accounts[1].cached_prompt_tokens >= accounts[0].prompt_tokens - 1


async def test_cancel_ends_the_iterator_with_cancelled(engine: InferenceEngine) -> None:
    events: list[GenerationEvent] = []

    async def read() -> None:
        async for event in engine.generate(request_for("gone", max_tokens=230)):
            events.append(event)
            if isinstance(event, TextChunk) and len(events) < 6:
                await engine.cancel("gone")

    await asyncio.wait_for(read(), WAIT_SECONDS)
    assert account_of(events).reason is StopReason.CANCELLED
    await until(lambda: engine.stats().busy_slots == 0)


async def test_cancelling_what_is_unknown_does_nothing(engine: InferenceEngine) -> None:
    await engine.cancel("nobody")
    assert engine.stats().is_ready


async def test_a_request_that_waits_can_be_cancelled(engine: InferenceEngine) -> None:
    runners = [
        asyncio.create_task(read_all(engine, request_for(f"run{i}", max_tokens=60)))
        for i in range(SLOTS)
    ]
    await until(lambda: engine.stats().busy_slots == SLOTS)
    waiting = asyncio.create_task(read_all(engine, request_for("waiting")))
    await until(lambda: engine.stats().queued_requests == 1)
    await engine.cancel("waiting")
    account = account_of(await waiting)
    assert account.reason is StopReason.CANCELLED
    assert account.completion_tokens == 0
    for events in await asyncio.gather(*runners):
        assert account_of(events).reason is not StopReason.CANCELLED


async def test_closing_the_iterator_frees_the_slot(engine: InferenceEngine) -> None:
    """S1."""
    stream = engine.generate(request_for("left", max_tokens=230))
    await anext(stream)
    assert engine.stats().busy_slots == 1
    await stream.aclose()  # type: ignore[attr-defined]
    await until(lambda: engine.stats().busy_slots == 0)


async def test_many_cancels_at_any_moment_leave_no_slot_held(engine: InferenceEngine) -> None:
    """R16."""

    async def read_some(number: int) -> None:
        request = request_for(f"r{number}", max_tokens=30)
        seen = 0
        stream = engine.generate(request)
        async for _ in stream:
            seen += 1
            if seen > number % 7:
                if number % 2:
                    await engine.cancel(request.key)
                else:
                    break
        await stream.aclose()  # type: ignore[attr-defined]

    for start in range(0, 24, 6):
        await asyncio.wait_for(
            asyncio.gather(*(read_some(n) for n in range(start, start + 6))), WAIT_SECONDS
        )
        await until(lambda: engine.stats().busy_slots + engine.stats().queued_requests == 0)
    assert account_of(await read_all(engine, request_for("after"))).completion_tokens > 0


async def test_a_reader_that_never_reads_is_given_up_with_a_reason(
    engine: InferenceEngine,
) -> None:
    """S12."""
    stream = engine.generate(request_for("slow", max_tokens=240))
    await anext(stream)
    await until(lambda: engine.stats().busy_slots == 0)
    events: list[GenerationEvent] = []

    async def read() -> None:
        async for event in stream:
            events.append(event)  # noqa: PERF401 - what came before the error counts

    with pytest.raises(SlowReaderError):
        await asyncio.wait_for(read(), WAIT_SECONDS)
    assert 0 < len(text_of(events)) <= MAX_UNREAD_CHARACTERS
    assert not any(isinstance(event, Finished) for event in events)


async def test_the_work_of_all_requests_adds_up_to_the_busy_time(engine: InferenceEngine) -> None:
    """D18."""
    before = engine.stats().busy_seconds_total
    results = await asyncio.gather(*(read_all(engine, request_for(f"w{i}")) for i in range(4)))
    work = sum(account_of(events).work_seconds for events in results)
    assert work == pytest.approx(engine.stats().busy_seconds_total - before, rel=1e-3)


async def test_a_crash_ends_streams_with_an_error_and_the_engine_comes_back(
    make_engine: MakeEngine,
) -> None:
    """S4, S5: never an invented stop."""
    engine = make_engine()
    await engine.load()
    try:
        stream = engine.generate(request_for("doomed", max_tokens=230))
        await anext(stream)
        crash(engine)
        with pytest.raises(EngineError) as caught:
            await read_unfinished(stream)
        assert caught.value.kind is EngineFailure.CRASHED
        assert not engine.stats().is_ready
        assert engine.stats().issue is not None
        with pytest.raises(EngineError):
            await read_all(engine, request_for("too-early"))
        await until(lambda: engine.stats().is_ready)
        assert engine.stats().issue is None
        assert engine.stats().busy_slots == 0
        assert account_of(await read_all(engine, request_for("again"))).completion_tokens > 0
    finally:
        await engine.close()


async def test_closing_the_engine_ends_streams_with_an_error(make_engine: MakeEngine) -> None:
    engine = make_engine()
    await engine.load()
    stream = engine.generate(request_for("cut", max_tokens=230))
    await anext(stream)
    waiting = asyncio.create_task(read_all(engine, request_for("never-started")))
    await asyncio.sleep(0)
    await asyncio.wait_for(engine.close(), WAIT_SECONDS)
    with pytest.raises(EngineError):
        await read_unfinished(stream)
    with pytest.raises(EngineError):
        await waiting
    await engine.close()
    with pytest.raises(EngineError):
        await read_all(engine, request_for("late"))
