"""A deterministic engine for tests and demonstrations: no child, no weights, same contract.

A token is a word with the space after it. What is answered depends on the prompt and the seed
alone, never on what else the engine is doing.
"""

import asyncio
import collections
import hashlib
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from edge_agent.engine.answer_text import AnswerText
from edge_agent.engine.base import (
    EngineSettings,
    EngineStats,
    Finished,
    GenerationEvent,
    GenerationRequest,
    LoadedModel,
    Message,
    PrefixReuse,
    PromptProgress,
    RejectedError,
    RejectionKind,
    SlowReaderError,
    StopReason,
    TextChunk,
)
from edge_agent.engine.fake_json import fake_json
from edge_agent.engine.prefixes import common_prefix
from edge_agent.engine.stream_buffer import MAX_UNREAD_CHARACTERS, StreamBuffer
from edge_agent.engine.validation import check_request
from edge_agent.errors import EngineError, EngineFailure

_WORDS: Final = [
    "river",
    "stone",
    "lantern",
    "orchard",
    "seven",
    "quiet",
    "copper",
    "bridge",
    "evening",
    "sparrow",
    "ladder",
    "winter",
    "garden",
    "signal",
    "paper",
    "harbour",
    "mirror",
    "candle",
    "meadow",
    "thunder",
]
_TOKEN: Final = re.compile(r"\S+\s*|\s+")
_PREFILL_CHUNK_SECONDS: Final = 0.25
_KEPT_SESSIONS: Final = 64


@dataclass(frozen=True, slots=True)
class FakeSpeeds:
    """How fast a fake engine pretends to be; None does not wait at all.

    Attributes:
        prefill_tokens_per_second: prompt tokens a second, shared by the sequences that are active.
        decode_tokens_per_second: tokens a second of one sequence alone.
        saturated_decode_tokens_per_second: of all slots together; None: as
            `decode_tokens_per_second`.
        load_seconds: how long loading takes.
    """

    prefill_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    saturated_decode_tokens_per_second: float | None = None
    load_seconds: float = 0.0


def fake_answer(prompt: str, seed: int) -> str:
    """Some thirty words that depend on the prompt and the seed alone."""
    digest = hashlib.sha256(f"{seed}:{prompt}".encode()).digest()
    rng = random.Random(digest)
    words = " ".join(rng.choice(_WORDS) for _ in range(rng.randint(24, 40)))
    return f"Fake answer {digest.hex()[:8]}: {words}."


def count_fake_tokens(text: str) -> int:
    """Tokens of a text under the fake tokenizer."""
    return len(_TOKEN.findall(text))


@dataclass(slots=True)
class _Sequence:
    request: GenerationRequest
    text: str
    buffer: StreamBuffer
    submitted_at: float
    task: "asyncio.Task[None] | None" = None
    started_at: float | None = None
    answer_started_at: float | None = None
    completion_tokens: int = 0
    work_seconds: float = 0.0
    prefill_work_seconds: float = 0.0
    cached_tokens: int = 0


