"""What an operator has a node do with its models, and how that goes."""

import enum
from dataclasses import dataclass

from controller.ids import ModelName
from pointsman.values import OrderPhase as OrderPhase
from pointsman.values import OrderUpdate as OrderUpdate


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
