from dataclasses import replace
from pathlib import Path

from edge_agent.engine.base import EngineSettings
from edge_agent.engine.llama.memory_need import estimate_bytes
from edge_agent.engine.llama.model_files import ModelFile

MODEL = ModelFile(
    path=Path("m.gguf"),
    size_bytes=100_000_000,
    version=3,
    name=None,
    architecture="llama",
    size_label=None,
    quantisation="Q4_0",
    parameters=135_000_000,
    context_length=4096,
    block_count=30,
    embedding_length=576,
    vocabulary_size=49_152,
    kv_bytes_per_token=23_040,
    has_chat_template=True,
)


def settings(slots: int, context_tokens: int) -> EngineSettings:
    return EngineSettings(Path("m.gguf"), context_tokens=context_tokens, slots=slots)


def test_each_slot_needs_its_own_cache() -> None:
    one = estimate_bytes(MODEL, settings(1, 2048))
    two = estimate_bytes(MODEL, settings(2, 2048))
    assert two - one == 2048 * 23_040 + 49_152 * 16
    assert one > MODEL.size_bytes + 2048 * 23_040


def test_a_context_beyond_what_the_model_knows_costs_nothing() -> None:
    assert estimate_bytes(MODEL, settings(1, 8192)) == estimate_bytes(MODEL, settings(1, 4096))


def test_what_the_file_does_not_say_is_left_out() -> None:
    unknown = replace(MODEL, kv_bytes_per_token=None, vocabulary_size=None, context_length=None)
    assert estimate_bytes(unknown, settings(8, 8192)) >= MODEL.size_bytes
