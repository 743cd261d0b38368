"""What an operator has a node do with its models, and how that goes."""

import enum
from dataclasses import dataclass

from controller.ids import ModelName


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
    model: ModelName
    slots: int | None = None
    context_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class MeasureSpeed:
    """Measure speeds again; `model` None means every loaded model."""

    model: ModelName | None = None


Order = ManageModel | MeasureSpeed


class OrderPhase(enum.Enum):
    """Where an order is."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class OrderUpdate:
    """How an order goes; `progress_ratio` is 0 to 1, None when unknown."""

    order_id: str
    phase: OrderPhase
    message: str = ""
    progress_ratio: float | None = None

    @property
    def is_last(self) -> bool:
        """Whether nothing more will come."""
        return self.phase is not OrderPhase.RUNNING
