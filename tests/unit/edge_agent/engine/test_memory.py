import os
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from edge_agent.engine.base import EngineSettings
from edge_agent.engine.memory import (
    available_bytes,
    estimate_bytes,
    largest_free_block_bytes,
    oom_kills,
)
from edge_agent.engine.model_files import ModelFile

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


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_control_group_limits_what_is_available(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup"
    write(group / "memory.max", "50000000\n")
    write(group / "memory.current", "30000000\n")
    write(group / "memory.stat", "anon 1\ninactive_file 5000000\nactive_file 7\n")
    assert available_bytes(tmp_path) == 25_000_000


@pytest.mark.parametrize("limit", ["max\n", "nonsense", None])
def test_without_a_limit_the_machine_counts(tmp_path: Path, limit: str | None) -> None:
    if limit is not None:
        write(tmp_path / "sys/fs/cgroup/memory.max", limit)
        write(tmp_path / "sys/fs/cgroup/memory.current", "1\n")
    total = psutil.virtual_memory().total
    assert total / 1000 < available_bytes(tmp_path) <= total


BUDDY_INFO = """\
Node 0, zone      DMA      0      0      0      0      0      0      0      0      0      0      0
Node 0, zone    DMA32     30      9     10      0      2      0      0      0      0      0      0
Node 0, zone   Normal   1792  12603      1      0      0      0      0      0      0      0      0
"""


def test_largest_free_block_is_the_largest_of_any_zone(tmp_path: Path) -> None:
    """P14."""
    assert largest_free_block_bytes(tmp_path) is None
    write(tmp_path / "proc/buddyinfo", BUDDY_INFO)
    assert largest_free_block_bytes(tmp_path) == 16 * os.sysconf("SC_PAGE_SIZE")
    write(tmp_path / "proc/buddyinfo", "Node 0, zone   Normal      0      0\n")
    assert largest_free_block_bytes(tmp_path) is None
    write(tmp_path / "proc/buddyinfo", "nonsense\n")
    assert largest_free_block_bytes(tmp_path) is None


def test_kills_are_counted_where_the_kernel_tells(tmp_path: Path) -> None:
    """P13."""
    assert oom_kills(tmp_path) is None
    write(tmp_path / "proc/vmstat", "nr_free_pages 5\noom_kill 3\n")
    assert oom_kills(tmp_path) == 3
    write(tmp_path / "sys/fs/cgroup/memory.events", "oom 9\noom_kill 2\noom_group_kill 0\n")
    assert oom_kills(tmp_path) == 5
