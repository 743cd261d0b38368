"""The remote engine against a server that breaks OpenAI's interface on purpose."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import grpc
import pytest
import structlog

from edge_agent import app as agent_app
from edge_agent.config import ControllerSettings, ModelSettings, Settings
from edge_agent.doctor import examine
from edge_agent.engine.base import (
    Finished,
    GenerationEvent,
    GenerationRequest,
    Message,
    PromptProgress,
    Rates,
    RejectedError,
    RejectionKind,
    Sampling,
    StopReason,
    TextChunk,
)
from edge_agent.engine.remote.endpoint import RemoteError, RemoteIssue
from edge_agent.engine.remote.engine import OpenAiEngine
from edge_agent.engine.remote.settings import OpenAiSettings, RemoteSettings
from edge_agent.errors import EngineError, EngineFailure
from edge_agent.status import StatusObject, ask_status
from pointsman.v1 import router_pb2, types_pb2
from tests.fakes.fleet import RunningFleet, running_fleet
from tests.fakes.openai_server import (
    Exchange,
    OpenAiServer,
    error_body,
    finish_chunk,
    text_chunk,
    usage_chunk,
)
from tests.fakes.waiting import until

pytestmark = pytest.mark.anyio

DECLARED = Rates(1000.0, 50.0, 200.0)
CHAT = (Message("user", "How is the weather?"),)
WAIT_SECONDS = 60.0

LARGE = ModelSettings(
    "large",
    slots=2,
    prompt_usd_per_token=1e-6,
    completion_usd_per_token=2e-6,
    remote=RemoteSettings("http://nowhere/v1", "fake-a", parameters_billions=70.0),
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def nothing(exchange: Exchange) -> None:
    """Answers with 404."""


async def good_answer(exchange: Exchange) -> None:
    is_chat = exchange.path == "/v1/chat/completions"
    await exchange.start_stream()
    for text in ("It ", "rains", "."):
        await exchange.event(text_chunk(text, is_chat))
    await exchange.event(finish_chunk("stop"))
    await exchange.event(usage_chunk(9, 3))
    await exchange.event("[DONE]")
    await exchange.end_stream()


@asynccontextmanager
async def endpoint(
    answer: Callable[[Exchange], Awaitable[None]], **changes: Any
) -> AsyncIterator[tuple[OpenAiServer, OpenAiEngine]]:
    """A server and a loaded engine on it; rates are declared, so that no trial is made.

    An engine that has given its endpoint up gets it back after `server.may_list.set()`.
    """
    arguments = {
        key: changes.pop(key)
        for key in ("stall_seconds", "max_queued", "environ")
        if key in changes
    }
    async with OpenAiServer(answer) as server:
        settings = replace(
            OpenAiSettings(server.base_url, "served", slots=2, declared=DECLARED), **changes
        )
        engine = OpenAiEngine(
            settings, first_retry_seconds=0.02, max_retry_seconds=0.2, **arguments
        )
        try:
            await asyncio.wait_for(engine.load(), WAIT_SECONDS)
            server.may_list.clear()
            yield server, engine
        finally:
            await asyncio.wait_for(engine.close(), WAIT_SECONDS)


async def ask(
    engine: OpenAiEngine,
    prompt: str | tuple[Message, ...] = CHAT,
    key: str = "one",
    **sampling: Any,
) -> list[GenerationEvent]:
    async def read() -> list[GenerationEvent]:
        request = GenerationRequest(key, prompt, Sampling(**sampling))
        return [event async for event in engine.generate(request)]

    return await asyncio.wait_for(read(), WAIT_SECONDS)


def text_of(events: list[GenerationEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextChunk))


def account_of(events: list[GenerationEvent]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]


def refusing(
    status: int, body: object = None, headers: dict[str, str] | None = None, times: int = 10**9
) -> Callable[[Exchange], Awaitable[None]]:
    """Refuses so many requests, then answers."""
    left = times

    async def handle(exchange: Exchange) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            await exchange.answer(status, body, headers)
        else:
            await good_answer(exchange)

    return handle


# -- answers --------------------------------------------------------------------------------------


async def test_a_chat_is_asked_as_openai_has_it() -> None:
    async with endpoint(good_answer) as (server, engine):
        events = await ask(engine, seed=2**64 - 1, stop=("END",), max_tokens=7)
    assert text_of(events) == "It rains."
    account = account_of(events)
    assert (account.reason, account.prompt_tokens, account.completion_tokens) == (
        StopReason.STOP,
        9,
        3,
    )
    (seen,) = server.seen
    assert seen.path == "/v1/chat/completions"
    assert "authorization" not in seen.headers
    assert seen.body == {
        "model": "served",
        "messages": [{"role": "user", "content": "How is the weather?"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 7,
        "temperature": 0.7,
        "top_p": 0.95,
        "top_k": 40,
        "seed": -1,
        "stop": ["END"],
    }


async def test_connection_is_used_again() -> None:
    async with endpoint(good_answer) as (server, engine):
        await ask(engine, key="one")
        await ask(engine, key="two")
        assert len({id(seen.writer) for seen in server.seen}) == 1


async def test_request_on_a_connection_that_was_closed_meanwhile_is_sent_once_more() -> None:
    async def answer(exchange: Exchange) -> None:
        if len(server.seen) == 2:
            exchange.cut()
        else:
            await good_answer(exchange)

    async with endpoint(answer) as (server, engine):
        for key in ("one", "two"):
            assert text_of(await ask(engine, key=key)) == "It rains."
        assert len(server.seen) == 3


async def test_server_that_never_responds_to_a_request_gets_it_twice_at_most() -> None:
    async def answer(exchange: Exchange) -> None:
        exchange.cut()

    async with endpoint(answer) as (server, engine):
        with pytest.raises(RemoteError) as caught:
            await ask(engine)
        assert caught.value.issue is RemoteIssue.UNREACHABLE
        assert not engine.stats().is_ready
        assert len(server.seen) == 2


async def test_character_in_two_pieces_is_one() -> None:
    """S10: cut within its bytes, and within an escaped surrogate pair."""

    async def answer(exchange: Exchange) -> None:
        await exchange.start_stream()
        raw = 'data: {"choices": [{"delta": {"content": "h\u00e9llo "}}]}\n\n'.encode()
        cut = raw.index(b"\xc3") + 1
        await exchange.piece(raw[:cut])
        await asyncio.sleep(0.01)
        await exchange.piece(raw[cut:])
        await exchange.event(text_chunk("\ud83c"))
        await exchange.event(text_chunk("\udf0d"))
        await exchange.event(finish_chunk("stop"))
        await exchange.event("[DONE]")
        await exchange.end_stream()

    async with endpoint(answer) as (_, engine):
        assert text_of(await ask(engine)) == "h\u00e9llo \U0001f30d"


async def test_without_usage_pieces_are_counted_and_this_is_said() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.start_stream()
        for text in ("one ", "two ", "three"):
            await exchange.event(text_chunk(text))
        await exchange.event(finish_chunk("length"))
        await exchange.event("[DONE]")
        await exchange.end_stream()

    async with endpoint(answer) as (_, engine):
        assert engine.stats().issue is None
        account = account_of(await ask(engine))
        assert (account.reason, account.completion_tokens) == (StopReason.LENGTH, 3)
        assert account.prompt_tokens > 0
        stats = engine.stats()
        assert stats.is_ready
        assert stats.issue is not None
        assert stats.issue.startswith("remote_sends_no_usage: ")


async def test_thoughts_count_as_tokens_and_are_not_shown() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.start_stream()
        for _ in range(4):
            await exchange.event({"choices": [{"delta": {"reasoning_content": "hmm"}}]})
        await exchange.event(text_chunk("Yes."))
        await exchange.event(finish_chunk("stop"))
        await exchange.event("[DONE]")
        await exchange.end_stream()

    async with endpoint(answer) as (_, engine):
        events = await ask(engine)
    assert text_of(events) == "Yes."
    assert account_of(events).completion_tokens == 5


async def test_stop_string_that_the_server_does_not_look_for_ends_the_answer() -> None:
    left = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.event(text_chunk("one E"))
        await exchange.event(text_chunk("ND two"))
        await exchange.gone()
        left.set()

    async with endpoint(answer) as (_, engine):
        events = await ask(engine, stop=("END",))
        assert text_of(events) == "one "
        assert account_of(events).reason is StopReason.STOP
        await asyncio.wait_for(left.wait(), WAIT_SECONDS)


async def test_end_of_body_after_the_finish_reason_is_enough() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.event(text_chunk("Yes"))
        await exchange.event(finish_chunk("stop"))
        exchange.cut()

    async with endpoint(answer) as (_, engine):
        assert account_of(await ask(engine)).reason is StopReason.STOP


async def test_slow_prompt_is_shown_to_be_under_way() -> None:
    """S6."""
    go_on = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        await go_on.wait()
        await good_answer(exchange)

    async with endpoint(answer) as (_, engine):
        progress = 0
        async for event in engine.generate(GenerationRequest("one", CHAT)):
            progress += isinstance(event, PromptProgress)
            if progress == 2:
                go_on.set()
        assert progress >= 3


# -- broken answers -------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["cut", "end of body", "done without a reason"])
async def test_broken_stream_is_an_error_and_never_a_stop(ending: str) -> None:
    """S5. Only a connection that broke says something of the endpoint itself."""

    async def answer(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.event(text_chunk("Half an ans"))
        if ending == "cut":
            exchange.cut()
            return
        if ending == "done without a reason":
            await exchange.event("[DONE]")
        await exchange.end_stream()

    async with endpoint(answer) as (server, engine):
        seen: list[GenerationEvent] = []

        async def read() -> None:
            async for event in engine.generate(GenerationRequest("one", CHAT)):
                seen.append(event)  # noqa: PERF401 - what came before the error counts

        with pytest.raises(EngineError) as caught:
            await asyncio.wait_for(read(), WAIT_SECONDS)
        assert text_of(seen) == "Half an ans"
        assert not any(isinstance(event, Finished) for event in seen)
        assert caught.value.kind is EngineFailure.CRASHED
        stats = engine.stats()
        assert stats.is_ready == (ending != "cut")
        if ending == "cut":
            assert stats.issue is not None
            assert stats.issue.startswith("remote_unreachable: ")
            server.may_list.set()
            await until(lambda: engine.stats().is_ready)
            assert server.looks >= 2


async def test_end_without_an_answer_to_what_does_not_fit_is_a_refusal() -> None:
    """P8, as llama-cpp-python's server ends such a stream."""

    async def answer(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.end_stream()

    async with endpoint(answer, context_tokens=300) as (_, engine):
        with pytest.raises(RejectedError) as caught:
            await ask(engine, (Message("user", "word " * 400),))
        assert caught.value.kind is RejectionKind.CONTEXT_EXCEEDED
        with pytest.raises(RemoteError, match="without a reason"):
            await ask(engine, max_tokens=5)
        assert engine.stats().is_ready


async def test_error_frame_ends_one_answer_and_not_the_endpoint() -> None:
    """S5."""

    async def answer(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.event(text_chunk("Half"))
        await exchange.event({"error": {"message": "GPU fell off the bus", "code": 500}})
        await exchange.end_stream()

    async with endpoint(answer) as (_, engine):
        with pytest.raises(RemoteError, match="GPU fell off the bus"):
            await ask(engine)
        assert engine.stats().is_ready


async def test_late_refusal_in_a_stream_is_still_a_refusal() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.piece(b": waiting\n\n")
        await exchange.event(error_body("too long", "context_length_exceeded"))
        await exchange.end_stream()

    async with endpoint(answer) as (_, engine):
        with pytest.raises(RejectedError) as caught:
            await ask(engine)
        assert caught.value.kind is RejectionKind.CONTEXT_EXCEEDED


@pytest.mark.parametrize("frame", [b"data: {nonsense\n\n", b"data: 5\n\n", b"data: \xff\n\n"])
async def test_nonsense_in_a_stream_is_an_error(frame: bytes) -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.piece(frame)
        await exchange.end_stream()

    async with endpoint(answer) as (_, engine):
        with pytest.raises(RemoteError, match="nonsense"):
            await ask(engine)


@pytest.mark.parametrize(
    ("reason", "expected"), [("content_filter", RejectedError), ("tool_calls", RemoteError)]
)
async def test_ending_that_is_neither_stop_nor_length_is_no_answer(
    reason: str, expected: type[Exception]
) -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.event(text_chunk("Half"))
        await exchange.event(finish_chunk(reason))
        await exchange.event("[DONE]")
        await exchange.end_stream()

    async with endpoint(answer) as (_, engine):
        with pytest.raises(expected):
            await ask(engine)


async def test_answer_without_a_stream_is_told() -> None:
    async with endpoint(refusing(200, {"choices": []})) as (_, engine):
        with pytest.raises(RemoteError, match="does not answer with a stream") as caught:
            await ask(engine)
        assert caught.value.issue is RemoteIssue.MISCONFIGURED


@pytest.mark.parametrize("has_begun", [False, True])
async def test_comments_alone_are_no_progress(has_begun: bool) -> None:
    """L17, R6: a server that only keeps the connection open is given up."""
    left = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        await exchange.start_stream()
        if has_begun:
            await exchange.event(text_chunk("Half"))
        gone = asyncio.create_task(exchange.gone())
        try:
            while not gone.done():
                await exchange.piece(b": waiting\n\n")
                await asyncio.wait([gone], timeout=0.02)
            await gone
        finally:  # a piece that is written as the connection goes fails
            left.set()

    async with endpoint(answer, stall_seconds=0.2, first_token_seconds=0.3) as (_, engine):
        with pytest.raises(EngineError) as caught:
            await ask(engine)
        assert caught.value.kind is EngineFailure.STALLED
        stats = engine.stats()
        assert stats.issue is not None
        assert stats.issue.startswith("remote_stalled: ")
        await asyncio.wait_for(left.wait(), WAIT_SECONDS)


async def test_requests_beyond_the_slots_wait_their_turn() -> None:
    """R11: the server never sees more at once than there are slots."""
    at_once, most = 0, 0

    async def answer(exchange: Exchange) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await until(lambda: most > 1)
        await asyncio.sleep(0)  # a third one would show now
        at_once -= 1
        await good_answer(exchange)

    async with endpoint(answer) as (server, engine):
        questions = [str(number) for number in range(8)]
        asked = [ask(engine, (Message("user", text),), key=text) for text in questions]
        await asyncio.gather(*asked)
        seen = [exchange.body["messages"][0]["content"] for exchange in server.seen]
        assert most == 2
        # Two are under way at once, so neighbours may change places on the way.
        assert all(abs(seen.index(text) - int(text)) <= 1 for text in questions)


async def test_cancel_closes_the_connection() -> None:
    """S1."""
    left = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.event(text_chunk("Half"))
        await exchange.gone()
        left.set()

    async with endpoint(answer) as (_, engine):
        events: list[GenerationEvent] = []
        async for event in engine.generate(GenerationRequest("one", CHAT)):
            events.append(event)
            if isinstance(event, TextChunk):
                await engine.cancel("one")
        assert account_of(events).reason is StopReason.CANCELLED
        assert account_of(events).completion_tokens == 1
        await asyncio.wait_for(left.wait(), WAIT_SECONDS)
        await until(lambda: engine.stats().busy_slots == 0)


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, error_body("too long", "context_length_exceeded"), RejectionKind.CONTEXT_EXCEEDED),
        (
            400,
            {"error": {"code": 400, "message": "long", "type": "exceed_context_size_error"}},
            RejectionKind.CONTEXT_EXCEEDED,
        ),
        (400, error_body("temperature is odd", None, "temperature"), RejectionKind.INVALID_REQUEST),
        (422, b"what?", RejectionKind.INVALID_REQUEST),
        (413, error_body("long", None, "messages"), RejectionKind.INVALID_REQUEST),
        (429, error_body("slow down"), RejectionKind.QUEUE_FULL),
    ],
)
async def test_refused_request_is_rejected_and_nothing_else_is_affected(
    status: int, body: object, kind: RejectionKind
) -> None:
    async with endpoint(refusing(status, body), context_tokens=100_000) as (_, engine):
        with pytest.raises(RejectedError) as caught:
            await ask(engine)
        assert caught.value.kind is kind
        assert engine.stats().is_ready


