"""An OpenAI-compatible server (llama-server, Ollama, vLLM, a cloud API) as an engine.

What differs from an engine of our own, because HTTP does not tell:
- a prompt's tokens are an estimate until the server's own count comes with the end of the answer;
- where the server sends no usage, each piece of the stream counts as one token, and
  `stats().issue` says so;
- waiting in the server's queue counts as reading the prompt.

httpx is imported by `load`, so an agent without remote models never pays for it.
"""

import asyncio
import codecs
import contextlib
import functools
import json
import math
import os
import random
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
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
    Message,
    PromptProgress,
    RejectedError,
    RejectionKind,
    Sampling,
    SlowReaderError,
    StopReason,
    TextChunk,
)
from edge_agent.engine.event_stream import EventStream
from edge_agent.engine.openai_endpoint import (
    Listing,
    RemoteError,
    RemoteIssue,
    connection_failed,
    endpoint_failure,
    error_object,
    look,
    new_client,
    positive_or_none,
    read_api_key,
    read_body,
    retry_after_seconds,
)
from edge_agent.engine.stream_buffer import MAX_UNREAD_CHARACTERS, StreamBuffer
from edge_agent.engine.validation import check_request
from edge_agent.errors import EngineError, EngineFailure

if TYPE_CHECKING:
    import httpx

log = structlog.get_logger()

Json = dict[str, Any]

DEFAULT_CONTEXT_TOKENS: Final = 4096
_DEFAULT_CHARACTERS_PER_TOKEN: Final = 4.0
_TOKENS_PER_MESSAGE: Final = 5
_USAGE_SECONDS: Final = 2.0
"""How long the usage may come after the finish reason."""
_TAIL_SECONDS: Final = 0.05
"""How long the end of the body may come after [DONE]; then the connection is not used again."""
_PROGRESS_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 60.0
_LEAST_SECONDS: Final = 1e-6
_MAX_ERROR_BYTES: Final = 65_536
_MAX_WORDS: Final = 300
_TRIAL_ANSWER_TOKENS: Final = 32
_TRIAL_TEXT: Final = (
    "The market opens at six, when the first boats come in. By eight the fish is sold, and the"
    " square belongs to bread, cheese, apples and whatever the season has to give. Old people"
    " come early because they sleep badly; young people come late because they sleep well. In"
    " winter a woman sells soup from a black pot, and in summer her son sells ice. Nobody has ever"
    " written down who may stand where, yet everybody knows. When it rains, the stalls move under"
    " the arcade of the town hall, and the clerks upstairs complain about the smell of onions. At"
    " noon the bell rings, the carts are loaded again, and a boy with a broom walks from one end of"
    " the square to the other. Tell me more about the people of this town."
)

_FINISH_REASONS: Final[Mapping[str, StopReason]] = {
    "stop": StopReason.STOP,
    "eos": StopReason.STOP,
    "eos_token": StopReason.STOP,
    "stop_sequence": StopReason.STOP,
    "end_turn": StopReason.STOP,
    "length": StopReason.LENGTH,
    "max_tokens": StopReason.LENGTH,
}
_CONTEXT_CODES: Final = frozenset({"context_length_exceeded", "exceed_context_size_error"})
_UNSUPPORTED_CODES: Final = frozenset(
    {"unsupported_parameter", "unknown_parameter", "unrecognized_parameter", "unsupported_value"}
)
_OPTIONAL_PARAMETERS: Final = frozenset(
    {"temperature", "top_p", "top_k", "seed", "stop", "stream_options"}
)


