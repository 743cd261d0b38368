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
import os
import random
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Final

import structlog

from edge_agent.engine.answer_text import AnswerText
from edge_agent.engine.base import (
    EngineStats,
    Finished,
    GenerationEvent,
    GenerationRequest,
    LoadedModel,
    PromptProgress,
    Rates,
    RejectedError,
    RejectionKind,
    SlowReaderError,
    StopReason,
)
from edge_agent.engine.remote.answer import RemoteAnswer
from edge_agent.engine.remote.connection import OpenAiConnection
from edge_agent.engine.remote.endpoint import RemoteError, RemoteIssue
from edge_agent.engine.remote.refusals import NoCompletionsError, TooBusyError
from edge_agent.engine.remote.settings import DEFAULT_CONTEXT_TOKENS, OpenAiSettings
from edge_agent.engine.remote.trial import TRIAL_TEXT, trial_rates, trial_request
from edge_agent.engine.remote.watch import EndpointWatch
from edge_agent.engine.stream_buffer import MAX_UNREAD_CHARACTERS, StreamBuffer
from edge_agent.engine.validation import check_request
from edge_agent.errors import EngineError, EngineFailure

log = structlog.get_logger()

_PROGRESS_SECONDS: Final = 1.0


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
        stall_seconds: longest time between two pieces of an answer.
        first_retry_seconds: the pause before a failed endpoint is first asked whether it is back;
            each further one is twice as long.
        max_retry_seconds: the longest pause.
        max_unread_characters: text that a reader may leave waiting before it is given up.
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
        self._max_unread_characters = max_unread_characters
        self._connection = OpenAiConnection(settings, connect_seconds, stall_seconds, environ)
        self._writer = self._connection.writer
        self._watch = EndpointWatch(
            self._connection.base_url,
            self._connection.look,
            self._connection.authorization,
            first_retry_seconds,
            max_retry_seconds,
            rng or random.Random(),
        )
        self._model: LoadedModel | None = None
        self._trial_rates = Rates()
        self._paused_until = 0.0
        self._is_closed = False
        self._streams: dict[str, RemoteAnswer] = {}
        self._waiting: deque[RemoteAnswer] = deque()
        self._active: list[RemoteAnswer] = []
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
        if self._connection.is_open:
            raise EngineError(EngineFailure.CRASHED, "The endpoint is being tried out already.")
        await self._connection.open()
        is_loaded = False
        try:
            listing = await self._connection.look()
            self._writer.model, self._writer.server = listing.model, listing.server
            if not self.settings.declared.are_complete:
                await self._try_out()
            is_loaded = True
        except RemoteError as error:
            self._watch.failure = error
            raise
        finally:
            if not is_loaded:
                await self._connection.close()
        self._watch.failure = None
        self._model = LoadedModel(
            context_tokens=self.settings.context_tokens
            or listing.context_tokens
            or DEFAULT_CONTEXT_TOKENS,
            slots=self.settings.slots,
            has_chat_template=self.settings.has_chat_template,
            template_issue=None,
            description=f"{self._writer.model} at {self._connection.base_url}",
            parameters=None,
            characters_per_token=self._writer.characters_per_token,
            engine_version="openai-compatible",
            resident_bytes=None,
            supports_response_format=self.settings.supports_response_format,
            declared_rates=self._rates(),
        )
        self._writer.context_tokens = self._model.context_tokens
        return self._model

    def _rates(self) -> Rates:
        """The rates that hold without being measured; incomplete when the rest may be measured.

        What is declared goes before what the trial told. A saturated rate that nobody declared is
        the rate of one answer times the slots: whoever sells answers has many machines.
        """
        declared, trial = self.settings.declared, self._trial_rates
        prefill = declared.prefill or trial.prefill
        decode = declared.decode or trial.decode
        may_measure = self.settings.is_measured and not declared.are_complete
        if may_measure or prefill is None or decode is None:
            return declared
        saturated = declared.saturated_decode or decode * self.settings.slots
        return Rates(prefill, decode, max(decode, saturated))

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """Generate one answer; see `InferenceEngine.generate`."""
        if self._model is None or self._is_closed or self._watch.failure is not None:
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
        if self._watch.failure is not None:
            issue = f"{self._watch.failure.issue.value}: {self._watch.failure}"
        elif self._connection.counts_pieces:
            issue = (
                "remote_sends_no_usage: the endpoint does not count tokens, so each piece of its"
                " answers counts as one and prompts are estimated; prices and speeds are rough"
            )
        return EngineStats(
            is_ready=self._model is not None
            and self._watch.failure is None
            and not self._is_closed,
            slots=self.settings.slots,
            busy_slots=len(self._active),
            queued_requests=len(self._waiting),
            busy_seconds_total=self._busy_seconds,
            resident_bytes=None,
            issue=issue,
            failure=None if self._watch.failure is None else self._watch.failure.kind,
            takes_raw_prompts=self._connection.takes_raw_prompts,
        )

    async def close(self) -> None:
        """Leave the endpoint; running iterators end with EngineError."""
        self._is_closed = True
        await self._watch.close()
        for stream in list(self._streams.values()):
            stream.buffer.fail(EngineError(EngineFailure.CRASHED, "The engine was closed."))
            self._end(stream, StopReason.CANCELLED)
        tasks = [stream.task for stream in self._active if stream.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=2.0)
        await self._connection.close()

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
        if self._watch.failure is None:
            return EngineError(
                EngineFailure.CRASHED, "The endpoint was not found yet; try again later."
            )
        error = RemoteError(
            self._watch.failure.issue, f"The endpoint is away now: {self._watch.failure}"
        )
        error.kind = self._watch.failure.kind
        return error

    def _submit(self, request: GenerationRequest) -> RemoteAnswer:
        check_request(request)
        if request.key in self._streams:
            raise RejectedError(
                RejectionKind.INVALID_REQUEST, f"A request {request.key!r} is running already."
            )
        if isinstance(request.prompt, str):
            if not self._connection.takes_raw_prompts:
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
        stream = RemoteAnswer(
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
                PromptProgress(
                    0, self._writer.estimated_prompt_tokens(stream.request), is_estimate=True
                )
            )
            stream.task = asyncio.create_task(
                self._run(stream), name=f"remote-{stream.request.key}"
            )
            # Not in `_run`: a task that is cancelled before its first step runs nothing at all.
            stream.task.add_done_callback(functools.partial(self._leave_after, stream))

    def _leave(self, stream: RemoteAnswer) -> None:
        if stream in self._active:
            self._account()
            self._active.remove(stream)
            if not self._is_closed:
                self._start_waiting()

    def _leave_after(self, stream: RemoteAnswer, _: "asyncio.Task[None]") -> None:
        self._leave(stream)

    async def _run(self, stream: RemoteAnswer) -> None:
        """Have one request answered; its slot is free when this has ended."""
        ticker = asyncio.create_task(self._tell_progress(stream), name="remote-progress")
        reason = StopReason.CANCELLED
        try:
            reason = await self._connection.converse(stream)
            self._watch.answered()
        except SlowReaderError:
            pass  # the buffer has told its reader
        except RejectedError as error:
            if isinstance(error, TooBusyError) and error.pause_seconds is not None:
                self._pause(error.pause_seconds)
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

    def _end(self, stream: RemoteAnswer, reason: StopReason) -> None:
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
        """Split the time since the last look over the requests that were under way."""
        now = time.monotonic()
        if self._active:
            seconds = now - self._accounted_at
            self._busy_seconds += seconds
            for stream in self._active:
                stream.work_seconds += seconds / len(self._active)
        self._accounted_at = now

    async def _tell_progress(self, stream: RemoteAnswer) -> None:
        """Show that a prompt is being read, or an answer thought about, until there is text."""
        total = self._writer.estimated_prompt_tokens(stream.request)
        while not stream.has_shown_text:
            await asyncio.sleep(_PROGRESS_SECONDS)
            if not stream.has_shown_text:
                read = 0 if stream.answered_at is None else total
                stream.buffer.put(PromptProgress(read, total, is_estimate=True))

    # -- the endpoint ---------------------------------------------------------------------------

    async def _try_out(self) -> None:
        """Ask for one small answer."""
        finished = await self._trial(self._connection.takes_raw_prompts)
        if finished is None:
            finished = await self._trial(False)
        if finished is None:
            raise RemoteError(
                RemoteIssue.MISCONFIGURED,
                f"{self._connection.base_url} answers neither chats nor raw prompts.",
            )
        if not self._connection.counts_pieces:
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
            if is_raw and not self._connection.takes_raw_prompts:
                return None
            raise RemoteError(
                RemoteIssue.FAILED, f"The endpoint refuses a trial request: {error}"
            ) from error
        return None

    def _go_down(self, error: RemoteError) -> None:
        """The endpoint cannot be used now: what waits is given back, and it is watched."""
        if self._model is None or self._is_closed:
            return
        for stream in list(self._waiting):
            stream.buffer.fail(RemoteError(error.issue, f"The endpoint is away now: {error}"))
            self._end(stream, StopReason.CANCELLED)
        self._watch.went_down(error)

    def _pause(self, seconds: float) -> None:
        """Ask for nothing for a while; what waits here may be answered elsewhere meanwhile."""
        self._paused_until = time.monotonic() + seconds
        for stream in list(self._waiting):
            stream.buffer.fail(_left_alone())
            self._end(stream, StopReason.CANCELLED)


def _left_alone() -> RejectedError:
    return RejectedError(
        RejectionKind.QUEUE_FULL, "The endpoint asked to be left alone for a while."
    )