@pytest.mark.parametrize("status", [429, 503])
async def test_endpoint_that_asks_for_time_is_given_it(status: int) -> None:
    handler = refusing(status, error_body("slow down"), {"retry-after": "30"})
    async with endpoint(handler) as (server, engine):
        for key in ("one", "two"):
            with pytest.raises(RejectedError) as caught:
                await ask(engine, key=key)
            assert caught.value.kind is RejectionKind.QUEUE_FULL
        assert len(server.seen) == 1
        assert engine.stats().is_ready


async def test_answer_that_may_be_too_long_for_the_context_is_asked_for_shorter() -> None:
    """As vLLM refuses it: with no code and no parameter."""
    refusal = {"error": {"message": "At most 300 fit.", "type": "BadRequestError", "code": 400}}
    async with endpoint(refusing(400, refusal, times=1), context_tokens=300) as (server, engine):
        assert text_of(await ask(engine, max_tokens=4096)) == "It rains."
        first, second = server.seen
        assert first.body["max_tokens"] == 4096
        assert 200 < second.body["max_tokens"] < 300


async def test_prompt_that_does_not_fit_is_told_as_that_even_without_a_code() -> None:
    """P8."""
    refusal = {"error": {"message": "At most 300 fit.", "type": "BadRequestError", "code": 400}}
    async with endpoint(refusing(400, refusal), context_tokens=300) as (server, engine):
        with pytest.raises(RejectedError) as caught:
            await ask(engine, (Message("user", "word " * 400),))
        assert caught.value.kind is RejectionKind.CONTEXT_EXCEEDED
        assert len(server.seen) == 1


