import asyncio
import json
from pathlib import Path

import pytest

from edge_agent.bench_beside import run_beside
from edge_agent.engine.base import EngineSettings
from edge_agent.engine.fake import FakeEngine, FakeSpeeds
from edge_agent.errors import EngineError, UsageError

SETTINGS = EngineSettings(Path("fake.gguf"), context_tokens=512, slots=2, threads=3)


def make_engine(settings: EngineSettings) -> FakeEngine:
    return FakeEngine(
        settings, speeds=FakeSpeeds(decode_tokens_per_second=4000.0, prefill_tokens_per_second=1e6)
    )


def tool(tmp_path: Path, script: str) -> Path:
    path = tmp_path / "llama-batched-bench"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_the_tool_is_asked_for_the_same_and_compared(tmp_path: Path) -> None:
    line = json.dumps({"pl": 2, "speed_tg": 250.0})
    path = tool(tmp_path, f"echo \"$@\" >> {tmp_path}/asked; echo noise; echo '{line}'")
    report = asyncio.run(run_beside(SETTINGS, path, rounds=2, make_engine=make_engine))
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 2
    for option in ("-m fake.gguf", "-c 1024", "-t 3", "-npl 2", "-b 512"):
        assert option in asked[0]
    assert report.tool_tokens_per_second == 250.0
    assert report.decode_ratio == pytest.approx(report.tokens_per_second / 250.0, rel=0.5)
    assert len(report.rounds) == 2
    assert report.memory_ratio is None
    assert json.loads(json.dumps(report.as_dict()))["slots"] == 2


@pytest.mark.parametrize("script", ["echo no result", "echo broken >&2; exit 3"])
def test_a_tool_that_fails_is_named(tmp_path: Path, script: str) -> None:
    path = tool(tmp_path, script)
    with pytest.raises(EngineError, match="llama-batched-bench"):
        asyncio.run(run_beside(SETTINGS, path, rounds=1, make_engine=make_engine))


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    path = tool(tmp_path, "exit 0")
    short = EngineSettings(Path("fake.gguf"), context_tokens=64)
    for settings, program, rounds in (
        (SETTINGS, tmp_path / "none", 1),
        (SETTINGS, path, 0),
        (short, path, 1),
    ):
        with pytest.raises(UsageError):
            asyncio.run(run_beside(settings, program, rounds=rounds, make_engine=make_engine))
