"""What a controller counts, for tests of how it is told."""

from typing import Any

from controller.api.service import Figures
from controller.storage.base import StoreState
from controller.telemetry.loop_lag import LoopLag


def figures_of(**known: Any) -> Figures:
    """Those of a controller that has just started, but for these."""
    fields: dict[str, Any] = {
        "nodes": (),
        "waiting_requests": 0,
        "running_requests": 0,
        "ended_requests": {},
        "decisions": {},
        "fallbacks": {},
        "events": {},
        "storage": StoreState(),
        "learning_waiting": 0,
        "learning_dropped": 0,
        "profiled_prompts": None,
        "loop_lag": LoopLag(),
        **known,
    }
    return Figures(**fields)