async def test_parameters_that_the_server_does_not_know_are_left_out_from_then_on() -> None:
    refused = iter(["top_k", "max_tokens"])

    async def answer(exchange: Exchange) -> None:
        parameter = next(refused, None)
        if parameter is None:
            await good_answer(exchange)
        else:
            body = error_body("Unknown parameter", "unsupported_parameter", parameter)
            await exchange.answer(400, body)

    async with endpoint(answer, omit_parameters=("seed",)) as (server, engine):
        assert text_of(await ask(engine, seed=1, max_tokens=5)) == "It rains."
        assert text_of(await ask(engine, seed=1, max_tokens=5)) == "It rains."
        assert len(server.seen) == 4
        for seen in server.seen[2:]:
            assert not {"top_k", "seed", "max_tokens"} & set(seen.body)
            assert seen.body["max_completion_tokens"] == 5


async def test_raw_prompt_goes_to_completions() -> None:
    async with endpoint(good_answer) as (server, engine):
        assert text_of(await ask(engine, "Once upon a time")) == "It rains."
        assert server.seen[0].path == "/v1/completions"
        assert server.seen[0].body["prompt"] == "Once upon a time"


async def test_raw_prompt_is_rejected_where_only_chats_are_answered() -> None:
    async def answer(exchange: Exchange) -> None:
        if exchange.path == "/v1/chat/completions":
            await good_answer(exchange)

    async with endpoint(answer) as (server, engine):
        for key in ("one", "two"):
            with pytest.raises(RejectedError, match="takes chats only") as caught:
                await ask(engine, "Once upon a time", key=key)
            assert caught.value.kind is RejectionKind.INVALID_REQUEST
        assert len(server.seen) == 1
        assert engine.stats().is_ready
        assert text_of(await ask(engine)) == "It rains."


