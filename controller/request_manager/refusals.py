"""What clients read when destinations refuse a request."""

from collections.abc import Iterable, Mapping
from typing import Final

from controller.domain.batch import Candidate, Placement
from controller.domain.refusal import Refusal, RefusalReason
from controller.domain.request import InferenceRequest
from controller.errors import (
    ConstraintsError,
    ContextExceededError,
    NoDestinationError,
    RouterError,
    UnknownModelError,
)
from controller.ids import ModelName

_SENTENCES: Final[Mapping[RefusalReason, str]] = {
    RefusalReason.NODE_UNAVAILABLE: "{0}",
    RefusalReason.OTHER_MODEL: "serves {0}, not {1}",
    RefusalReason.CONTEXT_TOO_SMALL: (
        "about {0:.0f} prompt and {1:.0f} answer tokens exceed the context of {2:.0f}"
    ),
    RefusalReason.NO_CHAT_TEMPLATE: "the model has no chat template; send a raw prompt",
    RefusalReason.QUALITY_TOO_LOW: "predicted quality {0:.3f} is below {1}",
    RefusalReason.DEADLINE_TOO_SOON: "would finish after {0:.3g} s, later than {1:g} s",
    RefusalReason.PRICE_TOO_HIGH: "costs about {0:.3g} USD, above {1:g}",
    RefusalReason.NOT_ON_EDGE: "the node is in the cloud; the request must stay on the edge",
    RefusalReason.NO_RAW_PROMPTS: "the model takes no raw prompts; send a chat",
    RefusalReason.NO_RESPONSE_FORMAT: "the model's engine cannot keep a response format",
    RefusalReason.OTHER_NODE: "is not on {0}, the only node that was allowed",
    RefusalReason.FAILED_BEFORE: "has failed this request before",
    RefusalReason.AS_KEPT: "{0}",
}


def refusal_sentence(refusal: Refusal) -> str:
    """One reason in words, with its figures."""
    return _SENTENCES[refusal.reason].format(*refusal.figures)


def refusal_text(candidate: Candidate) -> str:
    """Every reason in words; empty when the destination could take the request."""
    return "; ".join(refusal_sentence(refusal) for refusal in candidate.refusals)


def refusal_error(
    request: InferenceRequest, placement: Placement, served: Iterable[ModelName]
) -> RouterError:
    """The error of a request that no destination takes, by the reasons that its decision had.

    In order of what helps most: a model nobody serves, nodes that are only busy or away, a prompt
    too long for every context, and limits of the request's own.

    Args:
        request: whose decision it was.
        placement: without a chosen destination.
        served: models of the fleet, to choose from.
    """
    candidates = [c for c in placement.others if RefusalReason.OTHER_MODEL not in c.refused_by]
    if placement.others and not candidates:
        return unknown_model_error(request.model, served)
    details = "; ".join(f"{c.node_id}/{c.model}: {refusal_text(c)}" for c in candidates)
    present = [c for c in candidates if RefusalReason.NODE_UNAVAILABLE not in c.refused_by]
    if not present:
        return NoDestinationError(f"No node can take this request now ({details}).")
    if all(RefusalReason.CONTEXT_TOO_SMALL in c.refused_by for c in present):
        prompt, answer, context = max(
            (_context_figures(candidate) for candidate in present), key=lambda figures: figures[2]
        )
        return ContextExceededError(
            f"About {prompt:.0f} prompt and {answer:.0f} answer tokens fit in no context here (at "
            f"most {context:.0f} tokens); shorten the prompt or lower max_tokens."
        )
    return ConstraintsError(f"Every destination was refused: {details}.")


def unknown_model_error(model: str | None, served: Iterable[ModelName]) -> UnknownModelError:
    """No node serves this model; lists those that are served."""
    names = ", ".join(sorted(set(served))) or "none"
    return UnknownModelError(f"No node serves model {model!r}. Served now: {names}.")


def _context_figures(candidate: Candidate) -> tuple[float, float, float]:
    """Tokens of prompt, answer and context, where the context is too small."""
    (refusal,) = (r for r in candidate.refusals if r.reason is RefusalReason.CONTEXT_TOO_SMALL)
    prompt, answer, context = (float(figure) for figure in refusal.figures)
    return prompt, answer, context