_NEEDS_CHANGE: Final = frozenset({RemoteIssue.KEY_REFUSED, RemoteIssue.QUOTA_EXHAUSTED})
"""Issues that an endpoint's list of models does not show to be gone."""


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast an endpoint is, tokens per second; None is not known.

    Attributes:
        prefill: prompt tokens read.
        decode: of one answer alone.
        saturated_decode: of all slots together.
    """

    prefill: float | None = None
    decode: float | None = None
    saturated_decode: float | None = None


@dataclass(frozen=True, slots=True)
class OpenAiSettings:
    """Where an endpoint is and how it is used.

    Attributes:
        base_url: up to and with /v1.
        model: its name there; empty takes the only one there is.
        slots: answers asked for at once, at least 1.
        context_tokens: 0 takes what the server says, else DEFAULT_CONTEXT_TOKENS.
        api_key_file: read anew for each request; goes before `api_key_env`.
        has_chat_template: False refuses chats.
        supports_raw_prompts: False refuses raw prompts.
        omit_parameters: request parameters that are never sent.
        first_token_seconds: from asking to the first token.
        is_measured: False when no requests may be sent only to measure its speed.
        declared: rates that are known beforehand.
    """

    base_url: str
    model: str = ""
    slots: int = 4
    context_tokens: int = 0
    api_key_file: str = ""
    api_key_env: str = ""
    has_chat_template: bool = True
    supports_raw_prompts: bool = True
    omit_parameters: tuple[str, ...] = ()
    first_token_seconds: float = 300.0
    is_measured: bool = True
    declared: Rates = Rates()


class _StaleConnectionError(Exception):
    """The server had closed the connection that a request went out on."""


class _ParameterRefused(Exception):
    """The server does not know a parameter that it can do without."""


@dataclass(slots=True)
class _Stream:
    request: GenerationRequest
    buffer: StreamBuffer
    text: AnswerText
    submitted_at: float
    max_tokens: int
    is_shortened: bool = False
    is_repeated: bool = False
    has_response: bool = False
    task: "asyncio.Task[None] | None" = None
    started_at: float | None = None
    answered_at: float | None = None
    has_shown_text: bool = False
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    pieces: int = 0
    untold_pieces: int = 0
    finish: StopReason | None = None
    work_seconds: float = 0.0
    joiner: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-16-le")(errors="replace")
    )


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
        self._model_name = settings.model
        self._trial_rates = Rates()
        self._characters_per_token: float | None = None
        self._takes_raw_prompts = settings.supports_raw_prompts
        self._omitted = set(settings.omit_parameters)
        self._token_limit_name = "max_tokens"
        self._counts_pieces = False
        self._failure: RemoteError | None = None
        self._refused_key: str | None = None
        self._failures_in_a_row = 0
        self._paused_until = 0.0
        self._recovery: asyncio.Task[None] | None = None
        self._is_closed = False
        self._streams: dict[str, _Stream] = {}
        self._waiting: deque[_Stream] = deque()
        self._active: list[_Stream] = []
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
            self._model_name = listing.model
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
            description=f"{self._model_name} at {self._base_url}",
            parameters=None,
            characters_per_token=self._characters_per_token,
            engine_version="openai-compatible",
            resident_bytes=None,
        )
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

    def _submit(self, request: GenerationRequest) -> _Stream:
        check_request(request)
        if request.key in self._streams:
            raise RejectedError(
                RejectionKind.INVALID_REQUEST, f"A request {request.key!r} is running already."
            )
        if isinstance(request.prompt, str):
            if not self._takes_raw_prompts:
                raise _raw_prompt_rejected()
        elif not self.settings.has_chat_template:
            raise RejectedError(
                RejectionKind.NO_CHAT_TEMPLATE, "This is a base model; send a raw prompt."
            )
        if time.monotonic() < self._paused_until:
            raise _too_busy()
        if len(self._waiting) + len(self._active) >= self.settings.slots + self._max_queued:
            raise RejectedError(
                RejectionKind.QUEUE_FULL, f"{self._max_queued} requests are waiting already."
            )
        stream = _Stream(
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
            stream.buffer.put(PromptProgress(0, self._estimated_prompt_tokens(stream.request)))
            stream.task = asyncio.create_task(
                self._run(stream), name=f"remote-{stream.request.key}"
            )
            # Not in `_run`: a task that is cancelled before its first step runs nothing at all.
            stream.task.add_done_callback(functools.partial(self._leave_after, stream))

    def _leave(self, stream: _Stream) -> None:
        if stream in self._active:
            self._account()
            self._active.remove(stream)
            if not self._is_closed:
                self._start_waiting()

    def _leave_after(self, stream: _Stream, _: "asyncio.Task[None]") -> None:
        self._leave(stream)

    async def _run(self, stream: _Stream) -> None:
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

    def _end(self, stream: _Stream, reason: StopReason) -> None:
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
            prompt_tokens = stream.prompt_tokens or self._estimated_prompt_tokens(stream.request)
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

    async def _tell_progress(self, stream: _Stream) -> None:
        """Show that a prompt is being read, or an answer thought about, until there is text."""
        total = self._estimated_prompt_tokens(stream.request)
        while not stream.has_shown_text:
            await asyncio.sleep(_PROGRESS_SECONDS)
            if not stream.has_shown_text:
                read = 0 if stream.answered_at is None else total
                stream.buffer.put(PromptProgress(read, total))

    # -- one answer -----------------------------------------------------------------------------

    async def _converse(self, stream: _Stream) -> StopReason:
        """Ask until the endpoint takes the request; nothing has been generated before."""
        while True:
            try:
                return await self._ask(stream)
            except _StaleConnectionError:
                stream.is_repeated = True
            except _ParameterRefused as refused:
                log.warning("remote.parameter_refused", parameter=str(refused))
            except RejectedError as error:
                shorter = self._shorter_limit(stream)
                if error.kind is not RejectionKind.CONTEXT_EXCEEDED or shorter is None:
                    raise
                stream.max_tokens = shorter
                stream.is_shortened = True

    async def _ask(self, stream: _Stream) -> StopReason:
        import httpx

        path = "/completions" if isinstance(stream.request.prompt, str) else "/chat/completions"
        begin = anyio.current_time()
        try:
            with anyio.CancelScope(deadline=begin + self.settings.first_token_seconds) as scope:
                async with self._http.stream(
                    "POST",
                    self._base_url + path,
                    content=self._body(stream),
                    headers={**self._headers(), "Content-Type": "application/json"},
                ) as response:
                    stream.has_response = True
                    if response.status_code != 200:
                        raise await self._refusal(response, stream)
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
        self, response: "httpx.Response", stream: _Stream, scope: anyio.CancelScope
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

    def _take(self, stream: _Stream, chunk: Json) -> None:
        """One event of an answer."""
        if chunk.get("error"):
            raise self._error_frame(stream, chunk["error"])
        usage = chunk.get("usage") or {}
        if positive_or_none(usage.get("prompt_tokens")) is not None:
            stream.prompt_tokens = usage["prompt_tokens"]
            stream.completion_tokens = positive_or_none(usage.get("completion_tokens")) or 0
        for choice in (chunk.get("choices") or ())[:1]:
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or ""
            # Thoughts are decoded like everything else, but they are not the answer.
            thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
            if text or thought:
                self._take_text(stream, text)
            reason = choice.get("finish_reason")
            if reason:
                stream.finish = _finish_reason(reason)

    def _take_text(self, stream: _Stream, text: str) -> None:
        if stream.answered_at is None:
            stream.answered_at = time.monotonic()
            read = stream.prompt_tokens or self._estimated_prompt_tokens(stream.request)
            self._put(stream, PromptProgress(read, read))
        stream.pieces += 1
        stream.untold_pieces += 1
        # The halves of a surrogate pair may come in two pieces, each escaped by itself (S10).
        whole = stream.joiner.decode(text.encode("utf-16-le", "surrogatepass"))
        self._show(stream, stream.text.feed(whole.encode("utf-8", "replace")))

    def _show(self, stream: _Stream, text: str) -> None:
        if text:
            stream.has_shown_text = True
            tokens, stream.untold_pieces = stream.untold_pieces, 0
            self._put(stream, TextChunk(text, tokens))

    def _put(self, stream: _Stream, event: GenerationEvent) -> None:
        if not stream.buffer.put(event):
            raise SlowReaderError

    def _finish(self, stream: _Stream) -> StopReason:
        """Why a stream that is over ended; never an invented stop (S5)."""
        if stream.text.is_stopped:
            return StopReason.STOP  # by a stop string that the server does not look for
        if stream.finish is None:
            if stream.answered_at is None and not self._fits(stream):
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
        self._show(stream, stream.text.finish())
        self._learn(stream)
        return stream.finish

    def _learn(self, stream: _Stream) -> None:
        """Keep what an answer tells about the endpoint's counting."""
        counts_pieces = stream.completion_tokens is None
        if counts_pieces and not self._counts_pieces:
            log.warning("remote.usage_absent", base_url=self._base_url)
        self._counts_pieces = counts_pieces

    def _body(self, stream: _Stream) -> bytes:
        prompt, sampling = stream.request.prompt, stream.request.sampling
        body: Json = {
            "model": self._model_name,
            "stream": True,
            "stream_options": {"include_usage": True},
            self._token_limit_name: stream.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
        }
        if isinstance(prompt, str):
            body["prompt"] = prompt
        else:
            body["messages"] = [{"role": m.role, "content": m.content} for m in prompt]
        if sampling.seed is not None:
            # OpenAI's seeds are signed; these are the same 64 bits.
            seed = sampling.seed
            body["seed"] = seed - 2**64 if seed >= 2**63 else seed
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        for name in self._omitted:
            body.pop(name, None)
        return json.dumps(body, ensure_ascii=False).encode("utf-8")

    def _estimated_prompt_tokens(self, request: GenerationRequest, caution: float = 1.0) -> int:
        """A prompt's tokens by its characters; with more caution rather more."""
        per_token = (self._characters_per_token or _DEFAULT_CHARACTERS_PER_TOKEN) / caution
        if isinstance(request.prompt, str):
            return max(1, math.ceil(len(request.prompt) / per_token))
        characters = sum(len(message.content) for message in request.prompt)
        extra = _TOKENS_PER_MESSAGE * len(request.prompt)
        return max(1, math.ceil(characters / per_token + extra * caution))

    def _fits(self, stream: _Stream) -> bool:
        """Whether a prompt and its longest answer fit the context, by a careful estimate."""
        if self._model is None:
            return True
        asked = self._estimated_prompt_tokens(stream.request, 1.25) + stream.max_tokens
        return asked <= self._model.context_tokens

    def _shorter_limit(self, stream: _Stream) -> int | None:
        """An answer length that leaves room for the prompt; None when there is none to try.

        vLLM and some clouds refuse a request whose prompt fits but whose longest possible answer
        does not; our contract says that such an answer ends at the end of the context.
        """
        if stream.is_shortened or self._model is None:
            return None
        room = self._model.context_tokens - self._estimated_prompt_tokens(stream.request, 1.25)
        return room if 0 < room < stream.max_tokens else None

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
        reading = max(finished.prefill_seconds, _LEAST_SECONDS)
        whole = max(reading + finished.decode_seconds, _LEAST_SECONDS)
        if not self._counts_pieces:
            self._characters_per_token = len(_TRIAL_TEXT) / max(finished.prompt_tokens, 1)
        tokens = finished.completion_tokens
        if tokens == 0:
            raise RemoteError(
                RemoteIssue.FAILED, f"{self._model_name} answered a trial request with nothing."
            )
        # The first token belongs to the prompt; an answer in one piece shows only the whole time.
        decode = (tokens - 1) / max(finished.decode_seconds, _LEAST_SECONDS)
        in_pieces = tokens > 1 and finished.decode_seconds > 0.05 * whole
        self._trial_rates = Rates(
            finished.prompt_tokens / reading, decode if in_pieces else tokens / whole
        )

    async def _trial(self, is_raw: bool) -> Finished | None:
        """The account of a trial request; None when the endpoint takes no such prompt."""
        prompt = _TRIAL_TEXT if is_raw else (Message("user", _TRIAL_TEXT),)
        request = GenerationRequest("trial", prompt, Sampling(_TRIAL_ANSWER_TOKENS, 0.0))
        try:
            async with contextlib.aclosing(self._generate(request)) as events:
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
            stream.buffer.fail(_too_busy())
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

    async def _refusal(
        self, response: "httpx.Response", stream: _Stream
    ) -> RemoteError | RejectedError | _ParameterRefused:
        """What a response that is no answer means."""
        status = response.status_code
        body = await read_body(response, _MAX_ERROR_BYTES)
        error = error_object(body)
        words = self._words(error.get("message"))
        code, kind = error.get("code"), error.get("type")
        is_raw = isinstance(stream.request.prompt, str)
        if status in (404, 405, 501) and is_raw and (not error or code == "not_found"):
            self._takes_raw_prompts = False
            return _raw_prompt_rejected()
        failure = endpoint_failure(
            status,
            code,
            f"{self._base_url}{words and ' says' + words}",
            self.settings.api_key_file or self.settings.api_key_env,
        )
        if failure is not None:
            return failure
        if status in (429, 503):
            pause = retry_after_seconds(response.headers.get("retry-after"))
            if status == 503 and pause is None:
                return RemoteError(
                    RemoteIssue.UNREACHABLE, f"{self._base_url} is not available now{words}."
                )
            if pause is not None:
                self._pause(min(pause, _LONGEST_PAUSE_SECONDS))
            return RejectedError(
                RejectionKind.QUEUE_FULL, f"The endpoint has too many requests{words}."
            )
        if status >= 500 or status == 408:
            return RemoteError(
                RemoteIssue.FAILED,
                f"The endpoint failed with HTTP status {status}{words}.",
                is_down=status in (502, 504),
            )
        if self._can_do_without(error.get("param"), code):
            return _ParameterRefused(error["param"])
        # vLLM has no code for it; by our own count the request does not fit then.
        is_unnamed = error.get("param") is None and code in (None, status)
        if {code, kind} & _CONTEXT_CODES or (is_unnamed and not self._fits(stream)):
            return RejectedError(
                RejectionKind.CONTEXT_EXCEEDED,
                f"The prompt and its answer do not fit the endpoint's context{words}.",
            )
        return RejectedError(
            RejectionKind.INVALID_REQUEST,
            f"The endpoint refuses the request with HTTP status {status}{words}."
            " (If a parameter is at fault, list it in omit_parameters.)",
        )

    def _error_frame(self, stream: _Stream, error: object) -> RemoteError | RejectedError:
        """What an error in the middle of a stream means."""
        about = error if isinstance(error, dict) else {"message": error}
        words = self._words(about.get("message"))
        if stream.answered_at is None:
            names = {str(about.get("code")), str(about.get("type"))}
            if names & _CONTEXT_CODES:
                return RejectedError(
                    RejectionKind.CONTEXT_EXCEEDED,
                    f"The prompt and its answer do not fit the endpoint's context{words}.",
                )
            if "rate_limit_error" in names:
                return RejectedError(
                    RejectionKind.QUEUE_FULL, f"The endpoint has too many requests{words}."
                )
            if "invalid_request_error" in names:
                return RejectedError(
                    RejectionKind.INVALID_REQUEST, f"The endpoint refuses the request{words}."
                )
        return RemoteError(
            RemoteIssue.FAILED,
            f"The endpoint ended the answer with an error{words}.",
            is_down=False,
        )

    def _can_do_without(self, parameter: object, code: object) -> bool:
        """Leave a parameter out from now on, if the server says that it does not know it."""
        if code not in _UNSUPPORTED_CODES or not isinstance(parameter, str):
            return False
        if parameter == "max_tokens" and self._token_limit_name == parameter:
            self._token_limit_name = "max_completion_tokens"
            return True
        if parameter not in _OPTIONAL_PARAMETERS - self._omitted:
            return False
        self._omitted.add(parameter)
        return True

    def _words(self, message: object) -> str:
        """What the endpoint said, fit to be shown: short, on one line, without our key (O5)."""
        if not isinstance(message, str) or not message.strip():
            return ""
        text = " ".join(message.split())
        with contextlib.suppress(RemoteError):
            key = self._headers().get("Authorization", "").removeprefix("Bearer ")
            if key:
                text = text.replace(key, "****")
        return f": {text[:_MAX_WORDS].rstrip('.')}"