async def test_chat_is_rejected_by_a_base_model() -> None:
    async with endpoint(good_answer, has_chat_template=False) as (_, engine):
        with pytest.raises(RejectedError) as caught:
            await ask(engine)
        assert caught.value.kind is RejectionKind.NO_CHAT_TEMPLATE


# -- the endpoint comes and goes ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body", "issue"),
    [
        (401, error_body("wrong key sk-hunter2"), "remote_key_refused"),
        (429, error_body("pay", "insufficient_quota"), "remote_quota_exhausted"),
        (404, error_body("no such model", "model_not_found"), "remote_model_missing"),
        (307, b"", "remote_misconfigured"),
        (503, error_body("loading"), "remote_unreachable"),
        (502, b"<html>", "remote_failed"),
    ],
)
async def test_endpoint_that_cannot_be_used_is_an_issue_until_it_can(
    status: int, body: object, issue: str
) -> None:
    """R1: what waits for a slot goes elsewhere."""
    blocked = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        if len(server.seen) > 2:
            await good_answer(exchange)
            return
        await blocked.wait()
        await exchange.answer(status, body)

    async with endpoint(answer) as (server, engine):
        asked = [asyncio.create_task(ask(engine, key=f"r{n}")) for n in range(4)]
        await until(lambda: len(server.seen) == 2)
        blocked.set()
        for result in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(result, EngineError)
            assert "hunter2" not in str(result) or status != 401
        assert len(server.seen) == 2
        stats = engine.stats()
        assert not stats.is_ready
        assert stats.issue is not None
        assert stats.issue.startswith(f"{issue}: ")
        with pytest.raises(EngineError, match="away now"):
            await ask(engine)
        server.may_list.set()
        await until(lambda: engine.stats().is_ready)
        assert engine.stats().issue is None
        assert text_of(await ask(engine)) == "It rains."


