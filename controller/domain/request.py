"""A request as the controller knows it."""

from dataclasses import dataclass, field

from controller.ids import ModelName, NodeId, RequestId
from pointsman.values import FormatKind as FormatKind
from pointsman.values import ResponseFormat as ResponseFormat
from pointsman.values import Sampling as Sampling


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn; `role` is "system", "user" or "assistant"."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Constraints:
    """Hard limits; None or False does not limit."""

    min_quality_ratio: float | None = None
    deadline_seconds: float | None = None
    max_price_usd: float | None = None
    edge_only: bool = False
    node_id: NodeId | None = None


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """One prompt to be answered, already validated.

    Attributes:
        model: the catalogue name asked for; None lets the router choose.
        prompt: a raw prompt, or the turns of a chat; never empty.
        response_format: None for free text.
        session_id: turns of one conversation share it; empty for none.
    """

    request_id: RequestId
    prompt: str | tuple[ChatMessage, ...]
    model: ModelName | None = None
    sampling: Sampling = field(default_factory=Sampling)
    constraints: Constraints = field(default_factory=Constraints)
    response_format: ResponseFormat | None = None
    session_id: str = ""

    @property
    def text(self) -> str:
        """Everything the model will read, without its template."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(message.content for message in self.prompt)

    @property
    def is_chat(self) -> bool:
        """Whether the request needs a model with a chat template."""
        return not isinstance(self.prompt, str)
