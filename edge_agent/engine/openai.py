"""An OpenAI-compatible server (llama-server, Ollama, vLLM, a cloud API) as an engine.

What differs from an engine of our own, because HTTP does not tell:
- a prompt's tokens are an estimate until the server's own count comes with the end of the answer;
- where the server sends no usage, each piece of the stream counts as one token, and
  `stats().issue` says so;
- waiting in the server's queue counts as reading the prompt.

httpx is imported by `load`, so an agent without remote models never pays for it.
"""

import asyncio
import contextlib
import functools
import json
import os
import random
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import anyio
import structlog

from edge_agent.engine.answer_text import AnswerText
from edge_agent.engine.base import (
    EngineStats,
    Finished,
    GenerationEvent,
    GenerationRequest,
    LoadedModel,
    PromptProgress,
    RejectedError,
    RejectionKind,
    SlowReaderError,
    StopReason,
)
from edge_agent.engine.event_stream import EventStream
from edge_agent.engine.openai_answer import AnswerStream
from edge_agent.engine.openai_endpoint import (
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
from edge_agent.engine.openai_refusals import (
    Asked,
    NoCompletionsError,
    ParameterRefusedError,
    TooBusyError,
    meaning_of_error_frame,
    meaning_of_response,
    shown_words,
)
from edge_agent.engine.openai_request import RequestWriter
from edge_agent.engine.openai_settings import DEFAULT_CONTEXT_TOKENS, OpenAiSettings, Rates
from edge_agent.engine.openai_trial import TRIAL_TEXT, MeasuredView, trial_rates, trial_request
from edge_agent.engine.stream_buffer import MAX_UNREAD_CHARACTERS, StreamBuffer
from edge_agent.engine.validation import check_request
from edge_agent.errors import EngineError, EngineFailure

__all__ = ["MeasuredView", "OpenAiEngine", "OpenAiSettings", "Rates"]

if TYPE_CHECKING:
    import httpx

log = structlog.get_logger()

Json = dict[str, Any]

_USAGE_SECONDS: Final = 2.0
"""How long the usage may come after the finish reason."""
_TAIL_SECONDS: Final = 0.05
"""How long the end of the body may come after [DONE]; then the connection is not used again."""
_PROGRESS_SECONDS: Final = 1.0
_MAX_ERROR_BYTES: Final = 65_536
_NEEDS_CHANGE: Final = frozenset({RemoteIssue.KEY_REFUSED, RemoteIssue.QUOTA_EXHAUSTED})
"""Issues that an endpoint's list of models does not show to be gone."""


class _StaleConnectionError(Exception):
    """The server had closed the connection that a request went out on."""


class OpenAiEngine:
    """An `InferenceEngine` whose answers come from an OpenAI-compatible server.

    At most `slots` requests are under way at once; more wait here, first come, first served.
    When the endpoint fails, what waits ends with EngineError, so that it can go elsewhere, and the
    endpoint is asked for its models, with growing pauses, until it answers.

    Raw prompts go to /completions. An endpoint without it rejects them (INVALID_REQUEST): dressing
    a raw prompt as a chat would have it decoded with a template around it, which the client did
    not ask for.

    Args:
        settings: where it is.
        max_queued: requests that may wait for a slot.
        connect_seconds: longest time for a connection to be made.
        stall_seconds: longest time between two pieces of an answer (L17, R6).
        first_retry_seconds: the pause before a failed endpoint is first asked whether it is back;
            each further one is twice as long.
        max_retry_seconds: the longest pause.
        max_unread_characters: text that a reader may leave waiting before it is given up (S12).
        environ: where `api_key_env` is looked up.
        rng: spreads the pauses of many agents.
    """

    def __init__(
        self,
        settings: OpenAiSettings,
        *,
        max_queued: int = 256,
        connect_seconds: float = 10.0,
        stall_seconds: float = 60.0,
        first_retry_seconds: float = 1.0,
        max_retry_seconds: float = 60.0,
        max_unread_characters: int = MAX_UNREAD_CHARACTERS,
        environ: Mapping[str, str] = os.environ,
        rng: random.Random | None = None,
    ) -> None:
        self.settings = settings
        self._max_queued = max_queued
        self._connect_seconds = connect_seconds
        self._stall_seconds = stall_seconds
        self._first_retry_seconds = first_retry_seconds
        self._max_retry_seconds = max_retry_seconds
        self._max_unread_characters = max_unread_characters
        self._environ = environ
        self._rng = rng or random.Random()
        self._base_url = settings.base_url.rstrip("/")
        self._client: httpx.AsyncClient | None = None
        self._model: LoadedModel | None = None
        self._writer = RequestWriter(settings)
        self._trial_rates = Rates()
        self._takes_raw_prompts = settings.supports_raw_prompts
        self._counts_pieces = False
        self._failure: RemoteError | None = None
        self._refused_key: str | None = None
        self._failures_in_a_row = 0
        self._paused_until = 0.0
        self._recovery: asyncio.Task[None] | None = None
        self._is_closed = False
        self._streams: dict[str, AnswerStream] = {}
        self._waiting: deque[AnswerStream] = deque()
        self._active: list[AnswerStream] = []
        self._busy_seconds = 0.0
        self._accounted_at = 0.0

    async def load(self) -> LoadedModel:
        """Find the endpoint and its model, and try it out with one small request.

        The request (some 160 prompt tokens and at most 32 of an answer) is left out when every
        rate is declared. It tells the characters per token, and the speed where nothing else may
        be sent to measure it.

        Raises:
            EngineError: it cannot be used; a RemoteError says by its issue why.
        """
        if self._is_closed:
            raise EngineError(EngineFailure.CRASHED, "The engine is closed; make a new one.")
        if self._model is not None:
            return self._model
        if self._client is not None:
            raise EngineError(EngineFailure.CRASHED, "The endpoint is being tried out already.")
        # Reading httpx and the certificates takes a second on a small board.
        self._client = await asyncio.to_thread(
            new_client, self.settings.slots + 1, self._connect_seconds
        )
        is_loaded = False
        try:
            listing = await self._look()
            self._writer.model, self._writer.server = listing.model, listing.server
            if None in _values(self.settings.declared):
                await self._try_out()
            is_loaded = True
        except RemoteError as error:
            self._failure = error
            raise
        finally:
            if not is_loaded:
                client, self._client = self._client, None
                if client is not None:
                    await client.aclose()
        self._failure = None
        self._model = LoadedModel(
            context_tokens=self.settings.context_tokens
            or listing.context_tokens
            or DEFAULT_CONTEXT_TOKENS,
            slots=self.settings.slots,
            has_chat_template=self.settings.has_chat_template,
            template_issue=None,
            description=f"{self._writer.model} at {self._base_url}",
            parameters=None,
            characters_per_token=self._writer.characters_per_token,
            engine_version="openai-compatible",
            resident_bytes=None,
            supports_response_format=self.settings.supports_response_format,
        )
        self._writer.context_tokens = self._model.context_tokens
        return self._model

    @property
    def known_rates(self) -> tuple[float, float, float] | None:
        """Prefill, decode and saturated decode rate; None when they are to be measured.

        What is declared goes before what the trial told. A saturated rate that nobody declared is
        the rate of one answer times the slots: whoever sells answers has many machines.
        """
        declared, trial = self.settings.declared, self._trial_rates
        prefill = declared.prefill or trial.prefill
        decode = declared.decode or trial.decode
        if None in _values(declared) and self.settings.is_measured:
            return None
        if prefill is None or decode is None:
            return None
        saturated = declared.saturated_decode or decode * self.settings.slots
        return prefill, decode, max(decode, saturated)

    def for_measuring(self) -> "MeasuredView":
        """The loaded engine as bench.calibrate needs it."""
        return MeasuredView(self)

    @property
    def takes_raw_prompts(self) -> bool:
        """Whether raw prompts are answered, as far as it is known."""
        return self._takes_raw_prompts

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """Generate one answer; see `InferenceEngine.generate`."""
        if self._model is None or self._is_closed or self._failure is not None:
            raise self._unavailable()
        async with contextlib.aclosing(self._generate(request)) as events:
            async for event in events:
                yield event

    async def cancel(self, key: str) -> None:
        """End a generation early; unknown keys are ignored."""
        stream = self._streams.get(key)
        if stream is not None:
            self._end(stream, StopReason.CANCELLED)

    def stats(self) -> EngineStats:
        """Look at the engine without waiting for it."""
        self._account()
        issue = None
        if self._failure is not None:
            issue = f"{self._failure.issue.value}: {self._failure}"
        elif self._counts_pieces:
            issue = (
                "remote_sends_no_usage: the endpoint does not count tokens, so each piece of its"
                " answers counts as one and prompts are estimated; prices and speeds are rough"
            )
        return EngineStats(
            is_ready=self._model is not None and self._failure is None and not self._is_closed,
            slots=self.settings.slots,
            busy_slots=len(self._active),
            queued_requests=len(self._waiting),
            busy_seconds_total=self._busy_seconds,
            resident_bytes=None,
            issue=issue,
        )

    async def close(self) -> None:
        """Leave the endpoint; running iterators end with EngineError."""
        self._is_closed = True
        recovery, self._recovery = self._recovery, None
        if recovery is not None:
            recovery.cancel()
            await asyncio.gather(recovery, return_exceptions=True)
        for stream in list(self._streams.values()):
            stream.buffer.fail(EngineError(EngineFailure.CRASHED, "The engine was closed."))
            self._end(stream, StopReason.CANCELLED)
        tasks = [stream.task for stream in self._active if stream.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=2.0)
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    # -- requests -------------------------------------------------------------------------------

    async def _generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        stream = self._submit(request)
        try:
            while True:
                event = await stream.buffer.get()
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            self._end(stream, StopReason.CANCELLED)

    def _unavailable(self) -> EngineError:
        if self._failure is None:
            return EngineError(
                EngineFailure.CRASHED, "The endpoint was not found yet; try again later."
            )
        error = RemoteError(self._failure.issue, f"The endpoint is away now: {self._failure}")
        error.kind = self._failure.kind
        return error

    def _submit(self, request: GenerationRequest) -> AnswerStream:
        check_request(request)
        if request.key in self._streams:
            raise RejectedError(
                RejectionKind.INVALID_REQUEST, f"A request {request.key!r} is running already."
            )
        if isinstance(request.prompt, str):
            if not self._takes_raw_prompts:
                raise NoCompletionsError
        elif not self.settings.has_chat_template:
            raise RejectedError(
                RejectionKind.NO_CHAT_TEMPLATE, "This is a base model; send a raw prompt."
            )
        if request.response_format is not None:
            if not self.settings.supports_response_format:
                raise RejectedError(
                    RejectionKind.INVALID_REQUEST,
                    "This endpoint keeps no response format; ask for free text.",
                )
            self._writer.check_format(request)
        if time.monotonic() < self._paused_until:
            raise _left_alone()
        if len(self._waiting) + len(self._active) >= self.settings.slots + self._max_queued:
            raise RejectedError(
                RejectionKind.QUEUE_FULL, f"{self._max_queued} requests are waiting already."
            )
        stream = AnswerStream(
            request,
            StreamBuffer(self._max_unread_characters),
            AnswerText(request.sampling.stop),
            time.monotonic(),
            request.sampling.max_tokens,
        )
        self._streams[request.key] = stream
        self._waiting.append(stream)
        self._start_waiting()
        return stream

    def _start_waiting(self) -> None:
        while self._waiting and len(self._active) < self.settings.slots:
            stream = self._waiting.popleft()
            self._account()
            self._active.append(stream)
            stream.started_at = time.monotonic()
            stream.buffer.put(
                PromptProgress(0, self._writer.estimated_prompt_tokens(stream.request))
            )
            stream.task = asyncio.create_task(
                self._run(stream), name=f"remote-{stream.request.key}"
            )
            # Not in `_run`: a task that is cancelled before its first step runs nothing at all.
            stream.task.add_done_callback(functools.partial(self._leave_after, stream))

    def _leave(self, stream: AnswerStream) -> None:
        if stream in self._active:
            self._account()
            self._active.remove(stream)
            if not self._is_closed:
                self._start_waiting()

    def _leave_after(self, stream: AnswerStream, _: "asyncio.Task[None]") -> None:
        self._leave(stream)

    async def _run(self, stream: AnswerStream) -> None:
        """Have one request answered; its slot is free when this has ended."""
        ticker = asyncio.create_task(self._tell_progress(stream), name="remote-progress")
        reason = StopReason.CANCELLED
        try:
            reason = await self._converse(stream)
            self._failures_in_a_row = 0
        except SlowReaderError:
            pass  # the buffer has told its reader
        except RejectedError as error:
            stream.buffer.fail(error)
        except RemoteError as error:
            if error.is_down:
                self._go_down(error)
            stream.buffer.fail(error)
        except Exception:
            log.exception("remote.request_failed")
            stream.buffer.fail(
                EngineError(EngineFailure.CRASHED, "The agent failed; its log says why.")
            )
        finally:
            ticker.cancel()
        self._leave(stream)
        self._end(stream, reason)

    def _end(self, stream: AnswerStream, reason: StopReason) -> None:
        """The only way out of the engine for a request; the second call does nothing."""
        if self._streams.get(stream.request.key) is not stream:
            return
        del self._streams[stream.request.key]
        if stream in self._waiting:
            self._waiting.remove(stream)
        self._account()
        now = time.monotonic()
        started = now if stream.started_at is None else stream.started_at
        answered = now if stream.answered_at is None else stream.answered_at
        if stream.started_at is None:
            prompt_tokens = stream.prompt_tokens or 0
        else:
            prompt_tokens = stream.prompt_tokens or self._writer.estimated_prompt_tokens(
                stream.request
            )
        stream.buffer.put(
            Finished(
                reason=reason,
                prompt_tokens=prompt_tokens,
                completion_tokens=stream.pieces
                if stream.completion_tokens is None
                else stream.completion_tokens,
                queue_seconds=started - stream.submitted_at,
                prefill_seconds=answered - started,
                decode_seconds=now - answered,
                work_seconds=stream.work_seconds,
            )
        )
        if stream.task is not None and stream.task is not asyncio.current_task():
            stream.task.cancel()

    def _account(self) -> None:
        """Split the time since the last look over the requests that were under way (D18)."""
        now = time.monotonic()
        if self._active:
            seconds = now - self._accounted_at
            self._busy_seconds += seconds
            for stream in self._active:
                stream.work_seconds += seconds / len(self._active)
        self._accounted_at = now

    async def _tell_progress(self, stream: AnswerStream) -> None:
        """Show that a prompt is being read, or an answer thought about, until there is text."""
        total = self._writer.estimated_prompt_tokens(stream.request)
        while not stream.has_shown_text:
            await asyncio.sleep(_PROGRESS_SECONDS)
            if not stream.has_shown_text:
                read = 0 if stream.answered_at is None else total
                stream.buffer.put(PromptProgress(read, total))

    # -- one answer -----------------------------------------------------------------------------

    async def _converse(self, stream: AnswerStream) -> StopReason:
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
                    shorter = self._writer.shorter_limit(stream.request, stream.max_tokens)
                if error.kind is not RejectionKind.CONTEXT_EXCEEDED or shorter is None:
                    raise
                stream.max_tokens = shorter
                stream.is_shortened = True

    async def _ask(self, stream: AnswerStream) -> StopReason:
        import httpx

        path = "/completions" if isinstance(stream.request.prompt, str) else "/chat/completions"
        begin = anyio.current_time()
        try:
            with anyio.CancelScope(deadline=begin + self.settings.first_token_seconds) as scope:
                async with self._http.stream(
                    "POST",
                    self._base_url + path,
                    content=self._writer.body(stream.request, stream.max_tokens),
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
            raise connection_failed(self._base_url, error) from error
        if stream.finish is not None:
            return self._finish(stream)  # only the usage or the end of the stream did not come
        raise RemoteError(
            RemoteIssue.STALLED,
            f"No token came for {anyio.current_time() - begin:.0f} s."
            if stream.answered_at is None
            else f"The answer stood still for {self._stall_seconds:g} s and was given up.",
        )

    async def _read_answer(
        self, response: "httpx.Response", stream: AnswerStream, scope: anyio.CancelScope
    ) -> StopReason:
        """Take in the events of an answer.

        `scope` ends it when nothing but comments comes: a server that only keeps the connection
        alive makes no progress.
        """
        if "text/event-stream" not in response.headers.get("content-type", ""):
            raise RemoteError(
                RemoteIssue.MISCONFIGURED,
                f"{self._base_url} does not answer with a stream of events; is it an"
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

    def _take(self, stream: AnswerStream, chunk: Json) -> None:
        """One event of an answer."""
        if chunk.get("error"):
            error = chunk["error"]
            message = error.get("message") if isinstance(error, dict) else error
            words = shown_words(message, self._key())
            raise meaning_of_error_frame(error, words, stream.answered_at is not None)
        stream.take(chunk, self._writer.estimated_prompt_tokens(stream.request))

    async def _refused(
        self, response: "httpx.Response", stream: AnswerStream
    ) -> RemoteError | RejectedError | ParameterRefusedError:
        """What a response that is no answer means; what it tells of the endpoint is kept."""
        error = error_object(await read_body(response, _MAX_ERROR_BYTES))
        asked = Asked(
            self._base_url,
            self.settings.key_source,
            isinstance(stream.request.prompt, str),
            self._writer.fits(stream.request, stream.max_tokens),
            self._writer.can_do_without,
        )
        meaning = meaning_of_response(
            response.status_code,
            error,
            shown_words(error.get("message"), self._key()),
            response.headers.get("retry-after"),
            asked,
        )
        if isinstance(meaning, NoCompletionsError):
            self._takes_raw_prompts = False
        if isinstance(meaning, TooBusyError) and meaning.pause_seconds is not None:
            self._pause(meaning.pause_seconds)
        return meaning

    def _finish(self, stream: AnswerStream) -> StopReason:
        """Why a stream that is over ended; never an invented stop (S5)."""
        if stream.text.is_stopped:
            return StopReason.STOP  # by a stop string that the server does not look for
        if stream.finish is None:
            if stream.answered_at is None and not self._writer.fits(
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

    def _learn(self, stream: AnswerStream) -> None:
        """Keep what an answer tells about the endpoint's counting."""
        counts_pieces = stream.completion_tokens is None
        if counts_pieces and not self._counts_pieces:
            log.warning("remote.usage_absent", base_url=self._base_url)
        self._counts_pieces = counts_pieces

    # -- the endpoint ---------------------------------------------------------------------------

    async def _try_out(self) -> None:
        """Ask for one small answer."""
        finished = await self._trial(self._takes_raw_prompts)
        if finished is None:
            finished = await self._trial(False)
        if finished is None:
            raise RemoteError(
                RemoteIssue.MISCONFIGURED,
                f"{self._base_url} answers neither chats nor raw prompts.",
            )
        if not self._counts_pieces:
            self._writer.characters_per_token = len(TRIAL_TEXT) / max(finished.prompt_tokens, 1)
        if finished.completion_tokens == 0:
            raise RemoteError(
                RemoteIssue.FAILED, f"{self._writer.model} answered a trial request with nothing."
            )
        self._trial_rates = trial_rates(finished)

    async def _trial(self, is_raw: bool) -> Finished | None:
        """The account of a trial request; None when the endpoint takes no such prompt."""
        try:
            async with contextlib.aclosing(self._generate(trial_request(is_raw))) as events:
                async for event in events:
                    if isinstance(event, Finished):
                        return event
        except RejectedError as error:
            if is_raw and not self._takes_raw_prompts:
                return None
            raise RemoteError(
                RemoteIssue.FAILED, f"The endpoint refuses a trial request: {error}"
            ) from error
        return None

    async def _look(self) -> Listing:
        return await look(self._http, self._base_url, self.settings.model, self._headers)

    @property
    def _http(self) -> "httpx.AsyncClient":
        if self._client is None:
            raise EngineError(EngineFailure.CRASHED, "The engine was closed.")
        return self._client

    def _headers(self) -> dict[str, str]:
        key = read_api_key(self.settings.api_key_file, self.settings.api_key_env, self._environ)
        return {} if key is None else {"Authorization": f"Bearer {key}"}

    def _key(self) -> str:
        """The API key, to be kept out of what is shown; "" when there is none to be read."""
        with contextlib.suppress(RemoteError):
            return self._headers().get("Authorization", "").removeprefix("Bearer ")
        return ""

    def _go_down(self, error: RemoteError) -> None:
        """The endpoint cannot be used now: what waits is given back, and it is watched."""
        if self._model is None or self._is_closed:
            return
        self._failure = error
        self._refused_key = None
        if error.issue in _NEEDS_CHANGE:
            with contextlib.suppress(RemoteError):
                self._refused_key = self._headers().get("Authorization", "")
        log.warning("remote.went_down", base_url=self._base_url, issue=error.issue.value)
        for stream in list(self._waiting):
            stream.buffer.fail(RemoteError(error.issue, f"The endpoint is away now: {error}"))
            self._end(stream, StopReason.CANCELLED)
        if self._recovery is None or self._recovery.done():
            self._recovery = asyncio.create_task(self._recover(), name="remote-recovery")

    def _pause(self, seconds: float) -> None:
        """Ask for nothing for a while; what waits here may be answered elsewhere meanwhile."""
        self._paused_until = time.monotonic() + seconds
        for stream in list(self._waiting):
            stream.buffer.fail(_left_alone())
            self._end(stream, StopReason.CANCELLED)

    async def _recover(self) -> None:
        """Ask a failed endpoint, with growing pauses, until it can be used."""
        went_down_at = time.monotonic()
        while True:
            # Not reset by coming back, only by an answer: an endpoint whose list of models works
            # and whose answers do not must not draw requests again and again (R1).
            pause = self._first_retry_seconds * 2.0 ** min(self._failures_in_a_row, 16)
            self._failures_in_a_row += 1
            pause = min(pause, self._max_retry_seconds)
            await asyncio.sleep(pause * self._rng.uniform(0.8, 1.0))
            try:
                is_same_key = self._refused_key == self._headers().get("Authorization", "")
                is_early = time.monotonic() - went_down_at < self._max_retry_seconds
                if self._refused_key is not None and is_same_key and is_early:
                    continue
                await self._look()
            except RemoteError as error:
                self._failure = error
            else:
                self._failure = None
                log.info("remote.came_back", base_url=self._base_url)
                return


def _left_alone() -> RejectedError:
    return RejectedError(
        RejectionKind.QUEUE_FULL, "The endpoint asked to be left alone for a while."
    )


def _values(rates: Rates) -> tuple[float | None, ...]:
    return rates.prefill, rates.decode, rates.saturated_decode