async def test_new_key_is_taken_without_a_restart_and_no_key_is_ever_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """O5."""
    caplog.set_level(logging.DEBUG)
    key_file = tmp_path / "key"
    key_file.write_text("sk-old-hunter2\n")

    async def answer(exchange: Exchange) -> None:
        if exchange.headers["authorization"] == "Bearer sk-new-hunter2":
            await good_answer(exchange)
        elif exchange.body["max_tokens"] == 1:
            await exchange.answer(400, error_body(f"bad {exchange.headers['authorization']}"))
        else:
            await exchange.answer(401, error_body("wrong key sk-old-hunter2"))

    with structlog.testing.capture_logs() as logs:
        async with endpoint(answer, api_key_file=str(key_file)) as (server, engine):
            with pytest.raises(RejectedError) as refused:
                await ask(engine, max_tokens=1)
            with pytest.raises(RemoteError) as caught:
                await ask(engine)
            issue = engine.stats().issue
            key_file.write_text("sk-new-hunter2\n")
            server.may_list.set()
            await until(lambda: engine.stats().is_ready)
            assert text_of(await ask(engine)) == "It rains."
            shown = [str(refused.value), str(caught.value), str(issue), repr(engine.settings)]
    assert str(key_file) in str(caught.value)
    output = capsys.readouterr()
    for text in (*shown, str(logs), caplog.text, output.out, output.err):
        assert "hunter2" not in text


