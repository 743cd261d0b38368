"""The one small request by which an OpenAI-compatible endpoint is tried out."""

from typing import Final

from edge_agent.engine.base import Finished, GenerationRequest, Message, Rates, Sampling

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
