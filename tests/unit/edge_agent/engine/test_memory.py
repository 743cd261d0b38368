import os
from pathlib import Path

import psutil
import pytest

from edge_agent.engine.memory import (
    available_bytes,
    largest_free_block_bytes,
    oom_kills,
)


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