async def test_endpoint_that_is_not_there_yet_cannot_be_loaded() -> None:
    server = OpenAiServer(good_answer)
    server.stop()
    engine = OpenAiEngine(OpenAiSettings(server.base_url, declared=DECLARED))
    with pytest.raises(RemoteError, match="cannot be reached") as caught:
        await engine.load()
    assert caught.value.issue is RemoteIssue.UNREACHABLE
    assert not engine.stats().is_ready
    await engine.close()


async def test_only_model_is_taken_when_none_is_named() -> None:
    async with endpoint(good_answer, model="") as (server, engine):
        await ask(engine)
        assert server.seen[0].body["model"] == "served"


@pytest.mark.parametrize(
    ("models", "wanted", "problem"),
    [
        ([{"id": "a"}, {"id": "b"}], "c", "no model 'c'. It lists: a, b"),
        ([{"id": "a"}, {"id": "b"}], "", "set remote.model"),
        ([], "", "It lists: none"),
    ],
)
async def test_model_that_is_not_there_is_told_with_those_that_are(
    models: list[dict[str, Any]], wanted: str, problem: str
) -> None:
    """R12."""
    async with OpenAiServer(nothing, models) as server:
        engine = OpenAiEngine(OpenAiSettings(server.base_url, wanted))
        with pytest.raises(RemoteError) as caught:
            await engine.load()
        assert problem in str(caught.value)
        assert caught.value.issue is RemoteIssue.MODEL_MISSING
        await engine.close()


