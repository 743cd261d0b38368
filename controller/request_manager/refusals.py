"""The error a client gets when no destination takes its request, with what refused each."""

from collections.abc import Iterable

import numpy as np

from controller.domain.batch import Placement
from controller.domain.cluster import ClusterSnapshot, Destination
from controller.domain.request import InferenceRequest
from controller.errors import (
    ConstraintsError,
    ContextExceededError,
    NoDestinationError,
    RouterError,
    UnknownModelError,
)
from controller.ids import ModelName
from controller.routing.answer_tokens import expected_answer_tokens
from controller.routing.formulation import TEMPLATE_TOKENS_PER_MESSAGE


def refusal_error(
    request: InferenceRequest, placement: Placement, snapshot: ClusterSnapshot
) -> RouterError:
    """Say what a client can do about it.

    In order of what helps most: a model nobody serves, a fleet with nobody in it, a prompt too long
    for every context, limits of the request's own, and nodes that are only busy or away.
    """
    if not snapshot.destinations:
        return NoDestinationError("No node with a loaded model is connected; start an agent.")
    candidates = [d for d in snapshot.destinations if request.model in (None, d.model)]
    if not candidates:
        return unknown_model_error(request.model, (d.model for d in snapshot.destinations))
    details = "; ".join(
        f"{other.node_id}/{other.model}: {other.refusal}"
        for other in placement.others
        if request.model in (None, other.model)
    )
    away = {node.node_id for node in snapshot.nodes if node.refusal is not None}
    present = [d for d in candidates if d.node_id not in away]
    if not present:
        return NoDestinationError(f"No node can take this request now ({details}).")
    if not any(_fits(request, destination) for destination in present):
        longest = max(present, key=lambda destination: destination.context_tokens)
        prompt, answer = _estimated_tokens(request, longest)
        return ContextExceededError(
            f"About {prompt:.0f} prompt and {answer:.0f} answer tokens fit in no context here (at "
            f"most {longest.context_tokens} tokens); shorten the prompt or lower max_tokens."
        )
    return ConstraintsError(f"Every destination was refused: {details}.")


def unknown_model_error(model: str | None, served: Iterable[ModelName]) -> UnknownModelError:
    """No node serves this model; lists those that are served."""
    names = ", ".join(sorted(set(served))) or "none"
    return UnknownModelError(f"No node serves model {model!r}. Served now: {names}.")


def _fits(request: InferenceRequest, destination: Destination) -> bool:
    return sum(_estimated_tokens(request, destination)) <= destination.context_tokens


def _estimated_tokens(request: InferenceRequest, destination: Destination) -> tuple[float, float]:
    """Tokens of prompt and answer, by the same estimate that routing uses."""
    turns = 0 if isinstance(request.prompt, str) else len(request.prompt)
    prompt = len(request.text) / destination.characters_per_token
    answer = expected_answer_tokens(np.array(float(request.sampling.max_tokens)))
    return max(1.0, prompt + TEMPLATE_TOKENS_PER_MESSAGE * turns), float(answer)
