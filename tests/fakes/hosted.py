"""Models of a node as tests want them, without a host."""

from edge_agent.config import ModelSettings
from edge_agent.engine.base import InferenceEngine
from edge_agent.serving.hosted import HostedModel
from edge_agent.serving.lifecycle import Known, ModelLife, Ready, Residence, Stage, Unloaded

READY = Ready(Residence(0, 0.0))


def hosted_model(
    settings: ModelSettings,
    stage: Stage = Unloaded(),  # noqa: B008  # a value
    engine: InferenceEngine | None = None,
    known: Known = Known(),  # noqa: B008  # a value
    is_wanted: bool = True,
) -> HostedModel:
    """A model in this stage."""
    life = ModelLife(settings, is_wanted, settings.is_pinned, stage, known)
    return HostedModel(life, made=engine)
