"""The HTTP door behind a real server, asked by OpenAI's own client and by raw sockets."""

import asyncio
import contextlib
import datetime
import ipaddress
import json
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, MutableMapping, Sequence
from pathlib import Path

import anyio
import httpx
import openai
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from controller.api.service import RouterService, ServedModel
from controller.config import GatewaySettings
from controller.domain.completion import Completion, FinishReason, Usage
from controller.domain.request import ChatMessage, InferenceRequest
from controller.domain.request_record import Account
from controller.errors import (
    ConstraintsError,
    DuplicateRequestError,
    InvalidRequestError,
    NodeLostError,
    NoDestinationError,
    QueueFullError,
    UnknownModelError,
)
from controller.gateway.app import Router, build_app
from controller.gateway.server import HttpListenError, serve_http
from controller.ids import BatchId, ModelName, NodeId
from controller.request_manager.manager import InferEvent
from controller.request_manager.stream import RoutedTo, Text
from controller.telemetry.metrics import Metrics

pytestmark = pytest.mark.anyio

ROUTED = RoutedTo(NodeId("pi"), ModelName("smol"), BatchId("batch-7"), "memetic")
HELLO = [{"role": "user", "content": "Hello"}]
PATIENCE_SECONDS = 60.0
"""Bounds every wait; nothing here should come near it."""


class AccountOf:
    """The last step of a script: an account of the request being answered."""

    def __init__(self, reason: FinishReason = FinishReason.STOP) -> None:
        self._reason = reason

    def __call__(self, request: InferenceRequest) -> Account:
        usage = Usage(5, 3, 0.0, 0.1, 0.2, 1.5, "estimate")
        return Account(
            request_id=request.request_id,
            batch_id=BatchId("batch-7"),
            node_id=NodeId("pi"),
            model=ModelName("smol"),
            policy="memetic",
            completion=Completion(self._reason, usage),
            window_seconds=0.1,
            first_token_seconds=0.2,
            total_seconds=0.4,
            predicted_finish_seconds=0.3,
            measured_finish_seconds=0.3,
            cost_usd=0.0,
            attempts=1,
        )


Step = RoutedTo | Text | AccountOf | asyncio.Event | Exception
STOPPED = AccountOf()
ANSWER: tuple[Step, ...] = (ROUTED, Text("Héllo", 2), Text(" you", 1), STOPPED)


class ScriptedRouter:
    """A router that plays a script; an event in it is waited for."""

    def __init__(self, *script: Step, models: Sequence[str] = ("smol",)) -> None:
        self.script = script
        self.requests: list[InferenceRequest] = []
        self.asked = asyncio.Event()
        self.closed = asyncio.Event()
        self._models = models

    async def infer(self, request: InferenceRequest) -> AsyncGenerator[InferEvent, None]:
        self.requests.append(request)
        self.asked.set()
        try:
            for step in self.script:
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, AccountOf):
                    yield step(request)
                elif isinstance(step, Exception):
                    raise step
                else:
                    yield step
        finally:
            self.closed.set()

    def models(self) -> list[ServedModel]:
        return [
            ServedModel(ModelName(name), "family", 0.1, "Q8_0", 2048, (NodeId("pi"),))
            for name in self._models
        ]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Door:
    """A running gateway and ways to knock at it."""

    def __init__(self, port: int, http: httpx.AsyncClient, stop: asyncio.Event) -> None:
        self.port = port
        self.http = http
        self.stop = stop
        self.client = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1",
            api_key="unused",
            max_retries=0,
            timeout=PATIENCE_SECONDS,
            http_client=openai.DefaultAsyncHttpxClient(verify=False),
        )

    def post(self, **fields: object) -> "asyncio.Task[httpx.Response]":
        """Send a chat completion without waiting for its answer."""
        request = self.http.post("/v1/chat/completions", json={"messages": HELLO, **fields})
        return asyncio.create_task(request)


async def connect(port: int, **fields: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a chat completion over a socket of our own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"messages": HELLO, **fields}).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        + b"content-length: %d\r\n\r\n" % len(body)
        + body
    )
    await writer.drain()
    return reader, writer


