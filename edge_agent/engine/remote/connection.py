"""One endpoint over HTTP: asks it, reads what it streams, and says what its refusals mean."""

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import anyio
import structlog

from edge_agent.engine.base import RejectedError, RejectionKind, StopReason
from edge_agent.engine.remote.answer import RemoteAnswer
from edge_agent.engine.remote.endpoint import (
    Listing,
    RemoteError,
    RemoteIssue,
    connection_failed,
    error_object,
    look,
    new_client,
    read_api_key,
    read_body,
)
from edge_agent.engine.remote.event_stream import EventStream
from edge_agent.engine.remote.refusals import (
    Asked,
    NoCompletionsError,
    ParameterRefusedError,
    meaning_of_error_frame,
    meaning_of_response,
    shown_words,
)
from edge_agent.engine.remote.request import RequestWriter
from edge_agent.engine.remote.settings import OpenAiSettings
from edge_agent.errors import EngineError, EngineFailure

if TYPE_CHECKING:
    import httpx

log = structlog.get_logger()

Json = dict[str, Any]

_USAGE_SECONDS: Final = 2.0
"""How long the usage may come after the finish reason."""
_TAIL_SECONDS: Final = 0.05
"""How long the end of the body may come after [DONE]; then the connection is not used again."""
_MAX_ERROR_BYTES: Final = 65_536


class _StaleConnectionError(Exception):
    """The server had closed the connection that a request went out on."""


