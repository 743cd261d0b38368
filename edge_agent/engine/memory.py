"""Memory that this machine has for a child, and whether the kernel has had to kill for it."""

import os
import re
from pathlib import Path
from typing import Final

import psutil

_UNLIMITED_BYTES: Final = 1 << 60


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that a new process can have without pushing others out.

    The smaller of what the machine has and what this process's control group is allowed.
    """
    available = int(psutil.virtual_memory().available)
    group = root / "sys/fs/cgroup"
    limit = _number(group / "memory.max")
    used = _number(group / "memory.current")
    if limit is not None and used is not None and limit < _UNLIMITED_BYTES:
        # Cached file pages count as used but are given back under pressure.
        cached = _field(group / "memory.stat", "inactive_file") or 0
        available = min(available, max(0, limit - used + cached))
    return available


def oom_kills(root: Path = Path("/")) -> int | None:
    """Processes that the kernel has killed for want of memory since boot; None: it won't say."""
    counts = [
        _field(root / "proc/vmstat", "oom_kill"),
        _field(root / "sys/fs/cgroup/memory.events", "oom_kill"),
    ]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def largest_free_block_bytes(root: Path = Path("/")) -> int | None:
    """The largest piece of memory that is free without a gap; None: the kernel won't say."""
    try:
        lines = (root / "proc/buddyinfo").read_text().splitlines()
    except (OSError, ValueError):
        return None
    largest = -1
    for line in lines:  # "Node 0, zone   Normal    12    3    0": free blocks of 1, 2, 4 pages
        counts = line.partition("zone")[2].split()[1:]
        free = [order for order, count in enumerate(counts) if count.strip("0").isdigit()]
        largest = max(largest, *free, -1)
    return None if largest < 0 else os.sysconf("SC_PAGE_SIZE") << largest


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _field(path: Path, name: str) -> int | None:
    try:
        match = re.search(rf"^{name} (\d+)$", path.read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return None
    return int(match[1]) if match else None
