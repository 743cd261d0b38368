"""Trying out and measuring an OpenAI-compatible endpoint."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from edge_agent.engine.base import (
    EngineStats,
    Finished,
    GenerationEvent,
    GenerationRequest,
    LoadedModel,
    Message,
    PromptProgress,
    Sampling,
)
from edge_agent.engine.remote.settings import Rates

if TYPE_CHECKING:
    from edge_agent.engine.remote.engine import OpenAiEngine

_LEAST_SECONDS: Final = 1e-6
_TRIAL_ANSWER_TOKENS: Final = 32
TRIAL_TEXT: Final = (
    "The market opens at six, when the first boats come in. By eight the fish is sold, and the"
    " square belongs to bread, cheese, apples and whatever the season has to give. Old people"
    " come early because they sleep badly; young people come late because they sleep well. In"
    " winter a woman sells soup from a black pot, and in summer her son sells ice. Nobody has ever"
    " written down who may stand where, yet everybody knows. When it rains, the stalls move under"
    " the arcade of the town hall, and the clerks upstairs complain about the smell of onions. At"
    " noon the bell rings, the carts are loaded again, and a boy with a broom walks from one end of"
    " the square to the other. Tell me more about the people of this town."
)


def trial_request(is_raw: bool) -> GenerationRequest:
    """Some 160 prompt tokens, and at most 32 of an answer."""
    prompt = TRIAL_TEXT if is_raw else (Message("user", TRIAL_TEXT),)
    return GenerationRequest("trial", prompt, Sampling(_TRIAL_ANSWER_TOKENS, 0.0))


def trial_rates(finished: Finished) -> Rates:
    """What the account of a trial request tells of the speed; it has at least one token."""
    reading = max(finished.prefill_seconds, _LEAST_SECONDS)
    whole = max(reading + finished.decode_seconds, _LEAST_SECONDS)
    tokens = finished.completion_tokens
    # The first token belongs to the prompt; an answer in one piece shows only the whole time.
    decode = (tokens - 1) / max(finished.decode_seconds, _LEAST_SECONDS)
    in_pieces = tokens > 1 and finished.decode_seconds > 0.05 * whole
    return Rates(finished.prompt_tokens / reading, decode if in_pieces else tokens / whole)


class MeasuredView:
    """An engine whose speed bench.calibrate can measure, whatever prompts it takes.

    Raw prompts become chats where it takes no others, and progress with a prompt is left out,
    since it is an estimate.
    """

    def __init__(self, engine: "OpenAiEngine") -> None:
        self._engine = engine

    async def load(self) -> LoadedModel:
        """Load the engine itself."""
        return await self._engine.load()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """Generate one answer; see `InferenceEngine.generate`."""
        prompt = request.prompt
        if isinstance(prompt, str) and not self._engine.takes_raw_prompts:
            prompt = (Message("user", prompt),)
        changed = replace(request, prompt=prompt)
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