class OpenAiConnection:
    """An endpoint, and what asking it has told of it.

    Args:
        settings: where it is.
        connect_seconds: longest time for a connection to be made.
        stall_seconds: longest time between two pieces of an answer.
        environ: where `api_key_env` is looked up.

    Attributes:
        base_url: without a slash at its end.
        writer: makes the bodies of requests.
        takes_raw_prompts: as far as it is known.
        counts_pieces: it sends no usage, so that each piece of an answer counts as one token.
    """

    def __init__(
        self,
        settings: OpenAiSettings,
        connect_seconds: float,
        stall_seconds: float,
        environ: Mapping[str, str],
    ) -> None:
        self._settings = settings
        self._connect_seconds = connect_seconds
        self._stall_seconds = stall_seconds
        self._environ = environ
        self._client: httpx.AsyncClient | None = None
        self.base_url = settings.base_url.rstrip("/")
        self.writer = RequestWriter(settings)
        self.takes_raw_prompts = settings.supports_raw_prompts
        self.counts_pieces = False

    @property
    def is_open(self) -> bool:
        """Whether it can be asked."""
        return self._client is not None

    async def open(self) -> None:
        """Make it ready to be asked; nothing is sent yet."""
        # Reading httpx and the certificates takes a second on a small board.
        self._client = await asyncio.to_thread(
            new_client, self._settings.slots + 1, self._connect_seconds
        )

    async def close(self) -> None:
        """End every exchange; a second call does nothing."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def look(self) -> Listing:
        """Find the endpoint and the model there; see `openai_endpoint.look`."""
        return await look(self._http, self.base_url, self._settings.model, self._headers)

    def authorization(self) -> str:
        """What is sent as the key now; empty without one.

        Raises:
            RemoteError: it cannot be read.
        """
        return self._headers().get("Authorization", "")

    async def converse(self, stream: RemoteAnswer) -> StopReason:
        """Ask until the endpoint takes the request; nothing has been generated before."""
        while True:
            try:
                return await self._ask(stream)
            except _StaleConnectionError:
                stream.is_repeated = True
            except ParameterRefusedError as refused:
                log.warning("remote.parameter_refused", parameter=str(refused))
            except RejectedError as error:
                shorter = None
                if not stream.is_shortened:
                    shorter = self.writer.shorter_limit(stream.request, stream.max_tokens)
                if error.kind is not RejectionKind.CONTEXT_EXCEEDED or shorter is None:
                    raise
                stream.max_tokens = shorter
                stream.is_shortened = True

    async def _ask(self, stream: RemoteAnswer) -> StopReason:
        import httpx

        path = "/completions" if isinstance(stream.request.prompt, str) else "/chat/completions"
        begin = anyio.current_time()
        try:
            with anyio.CancelScope(deadline=begin + self._settings.first_token_seconds) as scope:
                async with self._http.stream(
                    "POST",
                    self.base_url + path,
                    content=self.writer.body(stream.request, stream.max_tokens),
                    headers={**self._headers(), "Content-Type": "application/json"},
                ) as response:
                    stream.has_response = True
                    if response.status_code != 200:
                        raise await self._refused(response, stream)
                    return await self._read_answer(response, stream, scope)
        except httpx.HTTPError as error:
            if stream.finish is not None:
                return self._finish(stream)  # only the end of the stream was lost
            is_new = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            if not (is_new or stream.has_response or stream.is_repeated):
                # Servers close idle connections when they like; this one may have been used
                # before and closed while the request was on its way. Once, on a new one, then.
                raise _StaleConnectionError from error
            raise connection_failed(self.base_url, error) from error
        if stream.finish is not None:
            return self._finish(stream)  # only the usage or the end of the stream did not come
        raise RemoteError(
            RemoteIssue.STALLED,
            f"No token came for {anyio.current_time() - begin:.0f} s."
            if stream.answered_at is None
            else f"The answer stood still for {self._stall_seconds:g} s and was given up.",
        )

    async def _read_answer(
        self, response: "httpx.Response", stream: RemoteAnswer, scope: anyio.CancelScope
    ) -> StopReason:
        """Take in the events of an answer.

        `scope` ends it when nothing but comments comes: a server that only keeps the connection
        alive makes no progress.
        """
        if "text/event-stream" not in response.headers.get("content-type", ""):
            raise RemoteError(
                RemoteIssue.MISCONFIGURED,
                f"{self.base_url} does not answer with a stream of events; is it an"
                " OpenAI-compatible server?",
            )
        events, is_done = EventStream(), False
        pieces = response.aiter_bytes().__aiter__()
        while not stream.text.is_stopped:
            piece = await anext(pieces, None)
            try:
                for data in events.finish() if piece is None else events.feed(piece):
                    if data.strip() == "[DONE]":
                        is_done = True
                    elif not is_done:
                        self._take(stream, json.loads(data))
                        scope.deadline = anyio.current_time() + (
                            self._stall_seconds if stream.finish is None else _USAGE_SECONDS
                        )
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise RemoteError(
                    RemoteIssue.FAILED,
                    f"The endpoint sent nonsense in the middle of an answer"
                    f" ({type(error).__name__}).",
                ) from error
            if piece is None:
                break
            if is_done:
                # Read on to the end of the body, so that the connection can be used again.
                scope.deadline = anyio.current_time() + _TAIL_SECONDS
        return self._finish(stream)

    def _take(self, stream: RemoteAnswer, chunk: Json) -> None:
        """One event of an answer."""
        if chunk.get("error"):
            error = chunk["error"]
            message = error.get("message") if isinstance(error, dict) else error
            words = shown_words(message, self._key())
            raise meaning_of_error_frame(error, words, stream.answered_at is not None)
        stream.take(chunk, self.writer.estimated_prompt_tokens(stream.request))

    async def _refused(
        self, response: "httpx.Response", stream: RemoteAnswer
    ) -> RemoteError | RejectedError | ParameterRefusedError:
        """What a response that is no answer means; what it tells of the endpoint is kept."""
        error = error_object(await read_body(response, _MAX_ERROR_BYTES))
        asked = Asked(
            self.base_url,
            self._settings.key_source,
            isinstance(stream.request.prompt, str),
            self.writer.fits(stream.request, stream.max_tokens),
            self.writer.can_do_without,
        )
        meaning = meaning_of_response(
            response.status_code,
            error,
            shown_words(error.get("message"), self._key()),
            response.headers.get("retry-after"),
            asked,
        )
        if isinstance(meaning, NoCompletionsError):
            self.takes_raw_prompts = False
        return meaning

    def _finish(self, stream: RemoteAnswer) -> StopReason:
        """Why a stream that is over ended; never an invented stop."""
        if stream.text.is_stopped:
            return StopReason.STOP  # by a stop string that the server does not look for
        if stream.finish is None:
            if stream.answered_at is None and not self.writer.fits(
                stream.request, stream.max_tokens
            ):
                # llama-cpp-python's server has sent its status by the time it finds out.
                raise RejectedError(
                    RejectionKind.CONTEXT_EXCEEDED,
                    "The endpoint ended without an answer to a request that is too long for its"
                    " context.",
                )
            # The body came to its proper end, so the server lives, and only this answer is lost.
            raise RemoteError(
                RemoteIssue.FAILED, "The endpoint ended the answer without a reason.", is_down=False
            )
        stream.close_text()
        self._learn(stream)
        return stream.finish

    def _learn(self, stream: RemoteAnswer) -> None:
        """Keep what an answer tells about the endpoint's counting."""
        counts_pieces = stream.completion_tokens is None
        if counts_pieces and not self.counts_pieces:
            log.warning("remote.usage_absent", base_url=self.base_url)
        self.counts_pieces = counts_pieces

    @property
    def _http(self) -> "httpx.AsyncClient":
        if self._client is None:
            raise EngineError(EngineFailure.CRASHED, "The engine was closed.")
        return self._client

    def _headers(self) -> dict[str, str]:
        key = read_api_key(self._settings.api_key_file, self._settings.api_key_env, self._environ)
        return {} if key is None else {"Authorization": f"Bearer {key}"}

    def _key(self) -> str:
        """The API key, to be kept out of what is shown; "" when there is none to be read."""
        with contextlib.suppress(RemoteError):
            return self.authorization().removeprefix("Bearer ")
        return ""
