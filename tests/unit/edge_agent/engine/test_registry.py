"""How a model of the settings is run."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from edge_agent.config import ModelSettings
from edge_agent.engine.llama.spec import LlamaSpec, engine_settings
from edge_agent.engine.registry import check_limits, run_alike, spec_of
from edge_agent.engine.remote.settings import RemoteSettings
from edge_agent.engine.remote.spec import RemoteSpec
from edge_agent.engine.spec import PreparedModel
from edge_agent.errors import ModelError

PREPARED = PreparedModel(Path("m.gguf"), "digest", "llama", 0.1, "Q4_0", 8192, None)


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (4, 3)])
def test_one_core_stays_with_the_agent(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert engine_settings(ModelSettings("m"), PREPARED).threads == threads
    assert engine_settings(ModelSettings("m", threads=7), PREPARED).threads == 7


def test_order_that_no_engine_can_carry_out_is_refused_with_the_limits() -> None:
    check_limits(ModelSettings("m", slots=256, context_tokens=1 << 20))
    with pytest.raises(ModelError, match="slots must be 1 to 256, not 0"):
        check_limits(ModelSettings("m", slots=0))
    with pytest.raises(ModelError, match="context_tokens must be"):
        check_limits(ModelSettings("m", context_tokens=-1))


def test_price_or_pin_changes_nothing_of_how_a_model_is_run() -> None:
    model = ModelSettings("m")
    assert run_alike(model, replace(model, is_pinned=True, request_usd=1.0, load_at_start=False))
    assert not run_alike(model, replace(model, slots=1))


def test_model_is_run_by_the_engine_whose_section_it_has() -> None:
    section = RemoteSettings("http://gpu:8080/v1")
    assert spec_of(ModelSettings("m")) == LlamaSpec()
    assert spec_of(ModelSettings("m", remote=section)) == RemoteSpec(section)


def test_price_says_whether_a_remote_model_is_measured_so_it_is_asked_anew() -> None:
    model = ModelSettings("m", remote=RemoteSettings("http://gpu:8080/v1"))
    assert run_alike(model, replace(model))
    assert not run_alike(model, replace(model, request_usd=1.0))
    assert not run_alike(model, replace(model, remote=None))