async def test_server_without_a_list_of_models_is_found_by_its_health() -> None:
    async def answer(exchange: Exchange) -> None:
        if exchange.path == "/health":
            await exchange.answer(200, {"status": "ok"})
        elif exchange.path == "/v1/chat/completions":
            await good_answer(exchange)

    async with OpenAiServer(answer, None) as server:
        engine = OpenAiEngine(OpenAiSettings(server.base_url, "served", declared=DECLARED))
        await engine.load()
        assert text_of(await ask(engine)) == "It rains."
        await engine.close()


async def test_context_is_the_declared_one_or_what_the_server_says() -> None:
    for declared, expected in ((0, 8192), (1000, 1000)):
        async with OpenAiServer(good_answer, [{"id": "a", "max_model_len": 8192}]) as server:
            engine = OpenAiEngine(
                OpenAiSettings(server.base_url, context_tokens=declared, declared=DECLARED)
            )
            assert (await engine.load()).context_tokens == expected
            await engine.close()


# -- speeds ---------------------------------------------------------------------------------------


async def test_declared_rates_cost_no_request() -> None:
    async with endpoint(good_answer, is_measured=False) as (server, engine):
        assert (await engine.load()).declared_rates == Rates(1000.0, 50.0, 200.0)
        assert server.seen == []


async def test_priced_endpoint_is_asked_once_and_what_is_declared_counts() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.start_stream()
        for _ in range(5):
            await exchange.event(text_chunk("word "))
            await asyncio.sleep(0.01)
        await exchange.event(finish_chunk("length"))
        await exchange.event(usage_chunk(200, 5))
        await exchange.event("[DONE]")
        await exchange.end_stream()

    async def chats_only(exchange: Exchange) -> None:
        if exchange.path == "/v1/chat/completions":
            await answer(exchange)

    declared = Rates(prefill=777.0)
    async with endpoint(chats_only, is_measured=False, declared=declared, slots=3) as (
        server,
        engine,
    ):
        assert [seen.path for seen in server.seen] == ["/v1/completions", "/v1/chat/completions"]
        assert server.seen[-1].body["max_tokens"] <= 32
        model = await engine.load()
        rates = model.declared_rates
        assert rates.prefill == 777.0
        assert rates.decode is not None
        assert rates.decode > 0
        assert rates.saturated_decode == pytest.approx(3 * rates.decode)
        assert model.characters_per_token is not None
        assert 3 < model.characters_per_token < 6


async def test_free_endpoint_is_measured_in_full() -> None:
    async with endpoint(good_answer, declared=Rates()) as (_, engine):
        assert not (await engine.load()).declared_rates.are_complete


# -- as a node of a fleet -------------------------------------------------------------------------


@asynccontextmanager
async def two_fleets(folder: Path) -> AsyncIterator[tuple[RunningFleet, RunningFleet]]:
    async with running_fleet(folder / "inner") as inner, running_fleet(folder / "outer") as outer:
        yield inner, outer


@asynccontextmanager
async def remote_node(
    fleet: RunningFleet, model: ModelSettings, node_id: str = "gateway"
) -> AsyncIterator[Callable[[], Awaitable[StatusObject]]]:
    """An agent of a fleet whose one model is remote; yields what asks for its status."""
    settings = Settings(
        node_id=node_id,
        kind="cloud",
        data_dir=fleet.folder / node_id,
        drain_seconds=1.0,
        controller=ControllerSettings(fleet.listening.grpc_address, insecure=True),
        models=(model,),
    )
    stop = asyncio.Event()
    task = asyncio.create_task(agent_app.run(settings, stop))
    try:
        yield lambda: ask_status(settings.socket_path)
    finally:
        stop.set()
        await asyncio.wait_for(task, WAIT_SECONDS)