class MeasuredView:
    """An engine whose speed bench.calibrate can measure, whatever prompts it takes.

    Raw prompts become chats where it takes no others, and progress with a prompt is left out,
    since it is an estimate.
    """

    def __init__(self, engine: OpenAiEngine) -> None:
        self._engine = engine

    async def load(self) -> LoadedModel:
        """Load the engine itself."""
        return await self._engine.load()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """Generate one answer; see `InferenceEngine.generate`."""
        prompt = request.prompt
        if isinstance(prompt, str) and not self._engine.takes_raw_prompts:
            prompt = (Message("user", prompt),)
        changed = GenerationRequest(request.key, prompt, request.sampling)
        async with contextlib.aclosing(self._engine.generate(changed)) as events:  # type: ignore[type-var]
            async for event in events:
                if not isinstance(event, PromptProgress):
                    yield event

    async def cancel(self, key: str) -> None:
        """End a generation early."""
        await self._engine.cancel(key)

    def stats(self) -> EngineStats:
        """Look at the engine itself."""
        return self._engine.stats()

    async def close(self) -> None:
        """Close the engine itself."""
        await self._engine.close()


def _finish_reason(reason: object) -> StopReason:
    found = _FINISH_REASONS.get(str(reason))
    if found is not None:
        return found
    if reason == "content_filter":
        raise RejectedError(
            RejectionKind.INVALID_REQUEST, "The endpoint's content filter ended the answer."
        )
    raise RemoteError(
        RemoteIssue.FAILED, f"The endpoint ended the answer with {reason!r}.", is_down=False
    )


def _raw_prompt_rejected() -> RejectedError:
    return RejectedError(
        RejectionKind.INVALID_REQUEST,
        "This endpoint takes chats only, for it has no /completions; send messages.",
    )


def _too_busy() -> RejectedError:
    return RejectedError(
        RejectionKind.QUEUE_FULL, "The endpoint asked to be left alone for a while."
    )


def _values(rates: Rates) -> tuple[float | None, ...]:
    return rates.prefill, rates.decode, rates.saturated_decode
