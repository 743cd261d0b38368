"""The contract that every inference engine keeps.

One engine object is one loaded model. Its methods run on the agent's event loop and never
block it: the decoding happens in a child process or on another machine.
"""

import enum
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from edge_agent.errors import EngineFailure
from pointsman.values import FormatKind as FormatKind
from pointsman.values import ResponseFormat as ResponseFormat
from pointsman.values import Sampling as Sampling


class PrefixReuse(enum.Enum):
    """Whose keys and values a request may start from instead of reading its prompt again.

    What is reused is always what reading would have given, so it never shows in an answer; but a
    client can time its first token and so learn that somebody has sent the same text before.
    """

    OFF = "off"
    # Of a request with the same session_id, as far as the tokens are the same.
    SESSION = "session"
    # Of others too what comes before the first turn that is not the system's, all of it or
    # nothing, so that a system prompt cannot be guessed piece by piece.
    SYSTEM = "system"
    # Of any request, as far as the tokens are the same: for a device with one client.
    ANY = "any"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How one model is run.

    Attributes:
        model_path: the GGUF file.
        context_tokens: longest prompt plus answer of one sequence.
        slots: sequences decoded at once, at least 1.
        threads: decoding threads, at least 1.
        gpu_layers: layers offloaded; 0 on a CPU-only build.
        cpu_share_ratio: above 0, at most 1; below 1 the child rests between steps so that it uses
            this share of its threads' time and leaves the rest to whatever else the device does.
        chat_template: overrides the file's own template (Jinja); None uses the file's.
        load_deadline_seconds: None lets the engine scale one with the file's size.
        prefix_reuse: whose keys and values a request may start from.
    """

    model_path: Path
    context_tokens: int = 2048
    slots: int = 4
    threads: int = 1
    gpu_layers: int = 0
    cpu_share_ratio: float = 1.0
    chat_template: str | None = None
    load_deadline_seconds: float | None = None
    prefix_reuse: PrefixReuse = PrefixReuse.SYSTEM


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast a model is, tokens per second; None is not known.

    Attributes:
        prefill: prompt tokens read.
        decode: of one answer alone.
        saturated_decode: of all slots together.
    """

    prefill: float | None = None
    decode: float | None = None
    saturated_decode: float | None = None

    @property
    def are_complete(self) -> bool:
        """Whether nothing is left to be measured."""
        return None not in (self.prefill, self.decode, self.saturated_decode)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What the engine learned from the model it loaded.

    Attributes:
        context_tokens: per sequence, as it came out (at most what was asked).
        has_chat_template: False means that only raw prompts can be answered.
        template_issue: why the file's template cannot be used; None when it can or there is none.
        description: llama.cpp's own description, such as "llama 135M Q4_1".
        parameters: number of weights; None when the file does not say.
        characters_per_token: over a fixed English sample; for length estimates elsewhere.
        engine_version: such as "llama-cpp-python 0.3.36".
        resident_bytes: of the child after loading; None when unknown.
        supports_response_format: False refuses every request with a `response_format`.
        declared_rates: speeds that hold without being measured; when all of them are there,
            nothing may be sent to the model only to measure it.
    """

    context_tokens: int
    slots: int
    has_chat_template: bool
    template_issue: str | None
    description: str
    parameters: int | None
    characters_per_token: float | None
    engine_version: str
    resident_bytes: int | None
    supports_response_format: bool = False
    declared_rates: Rates = Rates()


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat; `role` is "system", "user" or "assistant"."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate.

    Attributes:
        key: unique among the requests that this engine has now.
        prompt: a raw prompt, or the turns of a chat to be rendered with the model's template.
            A chat's text is text: what looks like a marker of the template in it is none.
        response_format: what the answer must look like; None is free text.
        session_id: the same for the turns of one conversation, so that a turn can start from the
            one before (see `PrefixReuse`); "" is no conversation.
    """

    key: str
    prompt: str | Sequence[Message]
    sampling: Sampling = field(default_factory=Sampling)
    response_format: ResponseFormat | None = None
    session_id: str = ""


class StopReason(enum.Enum):
    """Why a generation ended well."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """The prompt is being read: sent at least once a second of prefill, never held back.

    `is_estimate` says that the engine cannot see how far the reading is.
    """

    tokens_read: int
    tokens_total: int
    is_estimate: bool = False


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Whole UTF-8 characters; `tokens` counts the tokens decoded since the last chunk."""

    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a generation that ended well. Seconds are by one monotonic clock.

    `prefill_seconds + decode_seconds` is the wall time the sequence was active, shared with
    others; `work_seconds` is its share of the engine's busy time, so that over all requests the
    work adds up to the busy time. `prefill_work_seconds` is the part of that share which the
    prompt took; None when the engine cannot tell. `cached_prompt_tokens` of the `prompt_tokens`
    were not read but reused from an earlier request.
    """

    reason: StopReason
    prompt_tokens: int
    completion_tokens: int
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    work_seconds: float
    cached_prompt_tokens: int = 0
    prefill_work_seconds: float | None = None


class RejectionKind(enum.Enum):
    """Why an engine would not start or could not end a generation."""

    CONTEXT_EXCEEDED = "context_exceeded"
    INVALID_REQUEST = "invalid_request"
    QUEUE_FULL = "queue_full"
    NO_CHAT_TEMPLATE = "no_chat_template"


class RejectedError(Exception):
    """A generation that was never started; nothing else is affected."""

    def __init__(self, kind: RejectionKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class SlowReaderError(Exception):
    """A generation that was cancelled because its reader left too much text unread."""


GenerationEvent = PromptProgress | TextChunk | Finished


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A look at the engine now; never waits for the child.

    `busy_seconds_total` is the time the child has spent decoding since it was loaded, and
    `failure` the kind of what is wrong with it, None while nothing is or nobody can tell.
    `takes_raw_prompts` is False for an engine that answers chats alone, as far as it is known.
    """

    is_ready: bool
    slots: int
    busy_slots: int
    queued_requests: int
    busy_seconds_total: float
    resident_bytes: int | None
    issue: str | None
    failure: EngineFailure | None = None
    takes_raw_prompts: bool = True


class InferenceEngine(Protocol):
    """One loaded model.

    Keeps: every `generate` iterator ends with exactly one `Finished` or one exception, also when
    the child dies; a slot is free within a second of a cancel; two iterators never see each
    other's text.
    """

    async def load(self) -> LoadedModel:
        """Start the child and load the model.

        Raises:
            EngineError: it failed; `kind` says how. The child is gone then.
        """
        ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """Generate one answer; closing the iterator cancels it.

        Nothing happens before the first event is asked for; what is raised is raised from there
        on. Events wait in a bounded buffer for a reader that is late.

        Raises:
            RejectedError: the request cannot be answered by this model.
            EngineError: there is no loaded child, or it died or stopped making progress meanwhile.
            SlowReaderError: the reader was so late that the buffer was full.
        """
        ...

    async def cancel(self, key: str) -> None:
        """End a generation early; its iterator ends with `Finished(CANCELLED)`. Unknown: no-op."""
        ...

    def stats(self) -> EngineStats:
        """Look at the engine without waiting for it."""
        ...

    async def close(self) -> None:
        """End the child and give its memory back; running iterators end with EngineError."""
        ...