def large_at(base_url: str, **changes: Any) -> ModelSettings:
    assert LARGE.remote is not None
    return replace(LARGE, remote=replace(LARGE.remote, base_url=base_url, **changes))


async def test_a_fleet_is_a_node_of_another_fleet_with_its_prices(tmp_path: Path) -> None:
    async with (
        running_fleet(tmp_path / "inner") as inner,
        running_fleet(tmp_path / "outer") as outer,
    ):
        await inner.add_agent("pi")
        base_url = f"{inner.listening.http_address}/v1"
        async with remote_node(outer, large_at(base_url)) as status:
            await outer.wait_for_state("gateway", "ready")
            text, account = await answer_of(outer, "large", "How is the weather?")
            assert text.startswith("Fake answer ")
            assert account.node_id == "gateway"
            usage = account.usage
            assert usage.completion_tokens > 10
            assert account.cost_usd == pytest.approx(
                1e-6 * usage.prompt_tokens + 2e-6 * usage.completion_tokens
            )
            (model,) = (await status())["models"]
            # What the inner controller told, and what one small request measured.
            assert model["context_tokens"] == 2048
            assert model["decode_tokens_per_second"] > 0
        # The inner fleet answered the trial and the question, and nothing else.
        assert len((await inner_agent_status(inner))["requests"]["recent"]) == 2


async def test_node_of_a_fleet_that_lost_its_models_says_so_and_comes_back(tmp_path: Path) -> None:
    async with (
        running_fleet(tmp_path / "inner") as inner,
        running_fleet(tmp_path / "outer") as outer,
    ):
        agent = await inner.add_agent("pi")
        base_url = f"{inner.listening.http_address}/v1"
        async with remote_node(outer, large_at(base_url)) as status:
            await outer.wait_for_state("gateway", "ready")
            await agent.stop()
            with pytest.raises(grpc.aio.AioRpcError):
                await answer_of(outer, "large", "Hi")
            with anyio.fail_after(WAIT_SECONDS):
                while not (await status())["issues"]:
                    await asyncio.sleep(0.02)
            assert "remote_" in (await status())["issues"][0]
            await inner.add_agent("pi-2")
            with anyio.fail_after(WAIT_SECONDS):
                while (await status())["issues"]:
                    await asyncio.sleep(0.02)


async def test_doctor_asks_the_endpoint_and_says_what_to_do(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("sk-hunter2")
    key_file.chmod(0o644)
    async with OpenAiServer(nothing, [{"id": "fake-a"}]) as server:
        good = large_at(server.base_url, api_key_file=str(key_file))
        bad = replace(large_at(server.base_url, model="other"), name="bad")
        findings = await examine(Settings(node_id="pi", data_dir=tmp_path, models=(good, bad)))
    by_check = [finding for finding in findings if finding.check == "remote"]
    assert [finding.level for finding in by_check] == ["warning", "ok", "error"]
    assert by_check[0].fix == f"chmod 600 {key_file}"
    assert "no model 'other'. It lists: fake-a" in by_check[2].text
    assert "[models.remote] of bad" in by_check[2].fix
    assert "hunter2" not in str(findings)
    (engine,) = [finding for finding in findings if finding.check == "engine"]
    assert engine.text == "not needed: every model is remote"


async def answer_of(
    fleet: RunningFleet, model: str, question: str
) -> tuple[str, router_pb2.Account]:
    """A chat's answer and its account."""
    turn = types_pb2.ChatMessage(role="user", content=question)
    request = router_pb2.InferRequest(
        request=types_pb2.InferenceRequest(model=model, chat=types_pb2.Chat(messages=[turn]))
    )
    text = ""
    async for event in fleet.client.router.Infer(request, timeout=60):
        if event.WhichOneof("event") == "text":
            text += event.text.text
        elif event.WhichOneof("event") == "account":
            return text, event.account
    raise AssertionError("the stream ended without an account")


async def inner_agent_status(fleet: RunningFleet) -> StatusObject:
    return await ask_status(fleet.folder / "pi" / "status.sock")