@contextlib.asynccontextmanager
async def door(
    router: Router,
    limits: GatewaySettings | None = None,
    grace_seconds: float = 5,
    metrics: Metrics | None = None,
) -> AsyncIterator[Door]:
    listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    server = asyncio.create_task(
        serve_http(
            build_app(router, metrics, limits),
            "127.0.0.1",
            0,
            stop,
            started=listening.set_result,
            grace_seconds=grace_seconds,
        )
    )
    try:
        port = await asyncio.wait_for(listening, PATIENCE_SECONDS)
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}",
            timeout=PATIENCE_SECONDS,
            verify=False,  # there is no TLS here, and loading the system's roots takes its time
        ) as http:
            opened = Door(port, http, stop)
            async with opened.client:
                yield opened
    finally:
        server.cancel()  # quicker than a graceful stop, which has its own tests
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait_for(server, PATIENCE_SECONDS)


async def happens(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), PATIENCE_SECONDS)


def test_router_service_is_a_router() -> None:
    """What the fake stands in for; mypy checks the signatures."""

    def as_router(service: RouterService) -> Router:
        return service

    assert as_router is not None


# -- answers --------------------------------------------------------------------------------------


async def test_openai_client_gets_a_whole_answer() -> None:
    router = ScriptedRouter(*ANSWER)
    async with door(router) as opened:
        answer = await opened.client.chat.completions.create(
            model="smol", messages=[{"role": "user", "content": "Hello"}], max_tokens=7, stop="END"
        )
    assert answer.choices[0].message.content == "Héllo you"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 8
    assert answer.model_extra is not None
    assert answer.model_extra["pointsman"]["node_id"] == "pi"
    assert answer.id == router.requests[0].request_id == answer._request_id
    assert router.requests[0].prompt == (ChatMessage("user", "Hello"),)
    assert router.requests[0].model == "smol"
    assert router.requests[0].sampling.max_tokens == 7
    assert router.requests[0].sampling.stop == ("END",)