class FakeEngine:
    """An `InferenceEngine` that answers at once with made-up words.

    A session reuses what its turn before has read. JSON is made up too; a grammar is refused.

    Args:
        settings: `model_path` is never opened.
        speeds: how fast it pretends to be.
        answer: (prompt text, seed) -> what it will say; a chat's text is its turns, one a line.
        has_chat_template: False makes it refuse chats, unless the settings bring a template.
        load_failure: raised by each `load` while it is set.
        max_queued: requests that may wait for a slot.
        max_unread_characters: text that a reader may leave waiting before it is given up.
        sleep: awaited for every pretended wait.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        speeds: FakeSpeeds | None = None,
        answer: Callable[[str, int], str] = fake_answer,
        has_chat_template: bool = True,
        load_failure: EngineError | None = None,
        max_queued: int = 256,
        max_unread_characters: int = MAX_UNREAD_CHARACTERS,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.speeds = FakeSpeeds() if speeds is None else speeds
        self.load_failure = load_failure
        self._answer = answer
        self._has_chat_template = has_chat_template or settings.chat_template is not None
        self._max_queued = max_queued
        self._max_unread_characters = max_unread_characters
        self._sleep = sleep
        self._clock = clock
        self._sequences: dict[str, _Sequence] = {}
        self._ended: set[asyncio.Task[None]] = set()
        self._sessions: collections.OrderedDict[str, list[str]] = collections.OrderedDict()
        self._free_slots = asyncio.Semaphore(settings.slots)
        self._is_loaded = False
        self._is_closed = False
        self._failure: EngineError | None = None
        self._busy_seconds = 0.0

    async def load(self) -> LoadedModel:
        """Pretend to load; raises `load_failure` when there is one."""
        if self._is_closed:
            raise EngineError(EngineFailure.CRASHED, "The engine is closed; make a new one.")
        await self._sleep(self.speeds.load_seconds)
        if self.load_failure is not None:
            self._failure = self.load_failure
            raise self.load_failure
        self._is_loaded = True
        self._failure = None
        return LoadedModel(
            context_tokens=self.settings.context_tokens,
            slots=self.settings.slots,
            has_chat_template=self._has_chat_template,
            template_issue=None,
            description="fake",
            parameters=None,
            characters_per_token=6.0,
            engine_version="fake",
            resident_bytes=None,
            supports_response_format=True,
        )

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """Generate one made-up answer; see `InferenceEngine.generate`."""
        sequence = self._submit(request)
        try:
            while True:
                event = await sequence.buffer.get()
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            self._end(sequence, StopReason.CANCELLED)

    async def cancel(self, key: str) -> None:
        """End a generation early; unknown keys are ignored."""
        sequence = self._sequences.get(key)
        if sequence is not None:
            self._end(sequence, StopReason.CANCELLED)

    def stats(self) -> EngineStats:
        """Look at the engine."""
        busy = sum(s.started_at is not None for s in self._sequences.values())
        failure = self._failure
        return EngineStats(
            is_ready=self._is_loaded and not self._is_closed,
            slots=self.settings.slots,
            busy_slots=busy,
            queued_requests=len(self._sequences) - busy,
            busy_seconds_total=self._busy_seconds,
            resident_bytes=None,
            issue=None if failure is None else f"engine_{failure.kind.value}: {failure}",
            failure=None if failure is None else failure.kind,
        )

    async def close(self) -> None:
        """End the engine; running iterators end with EngineError."""
        self._is_closed = True
        self._end_all(EngineError(EngineFailure.CRASHED, "The engine was closed."))
        await asyncio.gather(*self._ended, return_exceptions=True)

    def fail(self, error: EngineError) -> None:
        """Act as if the child had died: iterators end with `error`, nothing new is taken."""
        self._is_loaded = False
        self._failure = error
        self._end_all(error)

    def recover(self) -> None:
        """Act as if the child had been restarted."""
        self._is_loaded = True
        self._failure = None

    def _submit(self, request: GenerationRequest) -> _Sequence:
        check_request(request)
        if self._is_closed or not self._is_loaded:
            raise EngineError(EngineFailure.CRASHED, "The model is not loaded; try again later.")
        if request.key in self._sequences:
            raise RejectedError(
                RejectionKind.INVALID_REQUEST, f"A request {request.key!r} is running already."
            )
        if not isinstance(request.prompt, str) and not self._has_chat_template:
            raise RejectedError(
                RejectionKind.NO_CHAT_TEMPLATE,
                "This model has no chat template; send a raw prompt.",
            )
        text = _prompt_text(request.prompt)
        if request.response_format is not None:
            fake_json(request.response_format, "")  # refuses what it cannot keep
        prompt_tokens = count_fake_tokens(text)
        if prompt_tokens >= self.settings.context_tokens:
            raise RejectedError(
                RejectionKind.CONTEXT_EXCEEDED,
                f"The prompt has {prompt_tokens} tokens; with its answer at most"
                f" {self.settings.context_tokens} fit.",
            )
        if len(self._sequences) >= self.settings.slots + self._max_queued:
            raise RejectedError(
                RejectionKind.QUEUE_FULL, f"{self._max_queued} requests are waiting already."
            )
        sequence = _Sequence(
            request, text, StreamBuffer(self._max_unread_characters), self._clock()
        )
        self._sequences[request.key] = sequence
        task = asyncio.create_task(self._run(sequence), name=f"fake-{request.key}")
        task.add_done_callback(self._ended.discard)
        self._ended.add(task)
        sequence.task = task
        return sequence

    async def _run(self, sequence: _Sequence) -> None:
        async with self._free_slots:
            try:
                sequence.started_at = self._clock()
                await self._read_prompt(sequence)
                sequence.answer_started_at = self._clock()
                reason = await self._decode(sequence)
            except SlowReaderError:
                reason = StopReason.CANCELLED
        self._end(sequence, reason)

    async def _read_prompt(self, sequence: _Sequence) -> None:
        tokens = _TOKEN.findall(sequence.text)
        total = len(tokens)
        sequence.cached_tokens = self._reuse(sequence.request.session_id, tokens)
        rate = self.speeds.prefill_tokens_per_second
        chunk = total if rate is None else max(1, int(rate * _PREFILL_CHUNK_SECONDS))
        done = sequence.cached_tokens
        while done < total:
            step = min(chunk, total - done)
            await self._work(sequence, 0.0 if rate is None else step / rate)
            done += step
            self._put(sequence, PromptProgress(done, total))

    def _reuse(self, session_id: str, tokens: list[str]) -> int:
        """Tokens of a prompt that the session has read already; at least one is left."""
        if not session_id or self.settings.prefix_reuse is PrefixReuse.OFF:
            return 0
        before = self._sessions.pop(session_id, [])
        self._sessions[session_id] = tokens
        if len(self._sessions) > _KEPT_SESSIONS:
            self._sessions.popitem(last=False)
        return min(common_prefix(before, tokens), len(tokens) - 1)

    async def _decode(self, sequence: _Sequence) -> StopReason:
        sampling = sequence.request.sampling
        seed = 0 if sampling.temperature == 0 else sampling.seed
        if seed is None:
            seed = random.SystemRandom().getrandbits(64)
        shown = AnswerText(sampling.stop)
        room = self.settings.context_tokens - count_fake_tokens(sequence.text)
        limit = min(sampling.max_tokens, room)
        unsent = 0
        answer = self._answer(sequence.text, seed)
        if sequence.request.response_format is not None:
            answer = fake_json(sequence.request.response_format, answer)
        for token in _TOKEN.findall(answer):
            if sequence.completion_tokens >= limit:
                self._put_text(sequence, shown.finish(), unsent)
                return StopReason.LENGTH
            rate = self._total_decode_rate()
            await self._work(sequence, 0.0 if rate is None else 1.0 / rate)
            sequence.completion_tokens += 1
            unsent += 1
            text = shown.feed(token.encode())
            if text:
                self._put_text(sequence, text, unsent)
                unsent = 0
            if shown.is_stopped:
                return StopReason.STOP
        self._put_text(sequence, shown.finish(), unsent)
        return StopReason.STOP

    def _total_decode_rate(self) -> float | None:
        """Tokens a second of all active sequences, between one alone and all slots busy."""
        alone = self.speeds.decode_tokens_per_second
        if alone is None:
            return None
        together = self.speeds.saturated_decode_tokens_per_second
        active = sum(s.started_at is not None for s in self._sequences.values())
        if together is None or self.settings.slots == 1:
            return alone
        return alone + (together - alone) * (active - 1) / (self.settings.slots - 1)

    async def _work(self, sequence: _Sequence, seconds: float) -> None:
        """Do `seconds` of the engine's work, which takes longer when it is shared."""
        active = sum(s.started_at is not None for s in self._sequences.values())
        await self._sleep(seconds * active)
        sequence.work_seconds += seconds
        if sequence.answer_started_at is None:
            sequence.prefill_work_seconds += seconds
        self._busy_seconds += seconds

    def _put_text(self, sequence: _Sequence, text: str, tokens: int) -> None:
        if text:
            self._put(sequence, TextChunk(text, tokens))

    def _put(self, sequence: _Sequence, event: GenerationEvent) -> None:
        if not sequence.buffer.put(event):
            raise SlowReaderError

    def _end_all(self, error: EngineError) -> None:
        for sequence in list(self._sequences.values()):
            sequence.buffer.fail(EngineError(error.kind, str(error), error.stderr_tail))
            self._end(sequence, StopReason.CANCELLED)

    def _end(self, sequence: _Sequence, reason: StopReason) -> None:
        """The only way out of the engine for a sequence; the second call does nothing."""
        if self._sequences.get(sequence.request.key) is not sequence:
            return
        del self._sequences[sequence.request.key]
        now = self._clock()
        started = now if sequence.started_at is None else sequence.started_at
        answered = now if sequence.answer_started_at is None else sequence.answer_started_at
        sequence.buffer.put(
            Finished(
                reason=reason,
                prompt_tokens=count_fake_tokens(sequence.text),
                completion_tokens=sequence.completion_tokens,
                queue_seconds=started - sequence.submitted_at,
                prefill_seconds=answered - started,
                decode_seconds=now - answered,
                work_seconds=sequence.work_seconds,
                cached_prompt_tokens=sequence.cached_tokens,
                prefill_work_seconds=sequence.prefill_work_seconds,
            )
        )
        if sequence.task is not None and sequence.task is not asyncio.current_task():
            sequence.task.cancel()


def _prompt_text(prompt: str | Sequence[Message]) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(message.content for message in prompt)
