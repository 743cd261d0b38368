"""The OpenAI-compatible HTTP door: its routes, and how an answer goes out on the wire."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Final, Protocol

import anyio
import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from controller.api.service import ServedModel
from controller.config import GatewaySettings
from controller.domain.request import InferenceRequest
from controller.domain.request_record import Account
from controller.errors import RouterError
from controller.gateway.openai import (
    AUTO_MODEL,
    ChunkBuilder,
    HttpFailure,
    Json,
    account_failure,
    chat_completion,
    failure_of,
    internal_failure,
    model_list,
    parse_request,
    to_json,
)
from controller.ids import RequestId, new_request_id
from controller.request_manager.manager import InferEvent
from controller.request_manager.stream import RoutedTo, Text
from controller.telemetry.metrics import CONTENT_TYPE, Metrics

log = structlog.get_logger()

_UTF8: Final = frozenset({"charset=utf-8", 'charset="utf-8"', "charset=utf8"})

Item = InferEvent | HttpFailure
"""What the service says of one request."""

_LAST: Final = (Account, HttpFailure)
"""Items that end it."""

Headers = list[tuple[bytes, bytes]]


class Router(Protocol):
    """What this door needs of `RouterService`."""

    def infer(self, request: InferenceRequest) -> AsyncGenerator[InferEvent, None]:
        """Events, at last one Account; raises RouterError. Closing it cancels the request."""
        ...

    def models(self) -> list[ServedModel]:
        """What the fleet can answer with now."""
        ...


def build_app(
    router: Router, metrics: Metrics | None = None, settings: GatewaySettings | None = None
) -> Starlette:
    """The HTTP application over a router; without `metrics` its page of metrics is empty."""
    registered = metrics or Metrics()
    created = int(time.time())

    async def list_models(request: Request) -> Response:
        return _json({"object": "list", "data": model_list(router.models(), created)})

    async def get_model(request: Request) -> Response:
        name = request.path_params["name"]
        found = {model["id"]: model for model in model_list(router.models(), created)}
        if name in found:
            return _json(found[name])
        served = ", ".join(found) or "none; no node is ready"
        raise HttpFailure(
            404, "model_not_found", f"No model is called {name!r}. Served now: {served}.", "model"
        )

    async def live(request: Request) -> Response:
        return _json({"status": "ok"})

    async def ready(request: Request) -> Response:
        models = len(router.models())
        return _json(
            {"status": "ready" if models else "no model", "models": models}, 200 if models else 503
        )

    async def scrape(request: Request) -> Response:
        return Response(registered.text(), headers={"content-type": CONTENT_TYPE})

    return Starlette(
        routes=[
            Route(
                "/v1/chat/completions",
                ChatCompletions(router, settings or GatewaySettings()),
                methods=["POST"],
            ),
            Route("/v1/models", list_models),
            Route("/v1/models/{name:path}", get_model),
            Route("/healthz", live),
            Route("/readyz", ready),
            Route("/metrics", scrape),
        ],
        exception_handlers={
            HTTPException: _on_http_exception,
            HttpFailure: _on_error,
            RouterError: _on_error,
            Exception: _on_error,
        },
    )


def _json(content: Json, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(content), status, headers, "application/json")


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        failure = HttpFailure(404, "not_found", f"There is nothing at {where}.")
    elif error.status_code == 405:
        failure = HttpFailure(405, "method_not_allowed", f"{where}: not with this method.")
    else:
        failure = HttpFailure(error.status_code, "http_error", error.detail)
    return _json(failure.body(), failure.status, dict(error.headers or {}))


async def _on_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HttpFailure | RouterError):
        log.error("http.crashed", path=request.url.path, exc_info=error)
    failure = failure_of(error)
    return _json(failure.body(), failure.status)


class ChatCompletions:
    """`POST /v1/chat/completions` as an ASGI application.

    Whatever ends the exchange early (the client leaves, it stops reading, the server stops) closes
    the router's iterator, and so cancels the generation.
    """

    def __init__(self, router: Router, settings: GatewaySettings) -> None:
        self._router = router
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request_id = new_request_id()
        try:
            body = await _read_body(Request(scope, receive), self._settings)
            request = parse_request(body)
            inference = request.to_inference()
        except ClientDisconnect:
            return
        except HttpFailure as failure:
            await _failure_response(failure, request_id)(scope, receive, send)
            return
        client = _Client(send, inference.request_id, self._settings.write_seconds)
        created = int(time.time())
        async with (
            aclosing(_items(self._router, inference)) as items,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(_cancel_when_gone, receive, tasks.cancel_scope, name="http-gone")
            if request.is_stream:
                chunks = ChunkBuilder(
                    inference.request_id,
                    inference.model or AUTO_MODEL,
                    created,
                    request.includes_usage,
                )
                stream = _EventStream(client, chunks, self._settings)
                tasks.start_soon(stream.keep_alive, tasks.cancel_scope, name="http-keep-alive")
                await stream.answer(items)
            else:
                await _answer_whole(client, items, created)
            tasks.cancel_scope.cancel()


async def _read_body(request: Request, settings: GatewaySettings) -> bytes:
    """The request's body.

    Raises:
        HttpFailure: it is not JSON by its own account, too long, or too slow to arrive.
        ClientDisconnect: the client left.
    """
    media_type, *parameters = request.headers.get("content-type", "").lower().split(";")
    charsets = {text.strip() for text in parameters if "charset" in text}
    # A browser may send anything but application/json to us unasked, from any page.
    if media_type.strip() != "application/json" or charsets - _UTF8:
        raise HttpFailure(
            415, "wrong_content_type", "Send Content-Type: application/json in UTF-8."
        )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HttpFailure(415, "wrong_content_encoding", "Send the body without compression.")
    too_long = HttpFailure(
        413, "body_too_long", f"The body is too long; at most {settings.max_body_bytes} bytes."
    )
    if int(request.headers.get("content-length", 0)) > settings.max_body_bytes:
        raise too_long
    body = bytearray()
    try:
        with anyio.fail_after(settings.body_seconds):
            async for piece in request.stream():
                body += piece
                if len(body) > settings.max_body_bytes:
                    raise too_long
    except TimeoutError as error:
        raise HttpFailure(
            408, "body_timeout", f"The body did not arrive within {settings.body_seconds:g} s."
        ) from error
    return bytes(body)


async def _items(router: Router, inference: InferenceRequest) -> AsyncGenerator[Item, None]:
    """What the router says of one request; nothing raises, the last is an Account or a failure.

    The router's iterator is closed before the last item is handed out: the request has ended,
    however long its client takes to read that.
    """
    last: Item = internal_failure()  # an iterator that just ends has answered nothing
    try:
        async with aclosing(router.infer(inference)) as events:
            async for event in events:
                if isinstance(event, Account):
                    last = account_failure(event) or event
                    break
                yield event
    except Exception as error:
        if not isinstance(error, RouterError):
            log.exception("http.request_crashed", request_id=inference.request_id)
        last = failure_of(error)
    yield last


async def _cancel_when_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


class _Client:
    """Who reads the answer; every write tells whether somebody still does."""

    def __init__(self, send: Send, request_id: RequestId, write_seconds: float) -> None:
        self.request_id = request_id
        self._send = send
        self._write_seconds = write_seconds

    async def begin(self, status: int, headers: Headers) -> bool:
        """Send the status line and the headers."""
        return await self._write(
            {"type": "http.response.start", "status": status, "headers": headers}
        )

    async def body(self, data: bytes, is_last: bool) -> bool:
        """Send a piece of the body."""
        return await self._write(
            {"type": "http.response.body", "body": data, "more_body": not is_last}
        )

    async def respond(self, response: Response) -> bool:
        """Send a whole response."""
        return await self.begin(response.status_code, response.raw_headers) and await self.body(
            bytes(response.body), is_last=True
        )

    async def _write(self, message: dict[str, object]) -> bool:
        with anyio.move_on_after(self._write_seconds) as scope:
            try:
                await self._send(message)
            except OSError:  # how ASGI 2.4 servers say that the client left
                return False
        if scope.cancelled_caught:
            log.warning("http.client_stalled", request_id=self.request_id)
        return not scope.cancelled_caught


async def _answer_whole(client: _Client, items: AsyncIterator[Item], created: int) -> None:
    """Answer in one piece."""
    texts: list[str] = []
    async for item in items:
        match item:
            case RoutedTo():
                pass
            case Text():
                texts.append(item.text)
            case Account():
                answer = chat_completion(item, "".join(texts), created)
                await client.respond(_json(answer, 200, _id_header(client.request_id)))
            case HttpFailure():
                await client.respond(_failure_response(item, client.request_id))


class _EventStream:
    """Answers with server-sent events.

    The status line waits for the first event, an error or `hold_seconds`. After that an error is a
    frame of its own, and the stream ends without a finish reason and without [DONE].
    """

    def __init__(self, client: _Client, chunks: ChunkBuilder, settings: GatewaySettings) -> None:
        self._client = client
        self._chunks = chunks
        self._settings = settings
        self._has_begun = self._has_ended = False
        self._written_at = -math.inf
        self._writing = asyncio.Lock()

    async def answer(self, items: AsyncIterator[Item]) -> None:
        """Write what comes, to the last item or until nobody reads any more."""
        async for item in items:
            async with self._writing:
                self._has_ended = isinstance(item, _LAST)
                if isinstance(item, HttpFailure) and not self._has_begun:
                    await self._client.respond(_failure_response(item, self._client.request_id))
                elif not await self._write(self._frames(item)):
                    return

    async def keep_alive(self, scope: anyio.CancelScope) -> None:
        """Begin when nothing has come for too long, then comment on each long silence.

        Args:
            scope: is cancelled when nobody reads any more.
        """
        await anyio.sleep(self._settings.hold_seconds)
        while True:
            async with self._writing:
                if self._has_ended:
                    return
                silence = anyio.current_time() - self._written_at
                is_quiet = silence >= self._settings.keep_alive_seconds
                if is_quiet and not await self._write(b": waiting\n\n"):
                    scope.cancel()
            await anyio.sleep_until(self._written_at + self._settings.keep_alive_seconds)

    async def _write(self, data: bytes) -> bool:
        if not self._has_begun:
            self._has_begun = True
            if not await self._client.begin(200, self._headers()):
                return False
        if not data:
            return True
        is_read = await self._client.body(data, self._has_ended)
        self._written_at = anyio.current_time()
        return is_read

    def _headers(self) -> Headers:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # nginx would hold the stream back
            **_id_header(self._client.request_id),
        }
        return [(name.encode(), value.encode()) for name, value in headers.items()]

    def _frames(self, item: Item) -> bytes:
        match item:
            case RoutedTo():
                return _sse(self._chunks.routed(item))
            case Text():
                return _sse(self._chunks.text(item))
            case Account():
                return _sse(self._chunks.finished(item)) + b"data: [DONE]\n\n"
            case HttpFailure():
                return _sse([item.body()])


def _sse(objects: list[Json]) -> bytes:
    return b"".join(b"data: " + to_json(item) + b"\n\n" for item in objects)


def _id_header(request_id: RequestId) -> dict[str, str]:
    return {"x-request-id": request_id}


def _failure_response(failure: HttpFailure, request_id: RequestId) -> Response:
    return _json(failure.body(), failure.status, _id_header(request_id))
