"""Engines of the registry, with llama.cpp's replaced by a fake."""

from collections.abc import Callable, Sequence

from edge_agent.engine.base import EngineSettings, InferenceEngine
from edge_agent.engine.fake import FakeEngine
from edge_agent.engine.llama.spec import LlamaSpec, estimate_by_header
from edge_agent.engine.registry import ENGINES, SpecOf


def engines_with(
    make_engine: Callable[[EngineSettings], InferenceEngine] = FakeEngine,
    estimate: Callable[[EngineSettings], int | None] = estimate_by_header,
) -> Sequence[SpecOf]:
    """Every engine that a model can have; a model of this node is run by what `make_engine` makes.

    Args:
        estimate: memory that such a model will need.
    """
    return (*ENGINES[:-1], lambda entry: LlamaSpec(make_engine, estimate))
