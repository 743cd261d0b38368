"""Ends of a child, by kind."""

import signal

import pytest

from edge_agent.engine.llama.failures import classify_exit, classify_refusal
from edge_agent.errors import EngineFailure

NVMAP = """\
load_tensors: offloaded 29/29 layers to GPU
NvMapMemAllocInternalTagged: 1075072515 error 12
NvMapMemHandleAlloc: error 0
ggml_backend_cuda_buffer_type_alloc_buffer: allocating 986.72 MiB on device 0: cudaMalloc failed"""


@pytest.mark.parametrize(
    ("status", "tail", "has_oom_kill", "kind"),
    [
        (-signal.SIGKILL, "", True, EngineFailure.OUT_OF_MEMORY),
        (-signal.SIGKILL, "", False, EngineFailure.CRASHED),
        (-signal.SIGABRT, "what():  std::bad_alloc", False, EngineFailure.OUT_OF_MEMORY),
        (-signal.SIGABRT, "GGML_ASSERT(n > 0) failed", True, EngineFailure.CRASHED),
        (-signal.SIGILL, "", False, EngineFailure.ILLEGAL_INSTRUCTION),
        (-signal.SIGSEGV, "", False, EngineFailure.CRASHED),
        (1, "RuntimeError: no", False, EngineFailure.CRASHED),
        (0, "", False, EngineFailure.CRASHED),
    ],
)
def test_the_end_of_a_child_is_classified(
    status: int, tail: str, has_oom_kill: bool, kind: EngineFailure
) -> None:
    """P9, P13."""
    error = classify_exit(status, tail, has_oom_kill)
    assert error.kind is kind
    assert error.stderr_tail == tail
    if kind is EngineFailure.CRASHED and tail:
        assert tail in str(error)


@pytest.mark.parametrize("largest", [4 << 20, None])
def test_refused_jetson_memory_says_what_to_drop_and_when_to_reboot(largest: int | None) -> None:
    """P14."""
    refused = classify_refusal(EngineFailure.CRASHED, "cannot load", NVMAP, largest)
    died = classify_exit(-signal.SIGABRT, NVMAP, False, largest)
    for error in (refused, died):
        assert error.kind is EngineFailure.GPU_MEMORY_FRAGMENTED
        assert error.stderr_tail == NVMAP
        assert "drop_caches" in str(error)
        assert "reboot" in str(error)
        assert ("largest free block is 4 MiB" in str(error)) is (largest is not None)


def test_what_the_child_makes_of_it_holds_where_no_driver_complains() -> None:
    error = classify_refusal(EngineFailure.UNSUPPORTED_ARCHITECTURE, "no such model", "words")
    assert error.kind is EngineFailure.UNSUPPORTED_ARCHITECTURE
    assert (str(error), error.stderr_tail) == ("no such model", "words")


@pytest.mark.parametrize("kind", EngineFailure)
def test_only_a_want_of_memory_has_to_wait_for_others(kind: EngineFailure) -> None:
    """P13, P14."""
    wanting = (EngineFailure.OUT_OF_MEMORY, EngineFailure.GPU_MEMORY_FRAGMENTED)
    assert kind.is_want_of_memory is (kind in wanting)
