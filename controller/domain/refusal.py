"""Why a destination does not take a request: a closed set of reasons, with their figures."""

import enum
from dataclasses import dataclass


class RefusalReason(enum.Enum):
    """What refused a pair; the value is the name that logs and stored records use.

    Each is followed by the figures that come with it.
    """

    NODE_UNAVAILABLE = "node_unavailable"
    """Why the node takes no work, in its own words."""

    OTHER_MODEL = "other_model"
    """The model it serves; the model that was asked for."""

    CONTEXT_TOO_SMALL = "context_too_small"
    """Predicted tokens of the prompt and of the answer; tokens of the context."""

    NO_CHAT_TEMPLATE = "no_chat_template"
    """Nothing."""

    QUALITY_TOO_LOW = "quality_too_low"
    """The predicted quality ratio; the least that was asked for."""

    DEADLINE_TOO_SOON = "deadline_too_soon"
    """Seconds until the soonest finish; seconds that were allowed."""

    PRICE_TOO_HIGH = "price_too_high"
    """The predicted price in USD; the highest that was allowed."""

    NOT_ON_EDGE = "not_on_edge"
    """Nothing."""

    NO_RAW_PROMPTS = "no_raw_prompts"
    """Nothing."""

    NO_RESPONSE_FORMAT = "no_response_format"
    """Nothing."""

    OTHER_NODE = "other_node"
    """The only node that was allowed."""

    FAILED_BEFORE = "failed_before"
    """Nothing. The destination failed this request, and another can take it."""

    AS_KEPT = "as_kept"
    """The sentence that an earlier version of the controller stored instead of a reason."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """One reason, with the figures that `RefusalReason` lists for it."""

    reason: RefusalReason
    figures: tuple[float | str, ...] = ()
