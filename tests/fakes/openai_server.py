"""A small HTTP server that speaks OpenAI's interface, or breaks it on purpose."""

import asyncio
import contextlib
import itertools
import json
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from edge_agent.engine.base import (
    Finished,
    GenerationRequest,
    InferenceEngine,
    Message,
    RejectedError,
    RejectionKind,
    Sampling,
    TextChunk,
)

Json = dict[str, Any]


@dataclass(slots=True)
class Exchange:
    """One request and the way back to its client."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Json
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    is_answered: bool = False

    async def answer(
        self, status: int, body: object = None, headers: Mapping[str, str] | None = None
    ) -> None:
        """Answer in one piece; bytes go out as they are, the rest as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = {"content-type": "application/json", "content-length": str(len(data))}
        await self._start(status, {**head, **(headers or {})})
        await self.write(data)

    async def start_stream(self) -> None:
        """Begin a stream of events whose end is the end of the connection's body."""
        await self._start(
            200, {"content-type": "text/event-stream", "transfer-encoding": "chunked"}
        )

    async def piece(self, data: bytes) -> None:
        """Send some bytes of a stream as one piece."""
        await self.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def event(self, data: Json | str) -> None:
        """Send one event."""
        text = data if isinstance(data, str) else json.dumps(data)
        await self.piece(f"data: {text}\n\n".encode())

    async def end_stream(self) -> None:
        """End a stream as HTTP wants it."""
        await self.write(b"0\r\n\r\n")

    async def gone(self) -> None:
        """Wait until the client has left."""
        while await self.reader.read(1024):
            pass

    def cut(self) -> None:
        """Drop the connection in the middle."""
        self.writer.transport.abort()

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.is_answered = True
        lines = [f"HTTP/1.1 {status} Whatever", *(f"{k}: {v}" for k, v in headers.items())]
        await self.write("\r\n".join([*lines, "", ""]).encode())


Handler = Callable[[Exchange], Awaitable[None]]


@dataclass(slots=True)
class OpenAiServer:
    """The server; its port is known before it starts, and stays.

    Attributes:
        answer: what is done with a request that is not for the list of models.
        models: as /v1/models lists them; None lets that path be handled by `answer`, too.
        seen: every request but those for the list of models.
        looks: how often the list of models was asked for.
        may_list: cleared, it holds the list back, and so keeps a failed endpoint away.
    """

    answer: Handler
    models: list[Json] | None = field(default_factory=lambda: [{"id": "served"}])
    seen: list[Exchange] = field(default_factory=list)
    looks: int = 0
    may_list: asyncio.Event = field(default_factory=asyncio.Event)
    _socket: socket.socket | None = None
    _port: int = 0
    _server: asyncio.Server | None = None
    _tasks: "set[asyncio.Task[None]]" = field(default_factory=set)
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._port = self._socket.getsockname()[1]
        self.may_list.set()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    async def start(self) -> None:
        if self._socket is None:
            self._socket = socket.create_server(("127.0.0.1", self._port))
        self._server = await asyncio.start_server(self._connected, sock=self._socket)

    def stop(self) -> None:
        """Drop every connection and listen no more, as a server does that is killed."""
        if self._server is not None:
            self._server.close()
        elif self._socket is not None:
            self._socket.close()
        self._server = self._socket = None
        for writer in self._writers:
            writer.transport.abort()

    def crash(self, seconds: float = 0.05) -> None:
        """Stop, and start again after so long."""
        self.stop()
        self._keep(asyncio.create_task(self._restart(seconds)))

    async def close(self) -> None:
        self.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self) -> "OpenAiServer":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _restart(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self.start()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._keep(asyncio.create_task(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while True:
                    await self._handle(await _read_request(reader, writer))
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _handle(self, exchange: Exchange) -> None:
        if exchange.path == "/v1/models" and self.models is not None:
            self.looks += 1
            await self.may_list.wait()
            await exchange.answer(200, {"object": "list", "data": self.models})
            return
        self.seen.append(exchange)
        await self.answer(exchange)
        if not exchange.is_answered:
            await exchange.answer(404, b"404 page not found", {"content-type": "text/plain"})


async def _read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Exchange:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = head[0].split(" ")
    headers = {
        name.lower(): value.strip()
        for name, _, value in (line.partition(":") for line in head[1:] if line)
    }
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Exchange(method, path, headers, json.loads(body) if body else {}, reader, writer)


def answering(engine: InferenceEngine) -> Handler:
    """A handler that lets an engine answer, as llama-server does with its own."""
    numbers = itertools.count()

    async def handle(exchange: Exchange) -> None:
        body = exchange.body
        is_chat = exchange.path == "/v1/chat/completions"
        if not is_chat and exchange.path != "/v1/completions":
            return
        prompt: Any = body.get("prompt")
        if is_chat:
            prompt = tuple(Message(m["role"], m["content"]) for m in body["messages"])
        sampling = Sampling(
            body["max_tokens"],
            body["temperature"],
            body["top_p"],
            body["top_k"],
            body["seed"] % 2**64 if "seed" in body else None,
            tuple(body.get("stop", ())),
        )
        request = GenerationRequest(f"request-{next(numbers)}", prompt, sampling)
        async with contextlib.aclosing(engine.generate(request)) as events:  # type: ignore[type-var]
            try:
                async for event in events:
                    if not exchange.is_answered:
                        await exchange.start_stream()
                    if isinstance(event, TextChunk):
                        await exchange.event(text_chunk(event.text, is_chat))
                    elif isinstance(event, Finished):
                        await exchange.event(finish_chunk(event.reason.value))
                        await exchange.event(
                            usage_chunk(event.prompt_tokens, event.completion_tokens)
                        )
                        await exchange.event("[DONE]")
                        await exchange.end_stream()
            except RejectedError as error:
                is_long = error.kind is RejectionKind.CONTEXT_EXCEEDED
                code = "context_length_exceeded" if is_long else None
                await exchange.answer(400, error_body(str(error), code))

    return handle


def text_chunk(text: str, is_chat: bool = True) -> Json:
    choice = {"delta": {"content": text}} if is_chat else {"text": text}
    return {"choices": [{"index": 0, **choice, "finish_reason": None}]}


def finish_chunk(reason: str) -> Json:
    return {"choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": reason}]}


def usage_chunk(prompt_tokens: int, completion_tokens: int) -> Json:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return {"choices": [], "usage": usage}


def error_body(message: str, code: object = None, param: str | None = None) -> Json:
    error = {"message": message, "type": "invalid_request_error", "code": code, "param": param}
    return {"error": error}
