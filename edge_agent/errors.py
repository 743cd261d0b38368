"""What can go wrong in the agent, and the exit code that each failure ends a command with.

AgentError                      1   shown as one sentence that says what to do
├── UsageError                  2   the command line or the settings are wrong
├── NotRunningError             3   no agent answers on the status socket
├── ModelError                  1   a model cannot be had or used
│   ├── UnknownModelError       2   no catalogue entry has this name
│   ├── SourcesFailedError      1   every source of a model failed; lists each with its reason
│   ├── MemoryBudgetError       1   it does not fit beside what is loaded; says the numbers
│   ├── ModelBusyError          1   its running answers did not end in time
│   ├── ModelFileError          1   wrong magic, size or checksum; unreadable or missing
│   └── CatalogError            2   the catalogue itself is wrong
└── EngineError                 1   a model's child process failed; `kind` classifies it
"""

import enum
from typing import ClassVar, Final

EXIT_READY: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_NOT_RUNNING: Final = 3
EXIT_NOT_READY: Final = 4


class AgentError(Exception):
    """A failure the operator is told about in one sentence."""

    exit_code: ClassVar[int] = EXIT_FAILED

    @property
    def issue_name(self) -> str:
        """The condition's name in `edge-agent status`, when it keeps a model from being loaded."""
        return "model_unavailable"


class UsageError(AgentError):
    """The command line or the settings are wrong."""

    exit_code = EXIT_USAGE


class NotRunningError(AgentError):
    """No agent answers on the status socket."""

    exit_code = EXIT_NOT_RUNNING


class ModelError(AgentError):
    """A model cannot be had or used."""


class UnknownModelError(ModelError):
    """No catalogue entry has this name."""

    exit_code = EXIT_USAGE


class SourcesFailedError(ModelError):
    """Every source of a model failed; the text lists each with its reason."""


class MemoryBudgetError(ModelError):
    """A model does not fit beside what is loaded; the text has the numbers."""

    @property
    def issue_name(self) -> str:
        """See `AgentError.issue_name`."""
        return "memory_budget"


class ModelBusyError(ModelError):
    """A model's running answers did not end in time."""


class ModelFileError(ModelError):
    """A model file is missing, unreadable, or not what its entry says."""


class CatalogError(ModelError):
    """The catalogue itself is wrong."""

    exit_code = EXIT_USAGE


class EngineFailure(enum.Enum):
    """Why a model's child process failed."""

    OUT_OF_MEMORY = "out_of_memory"
    GPU_MEMORY_FRAGMENTED = "gpu_memory_fragmented"
    BAD_MODEL_FILE = "bad_model_file"
    MISSING_FILE = "missing_file"
    UNSUPPORTED_ARCHITECTURE = "unsupported_architecture"
    ILLEGAL_INSTRUCTION = "illegal_instruction"
    LOAD_TIMEOUT = "load_timeout"
    STALLED = "stalled"
    CRASHED = "crashed"

    @property
    def is_want_of_memory(self) -> bool:
        """Whether trying the same again at once would only take memory from others again."""
        return self in (EngineFailure.OUT_OF_MEMORY, EngineFailure.GPU_MEMORY_FRAGMENTED)


class EngineError(AgentError):
    """A model's child process failed.

    Attributes:
        kind: what kind of failure it was.
        stderr_tail: the last lines that the child wrote, for the log.
    """

    def __init__(self, kind: EngineFailure, message: str, stderr_tail: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.stderr_tail = stderr_tail

    @property
    def issue_name(self) -> str:
        """See `AgentError.issue_name`."""
        if self.kind is EngineFailure.MISSING_FILE:
            return "model_file_missing"
        return str(self.kind.value)
