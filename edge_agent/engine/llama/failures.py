"""Why a model's child process failed, from how it ended and what it last wrote (pure)."""

import re
import signal
from typing import Final

from edge_agent.errors import EngineError, EngineFailure

_NVMAP: Final = re.compile(r"^NvMap\w*: .*error \d+", re.MULTILINE)
"""How a Jetson's memory driver refuses the GPU an allocation, straight to standard error."""


def classify_exit(
    status: int, stderr_tail: str, has_oom_kill: bool, largest_free_block_bytes: int | None = None
) -> EngineError:
    """Say why a child ended that was not asked to.

    Args:
        status: of the process; -N when signal N ended it.
        stderr_tail: its last words.
        has_oom_kill: whether the kernel killed something for want of memory meanwhile.
        largest_free_block_bytes: memory that the kernel has in one piece; None: it won't say.
    """
    if _NVMAP.search(stderr_tail):
        return _fragmented(stderr_tail, largest_free_block_bytes)
    lines = stderr_tail.splitlines()
    said = f" Its last words: {lines[-1].strip()}" if lines else ""
    if (status == -signal.SIGKILL and has_oom_kill) or "std::bad_alloc" in stderr_tail:
        return EngineError(
            EngineFailure.OUT_OF_MEMORY,
            "The engine ran out of memory; use fewer slots, a shorter context or a smaller"
            " quantisation.",
            stderr_tail,
        )
    if status == -signal.SIGILL:
        return EngineError(
            EngineFailure.ILLEGAL_INSTRUCTION,
            "The engine was built for a newer processor than this one; rebuild llama-cpp-python"
            " on this machine.",
            stderr_tail,
        )
    if status < 0:
        return EngineError(
            EngineFailure.CRASHED, f"The engine was killed by signal {-status}.{said}", stderr_tail
        )
    return EngineError(
        EngineFailure.CRASHED, f"The engine ended with status {status}.{said}", stderr_tail
    )


def classify_refusal(
    kind: EngineFailure,
    message: str,
    stderr_tail: str,
    largest_free_block_bytes: int | None = None,
) -> EngineError:
    """Say why a child could not load its model.

    Args:
        kind, message: what the child makes of it; what a driver wrote past it goes before.
        stderr_tail, largest_free_block_bytes: as for `classify_exit`.
    """
    if _NVMAP.search(stderr_tail):
        return _fragmented(stderr_tail, largest_free_block_bytes)
    return EngineError(kind, message, stderr_tail)


def _fragmented(stderr_tail: str, largest_free_block_bytes: int | None) -> EngineError:
    """A Jetson whose memory has no large enough pieces left, often until it is rebooted."""
    largest = (
        ""
        if largest_free_block_bytes is None
        else f"; the largest free block is {largest_free_block_bytes / 2**20:.3g} MiB"
    )
    return EngineError(
        EngineFailure.GPU_MEMORY_FRAGMENTED,
        f"The board's driver (NvMap) refused the GPU memory, which is short or fragmented{largest}."
        " As root: sync; echo 3 > /proc/sys/vm/drop_caches; echo 1 > /proc/sys/vm/compact_memory."
        " If it comes back, reboot the board.",
        stderr_tail,
    )
