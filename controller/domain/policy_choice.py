"""What decides batches, and whose choice that is."""

from dataclasses import dataclass

from controller.domain.batch import Weights


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """A policy's name, the objective's weights and its normalisation."""

    policy: str
    weights: Weights
    normalisation: str


@dataclass(frozen=True, slots=True)
class KeptChoice:
    """What an operator chose while serving.

    Attributes:
        configured: what the settings said then; the choice holds until they say something new.
    """

    choice: PolicyChoice
    configured: PolicyChoice