async def test_openai_client_streams_an_answer_with_usage() -> None:
    async with door(ScriptedRouter(*ANSWER)) as opened:
        stream = await opened.client.chat.completions.create(
            model="auto",
            messages=[{"role": "user", "content": "Hello"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == "Héllo you"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3


async def test_text_arrives_while_the_model_still_writes() -> None:
    gate = asyncio.Event()
    async with door(ScriptedRouter(ROUTED, Text("a", 1), gate, Text("b", 1), STOPPED)) as opened:
        stream = await opened.client.chat.completions.create(
            model="auto", messages=[{"role": "user", "content": "Hello"}], stream=True
        )
        chunks = aiter(stream)
        texts = [(await anext(chunks)).choices[0].delta.content for _ in range(2)]
        assert texts == ["", "a"]
        gate.set()
        assert [chunk.choices[0].delta.content async for chunk in chunks] == ["b", None]


async def test_raw_stream_is_server_sent_events_that_end_with_done() -> None:
    async with door(ScriptedRouter(*ANSWER)) as opened:
        response = await opened.post(stream=True, pointsman={"request_id": "mine"})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-request-id"] == "mine"
    frames = response.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    assert all(frame.startswith("data: {") for frame in frames[:-2])


async def test_models_are_listed_and_found_by_name() -> None:
    async with door(ScriptedRouter(models=("org/tiny", "smol"))) as opened:
        listed = [model.id async for model in opened.client.models.list()]
        assert listed == ["org/tiny", "smol", "auto"]
        assert (await opened.client.models.retrieve("smol")).owned_by == "pointsman"
        assert (await opened.http.get("/v1/models/org/tiny")).json()["id"] == "org/tiny"
        with pytest.raises(openai.NotFoundError, match="org/tiny, smol"):
            await opened.client.models.retrieve("nope")


async def test_door_is_live_without_models_but_not_ready() -> None:
    async with door(ScriptedRouter(models=())) as opened:
        assert (await opened.http.get("/healthz")).status_code == 200
        assert (await opened.http.get("/readyz")).status_code == 503
        assert (await opened.http.get("/v1/models")).json()["data"] == []
    async with door(ScriptedRouter()) as opened:
        assert (await opened.http.get("/readyz")).json() == {"status": "ready", "models": 1}


async def test_prometheus_reads_how_many_requests_fell_back_and_why() -> None:
    metrics = Metrics()
    counts = {("ppo", "out_of_range"): 3}
    metrics.counter("policy_fallback_requests", "Fallbacks.", lambda: counts, ("policy", "cause"))
    async with door(ScriptedRouter(), metrics=metrics) as opened:
        answer = await opened.http.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    name = "pointsman_policy_fallback_requests_total"
    assert f'{name}{{cause="out_of_range",policy="ppo"}} 3.0' in answer.text.splitlines()


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("error", "expected", "status"),
    [
        (UnknownModelError("No node serves 'x'."), openai.NotFoundError, 404),
        (InvalidRequestError("The prompt is empty."), openai.BadRequestError, 400),
        (DuplicateRequestError("again"), openai.ConflictError, 409),
        (ConstraintsError("too strict"), openai.UnprocessableEntityError, 422),
        (QueueFullError("later"), openai.RateLimitError, 429),
        (NoDestinationError("No node can."), openai.APIStatusError, 503),
    ],
)
async def test_refusal_is_an_http_error_of_openai_kind_also_for_a_stream(
    error: Exception, expected: type[openai.APIStatusError], status: int, is_stream: bool
) -> None:
    async with door(ScriptedRouter(error)) as opened:
        with pytest.raises(expected, match=str(error)) as caught:
            await opened.client.chat.completions.create(
                model="x", messages=[{"role": "user", "content": "Hello"}], stream=is_stream
            )
    assert caught.value.status_code == status
    assert caught.value.request_id is not None


async def test_refusal_within_the_hold_time_is_an_http_error() -> None:
    gate = asyncio.Event()
    router = ScriptedRouter(gate, ConstraintsError("too strict"))
    async with door(router, GatewaySettings(hold_seconds=PATIENCE_SECONDS)) as opened:
        request = opened.post(stream=True)
        await happens(router.asked)
        gate.set()
        assert (await request).status_code == 422


async def test_error_before_the_first_text_of_a_whole_answer_is_an_http_error() -> None:
    router = ScriptedRouter(ROUTED, Text("a", 1), NodeLostError("node pi was lost"))
    async with door(router) as opened:
        response = await opened.post()
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "node_lost"


async def test_error_in_mid_stream_ends_it_with_an_error_frame_and_no_done() -> None:
    router = ScriptedRouter(ROUTED, Text("a", 1), NodeLostError("node pi was lost"))
    async with door(router) as opened:
        response = await opened.post(stream=True)
        frames = [frame for frame in response.text.split("\n\n") if frame]
        assert json.loads(frames[-1].removeprefix("data: "))["error"] == {
            "message": "node pi was lost",
            "type": "server_error",
            "param": None,
            "code": "node_lost",
        }
        assert "[DONE]" not in response.text
        assert '"finish_reason":"stop"' not in response.text

        stream = await opened.client.chat.completions.create(
            model="auto", messages=[{"role": "user", "content": "Hello"}], stream=True
        )
        with pytest.raises(openai.APIError, match="node pi was lost"):
            [chunk async for chunk in stream]


@pytest.mark.parametrize(
    "ending",
    [(AccountOf(FinishReason.CANCELLED),), (AccountOf(FinishReason.FAILED),), ()],
    ids=["cancelled", "failed", "no account"],
)
async def test_answer_without_a_proper_end_is_never_a_stop(ending: tuple[Step, ...]) -> None:
    async with door(ScriptedRouter(ROUTED, Text("a", 1), *ending)) as opened:
        streamed = (await opened.post(stream=True)).text
        assert '"error":{' in streamed
        assert "[DONE]" not in streamed
        assert '"finish_reason":"' not in streamed
        assert (await opened.post()).status_code >= 500


@pytest.mark.parametrize("is_stream", [False, True])
async def test_fault_of_ours_is_a_bland_error_and_the_next_request_is_answered(
    is_stream: bool,
) -> None:
    router = ScriptedRouter(RuntimeError("a secret"))
    async with door(router) as opened:
        response = await opened.post(stream=is_stream)
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
        assert "secret" not in response.text
        router.script = ANSWER
        assert (await opened.post()).status_code == 200


@pytest.mark.parametrize(
    ("content", "content_type", "status", "code"),
    [
        (b'{"messages": "\xff"}', "application/json", 400, "invalid_utf8"),
        (b'{"messages": ', "application/json", 400, "invalid_json"),
        (b"", "application/json", 400, "invalid_json"),
        (b"{}", "application/json; charset=utf-8", 400, "invalid_request"),
        (b"{}", "application/json; charset=latin-1", 415, "wrong_content_type"),
        (b"{}", "text/plain", 415, "wrong_content_type"),
        (b"{}", "application/x-www-form-urlencoded", 415, "wrong_content_type"),
        (b"{}", None, 415, "wrong_content_type"),
        (b" " * 2000, "application/json", 413, "body_too_long"),
    ],
)
async def test_bad_body_is_a_clear_error(
    content: bytes, content_type: str | None, status: int, code: str
) -> None:
    router = ScriptedRouter(*ANSWER)
    headers = {"content-type": content_type} if content_type else {}
    async with door(router, GatewaySettings(max_body_bytes=1000)) as opened:
        response = await opened.http.post("/v1/chat/completions", content=content, headers=headers)
        assert response.status_code == status
        assert response.json()["error"]["code"] == code
        assert response.headers["x-request-id"].startswith("req-")
        assert router.requests == []
        assert (await opened.post()).status_code == 200  # the rest goes on


async def test_body_without_a_length_is_limited_too() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 100

    async with door(ScriptedRouter(), GatewaySettings(max_body_bytes=1000)) as opened:
        response = await opened.http.post(
            "/v1/chat/completions",
            content=pieces(),
            headers={"content-type": "application/json"},
        )
    assert response.status_code == 413


async def test_body_that_does_not_come_is_given_up() -> None:
    async with door(ScriptedRouter(), GatewaySettings(body_seconds=0.05)) as opened:
        reader, writer = await asyncio.open_connection("127.0.0.1", opened.port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
            b"content-type: application/json\r\ncontent-length: 10\r\n\r\n{"
        )
        status = await asyncio.wait_for(reader.readline(), PATIENCE_SECONDS)
        writer.close()
    assert b" 408 " in status


async def test_unknown_path_and_method_have_openai_shape() -> None:
    async with door(ScriptedRouter()) as opened:
        nowhere = await opened.http.get("/v1/nothing")
        assert nowhere.status_code == 404
        assert nowhere.json()["error"]["code"] == "not_found"
        wrong = await opened.http.get("/v1/chat/completions")
        assert wrong.status_code == 405
        assert wrong.json()["error"]["type"] == "invalid_request_error"


# -- silence and leaving --------------------------------------------------------------------------


async def test_headers_do_not_wait_for_the_model_and_comments_keep_the_stream_alive() -> None:
    gate = asyncio.Event()
    limits = GatewaySettings(hold_seconds=0.01, keep_alive_seconds=0.01)
    async with door(ScriptedRouter(gate, *ANSWER), limits) as opened:
        request = {"messages": HELLO, "stream": True}
        async with opened.http.stream("POST", "/v1/chat/completions", json=request) as response:
            assert response.status_code == 200  # while the router is silent
            lines = response.aiter_lines()
            comments = [await anext(lines) for _ in range(6)]
            assert comments == [": waiting", ""] * 3
            gate.set()
            rest = [line async for line in lines]
    assert "data: [DONE]" in rest


async def test_openai_client_does_not_mind_the_comments() -> None:
    gate = asyncio.Event()
    router = ScriptedRouter(ROUTED, Text("a", 1), gate, Text("b", 1), STOPPED)
    async with door(router, GatewaySettings(keep_alive_seconds=0.01)) as opened:
        stream = await opened.client.chat.completions.create(
            model="auto", messages=[{"role": "user", "content": "Hello"}], stream=True
        )
        chunks = aiter(stream)
        await anext(chunks)
        await asyncio.sleep(0.05)
        gate.set()
        texts = [chunk.choices[0].delta.content or "" async for chunk in chunks]
    assert "".join(texts) == "ab"


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("script", [(), (ROUTED,), (ROUTED, Text("a", 1))], ids=len)
async def test_client_that_leaves_cancels_its_generation(
    script: tuple[Step, ...], is_stream: bool
) -> None:
    router = ScriptedRouter(*script, asyncio.Event(), STOPPED)
    async with door(router) as opened:
        _, writer = await connect(opened.port, stream=is_stream)
        await happens(router.asked)
        assert not router.closed.is_set()
        writer.close()
        await happens(router.closed)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_half_closed_connection_cancels_its_generation(is_stream: bool) -> None:
    router = ScriptedRouter(ROUTED, Text("a", 1), asyncio.Event(), STOPPED)
    async with door(router) as opened:
        _, writer = await connect(opened.port, stream=is_stream)
        await happens(router.asked)
        writer.write_eof()
        await happens(router.closed)
        writer.close()


async def test_openai_stream_that_is_closed_cancels_its_generation() -> None:
    router = ScriptedRouter(ROUTED, Text("a", 1), asyncio.Event(), STOPPED)
    async with door(router) as opened:
        stream = await opened.client.chat.completions.create(
            model="auto", messages=[{"role": "user", "content": "Hello"}], stream=True
        )
        await anext(aiter(stream))
        await stream.close()
        await happens(router.closed)


async def test_client_that_stops_reading_is_let_go() -> None:
    many = [Text("x" * 100_000, 1)] * 200
    router = ScriptedRouter(ROUTED, *many, asyncio.Event(), STOPPED)
    async with door(router, GatewaySettings(write_seconds=0.1), grace_seconds=1) as opened:
        _, writer = await connect(opened.port, stream=True)
        await happens(router.closed)
        writer.transport.abort()


async def test_connection_is_used_again_after_an_answer_and_after_an_error() -> None:
    router = ScriptedRouter(*ANSWER)
    async with door(router) as opened:
        reader, writer = await connect(opened.port, stream=True)
        while await asyncio.wait_for(reader.readline(), PATIENCE_SECONDS) != b"0\r\n":
            pass
        await reader.readline()
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b" 200 " in await asyncio.wait_for(reader.readline(), PATIENCE_SECONDS)
        writer.close()


# -- listening and stopping -----------------------------------------------------------------------


async def test_stop_lets_a_running_stream_finish() -> None:
    gate = asyncio.Event()
    router = ScriptedRouter(ROUTED, gate, Text("a", 1), STOPPED)
    async with door(router) as opened:
        request = opened.post(stream=True)
        await happens(router.asked)
        opened.stop.set()
        while True:  # until new connections are refused
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", opened.port)
            except OSError:
                break
            writer.close()
            await asyncio.sleep(0.01)
        gate.set()
        assert "[DONE]" in (await request).text


async def test_stream_that_outstays_the_grace_period_is_cancelled() -> None:
    router = ScriptedRouter(ROUTED, asyncio.Event())
    async with door(router, grace_seconds=0) as opened:
        request = opened.post(stream=True)
        await happens(router.asked)
        opened.stop.set()
        await happens(router.closed)
        with pytest.raises(httpx.RemoteProtocolError):
            await request


@pytest.mark.parametrize("is_native", [False, True], ids=["anyio", "asyncio"])
async def test_cancelled_server_cancels_its_requests_and_gives_its_port_back(
    is_native: bool,
) -> None:
    listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    router = ScriptedRouter(ROUTED, asyncio.Event())

    async def serve() -> None:
        await serve_http(
            build_app(router),
            "127.0.0.1",
            0,
            asyncio.Event(),
            started=listening.set_result,
            grace_seconds=1,
        )

    async def ask() -> tuple[int, asyncio.StreamWriter]:
        port = await asyncio.wait_for(listening, PATIENCE_SECONDS)
        _, writer = await connect(port, stream=True)
        await happens(router.asked)
        return port, writer

    if is_native:
        task = asyncio.create_task(serve())
        port, writer = await ask()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, PATIENCE_SECONDS)
    else:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve)
            port, writer = await ask()
            tasks.cancel_scope.cancel()
    assert router.closed.is_set()
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", port)
    writer.close()


