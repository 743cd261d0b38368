"""How a model of the settings is run."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from edge_agent.config import ModelSettings
from edge_agent.errors import ModelError
from edge_agent.serving.engine_settings import check_limits, local_engine_settings, runs_alike
from edge_agent.serving.hosted import PreparedModel

PREPARED = PreparedModel(Path("m.gguf"), "digest", "llama", 0.1, "Q4_0", 8192, None)


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (4, 3)])
def test_one_core_stays_with_the_agent(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int
) -> None:
    """Case P3."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert local_engine_settings(ModelSettings("m"), PREPARED).threads == threads
    assert local_engine_settings(ModelSettings("m", threads=7), PREPARED).threads == 7


def test_order_that_no_engine_can_carry_out_is_refused_with_the_limits() -> None:
    check_limits(ModelSettings("m", slots=256, context_tokens=1 << 20))
    with pytest.raises(ModelError, match="slots must be 1 to 256, not 0"):
        check_limits(ModelSettings("m", slots=0))
    with pytest.raises(ModelError, match="context_tokens must be"):
        check_limits(ModelSettings("m", context_tokens=-1))


def test_price_or_pin_changes_nothing_of_how_a_model_is_run() -> None:
    model = ModelSettings("m")
    assert runs_alike(model, replace(model, is_pinned=True, request_usd=1.0, load_at_start=False))
    assert not runs_alike(model, replace(model, slots=1))
