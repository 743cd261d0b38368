"""How much memory a model will need in its child."""

from typing import Final

from edge_agent.engine.base import EngineSettings
from edge_agent.engine.llama.model_files import ModelFile

# Interpreter, llama.cpp and its scratch buffers for one batch; measured 130 to 190 MB on x86-64
# with models of 135M and 270M parameters.
_BASE_BYTES: Final = 150 << 20
# Logits of one output: a float for each token of the vocabulary, twice (raw and candidates).
_BYTES_PER_VOCABULARY_TOKEN: Final = 16


def estimate_bytes(model: ModelFile, settings: EngineSettings) -> int:
    """Memory that a child will need: weights, KV cache of every slot, and scratch.

    An estimate from above for most models: weights that are mapped from the disk can be dropped
    again, and layers with a sliding window need less cache.
    """
    context_tokens = settings.context_tokens
    if model.context_length is not None:
        context_tokens = min(context_tokens, model.context_length)
    cache = (model.kv_bytes_per_token or 0) * context_tokens * settings.slots
    logits = (model.vocabulary_size or 0) * _BYTES_PER_VOCABULARY_TOKEN * settings.slots
    return model.size_bytes + cache + logits + _BASE_BYTES