async def test_port_in_use_is_a_clear_error() -> None:
    app = build_app(ScriptedRouter())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(HttpListenError) as caught:
            await serve_http(app, "127.0.0.1", port, asyncio.Event())
    assert str(caught.value) == (
        f"cannot listen on 127.0.0.1:{port}: address already in use; "
        "choose another with --http-listen"
    )


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 0), ("no such host", 0), ("::1", 70000)])
async def test_address_that_is_not_ours_is_a_clear_error(host: str, port: int) -> None:
    with pytest.raises(HttpListenError, match="choose another with --http-listen"):
        await serve_http(build_app(ScriptedRouter()), host, port, asyncio.Event())


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="asks Linux for its timers")
async def test_waiting_connection_is_probed_so_that_a_vanished_client_is_noticed() -> None:
    router = ScriptedRouter(asyncio.Event())
    async with door(router) as opened:
        _, writer = await connect(opened.port)
        await happens(router.asked)
        assert keep_alive_timer(opened.port, writer.get_extra_info("sockname")[1]) == "02"
        writer.close()


async def test_serves_over_tls(tmp_path: Path) -> None:
    certfile, keyfile = write_certificate(tmp_path)
    listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    router, stop = ScriptedRouter(*ANSWER), asyncio.Event()
    trust = ssl.create_default_context(cafile=str(certfile))
    with anyio.fail_after(PATIENCE_SECONDS):
        async with anyio.create_task_group() as tasks:

            async def serve() -> None:
                await serve_http(
                    build_app(router),
                    "127.0.0.1",
                    0,
                    stop,
                    certfile=certfile,
                    keyfile=keyfile,
                    started=listening.set_result,
                )

            tasks.start_soon(serve)
            port = await listening
            async with httpx.AsyncClient(verify=trust) as http:
                response = await http.post(
                    f"https://127.0.0.1:{port}/v1/chat/completions", json={"messages": HELLO}
                )
                assert response.json()["choices"][0]["message"]["content"] == "Héllo you"
            stop.set()


