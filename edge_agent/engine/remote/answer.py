"""One request to an OpenAI-compatible server, and what of its answer has come so far."""

import asyncio
import codecs
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from edge_agent.engine.answer_text import AnswerText
from edge_agent.engine.base import (
    GenerationEvent,
    GenerationRequest,
    PromptProgress,
    RejectedError,
    RejectionKind,
    SlowReaderError,
    StopReason,
    TextChunk,
)
from edge_agent.engine.remote.endpoint import RemoteError, RemoteIssue, positive_or_none
from edge_agent.engine.stream_buffer import StreamBuffer

_FINISH_REASONS: Final[Mapping[str, StopReason]] = {
    "stop": StopReason.STOP,
    "eos": StopReason.STOP,
    "eos_token": StopReason.STOP,
    "stop_sequence": StopReason.STOP,
    "end_turn": StopReason.STOP,
    "length": StopReason.LENGTH,
    "max_tokens": StopReason.LENGTH,
}


@dataclass(slots=True)
class RemoteAnswer:
    """A request under way; what a reader is shown goes into `buffer`.

    Attributes:
        max_tokens: asked for; shorter than the request's when the context would not hold it.
        is_repeated: sent again after a stale connection, which happens once.
        has_response: the server has answered with a status.
        prompt_tokens, completion_tokens: by the server's own count; None until it comes.
        pieces: of text or thought that came.
        work_seconds: its share of the time that requests were under way.
    """

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

    def take(self, chunk: Mapping[str, Any], estimated_prompt_tokens: int) -> None:
        """Take in one event of the answer that is no error.

        Raises:
            SlowReaderError: nobody has read for too long.
            RejectedError, RemoteError: it ended for a reason that is no end.
            ValueError, TypeError, KeyError, AttributeError: it is nonsense.
        """
        usage = chunk.get("usage") or {}
        if positive_or_none(usage.get("prompt_tokens")) is not None:
            self.prompt_tokens = usage["prompt_tokens"]
            self.completion_tokens = positive_or_none(usage.get("completion_tokens")) or 0
        for choice in (chunk.get("choices") or ())[:1]:
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or ""
            # Thoughts are decoded like everything else, but they are not the answer.
            thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
            if text or thought:
                self._take_text(text, estimated_prompt_tokens)
            reason = choice.get("finish_reason")
            if reason:
                self.finish = _finish_reason(reason)

    def close_text(self) -> None:
        """Show what was held back, once the answer has ended."""
        self._show(self.text.finish())

    def _take_text(self, text: str, estimated_prompt_tokens: int) -> None:
        if self.answered_at is None:
            self.answered_at = time.monotonic()
            read = self.prompt_tokens or estimated_prompt_tokens
            self._put(PromptProgress(read, read, is_estimate=True))
        self.pieces += 1
        self.untold_pieces += 1
        # The halves of a surrogate pair may come in two pieces, each escaped by itself.
        whole = self.joiner.decode(text.encode("utf-16-le", "surrogatepass"))
        self._show(self.text.feed(whole.encode("utf-8", "replace")))

    def _show(self, text: str) -> None:
        if text:
            self.has_shown_text = True
            tokens, self.untold_pieces = self.untold_pieces, 0
            self._put(TextChunk(text, tokens))

    def _put(self, event: GenerationEvent) -> None:
        if not self.buffer.put(event):
            raise SlowReaderError


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
