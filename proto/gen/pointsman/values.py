"""Values that mean the same in both programs, in the words of the protocol."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


class FinishReason(enum.Enum):
    """How a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


class FailureKind(enum.Enum):
    """Why a node could not answer; `may_move` says which causes lie with the node."""

    MODEL_NOT_LOADED = "model_not_loaded"
    DRAINING = "draining"
    QUEUE_FULL = "queue_full"
    INVALID_REQUEST = "invalid_request"
    CONTEXT_EXCEEDED = "context_exceeded"
    ENGINE_CRASHED = "engine_crashed"
    TIME_LIMIT = "time_limit"
    INTERNAL = "internal"

    @property
    def may_move(self) -> bool:
        """Whether another node may succeed where this one failed."""
        return self in _MOVABLE


_MOVABLE = frozenset(
    {
        FailureKind.MODEL_NOT_LOADED,
        FailureKind.DRAINING,
        FailureKind.QUEUE_FULL,
        FailureKind.ENGINE_CRASHED,
    }
)


@dataclass(frozen=True, slots=True)
class Usage:
    """What one request cost, as its node measured it.

    Attributes:
        queue_seconds: from arrival at the node to the first prompt token decoded.
        energy_joules: None when the node can neither measure nor estimate them.
        energy_source: the sensor's name, "estimate" or "none".
        prefill_joules, decode_joules: how energy_joules splits; None when unknown.
        cached_prompt_tokens: of the prompt, held from an earlier turn and not read again.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    energy_joules: float | None = None
    energy_source: str = "none"
    prefill_joules: float | None = None
    decode_joules: float | None = None
    cached_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an answer is sampled; `SamplingParameters` in types.proto documents each field."""

    max_tokens: int = 256
    temperature: float = 0.7
    top_p: float = 0.95
    top_k: int = 40
    seed: int | None = None
    stop: tuple[str, ...] = ()


class FormatKind(enum.Enum):
    """What a `ResponseFormat` constrains an answer with."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """A constraint on the text itself, kept by the engine token by token.

    An answer that ends with STOP for its own end keeps the format; one that ends with LENGTH, or
    at a stop string, is the beginning of a text that would.

    Attributes:
        text: a JSON Schema as JSON text, or a grammar in llama.cpp's GBNF with a rule named
            root; "" for any JSON object.
    """

    kind: FormatKind
    text: str = ""


class ModelAction(enum.Enum):
    """What is done with a model."""

    LOAD = "load"
    UNLOAD = "unload"
    PIN = "pin"
    UNPIN = "unpin"


@dataclass(frozen=True, slots=True)
class ManageModel:
    """An action on one model; `slots` and `context_tokens` are for LOAD, None is the node's own."""

    action: ModelAction
    model: str
    slots: int | None = None
    context_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class MeasureSpeed:
    """Measure speeds again; `model` None means every loaded model."""

    model: str | None = None


Order = ManageModel | MeasureSpeed

ORDERS: Final[Mapping[str, type[Order]]] = {
    "model_order": ManageModel,
    "calibrate": MeasureSpeed,
}
"""By the field of ConnectResponse that carries it; a new one also needs the agent's `OrderDesk`."""


class OrderPhase(enum.Enum):
    """Where an order about a node's models is."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class OrderUpdate:
    """How an order goes.

    Attributes:
        message: what is being done, or why it failed, in words.
        progress_ratio: 0 to 1; None when nobody knows.
    """

    order_id: str
    phase: OrderPhase
    message: str = ""
    progress_ratio: float | None = None

    @property
    def is_last(self) -> bool:
        """Whether nothing more will come."""
        return self.phase is not OrderPhase.RUNNING