@pytest.mark.parametrize("kind", ["absent", "not PEM", "passphrase"])
async def test_certificate_that_cannot_be_used_is_a_clear_error(tmp_path: Path, kind: str) -> None:
    certfile, keyfile = write_certificate(tmp_path, b"secret" if kind == "passphrase" else None)
    if kind == "absent":
        certfile.unlink()
    if kind == "not PEM":
        certfile.write_text("hello")
    with pytest.raises(HttpListenError, match="cannot use the certificate"):
        await serve_http(
            build_app(ScriptedRouter()),
            "127.0.0.1",
            0,
            asyncio.Event(),
            certfile=certfile,
            keyfile=keyfile,
        )


def keep_alive_timer(local_port: int, peer_port: int) -> str:
    """Linux's timer of a connection of this host; "02" is the keep-alive timer."""
    for line in Path("/proc/net/tcp").read_text().splitlines():
        _, local, peer, _, _, timer, *_ = line.split()
        if local.endswith(f":{local_port:04X}") and peer.endswith(f":{peer_port:04X}"):
            return timer.partition(":")[0]
    raise AssertionError("no such connection")


def write_certificate(folder: Path, passphrase: bytes | None = None) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.timezone.utc)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    certfile, keyfile = folder / "cert.pem", folder / "key.pem"
    certfile.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    keyfile.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(passphrase)
            if passphrase
            else serialization.NoEncryption(),
        )
    )
    return certfile, keyfile


# -- below a server --------------------------------------------------------------------------------


async def test_refusal_that_goes_out_slowly_is_not_followed_by_a_stream() -> None:
    """1. a refusal begins to go out; 2. the hold time passes; 3. the refusal is out."""
    sent: list[str] = []
    body = json.dumps({"messages": HELLO, "stream": True}).encode()
    incoming = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, object]:
        if not incoming:
            await asyncio.Event().wait()
        return incoming.pop()

    async def send(message: MutableMapping[str, object]) -> None:
        if not sent:
            await asyncio.sleep(0.05)
        sent.append(str(message["type"]))

    settings = GatewaySettings(hold_seconds=0.01, keep_alive_seconds=0.01)
    app = build_app(ScriptedRouter(NoDestinationError("No node can.")), settings=settings)
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": [(b"content-type", b"application/json")],
        "query_string": b"",
    }
    with anyio.fail_after(PATIENCE_SECONDS):
        await app(scope, receive, send)
    assert sent == ["http.response.start", "http.response.body"]
