"""What can be known to fail fails here, before a child is started."""

from collections.abc import Callable

from edge_agent.engine.base import EngineSettings
from edge_agent.engine.llama.memory_need import estimate_bytes
from edge_agent.engine.llama.model_files import ModelFile, describe_model_file
from edge_agent.errors import EngineError, EngineFailure, ModelFileError, UsageError
from edge_agent.limits import limit_problems


def check_settings(settings: EngineSettings) -> None:
    """Refuse what llama.cpp would fail on later, or worse.

    Raises:
        UsageError: a setting is out of its range.
    """
    problems = limit_problems(settings.slots, settings.context_tokens, 2)
    if problems:
        raise UsageError(f"{'; '.join(problems)}.")
    if settings.threads < 1:
        raise UsageError(f"threads must be at least 1, not {settings.threads}.")
    if not 0 < settings.cpu_share_ratio <= 1:
        raise UsageError(
            f"cpu_share_ratio must be above 0 and at most 1, not {settings.cpu_share_ratio}."
        )


def check_file(settings: EngineSettings, available: Callable[[], int]) -> ModelFile:
    """The model file's description; reads its header.

    Args:
        available: memory that a new process can have, bytes.

    Raises:
        EngineError: it is not there, is no model, or needs more memory than there is.
    """
    path = settings.model_path
    if not path.exists():
        raise EngineError(
            EngineFailure.MISSING_FILE, f"There is no file {path}; pull the model first."
        )
    try:
        file = describe_model_file(path)
    except ModelFileError as error:
        raise EngineError(EngineFailure.BAD_MODEL_FILE, str(error)) from error
    needed, free = estimate_bytes(file, settings), available()
    if settings.gpu_layers == 0 and needed > free:
        raise EngineError(
            EngineFailure.OUT_OF_MEMORY,
            f"{path.name} with {settings.slots} slots of {settings.context_tokens} tokens needs"
            f" about {needed >> 20} MiB of memory and {free >> 20} MiB are free; use fewer slots, a"
            " shorter context or a smaller quantisation.",
        )
    return file
