"""Another process makes machine code, once; whatever becomes of it, the controller goes on."""

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from controller.request_manager import compilation
from controller.request_manager.compilation import compile_once

pytestmark = pytest.mark.anyio

PATIENCE_SECONDS = 30.0


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of code that is not kept yet."""
    mark = tmp_path / "for-this-machine" / "serving-policies"
    monkeypatch.setattr(compilation, "compiled_mark", lambda: mark)
    return mark


@pytest.fixture
def told(tmp_path: Path) -> Path:
    """Where the compiler that `compiler` makes tells its process's number."""
    return tmp_path / "told"


def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Path, then: str) -> None:
    """Have a script take the place of the Python that compiles."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\necho $$ "$@" > {told}.part && mv {told}.part {told}\n{then}\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


async def test_it_is_asked_for_what_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: Path, told: Path
) -> None:
    compiler(tmp_path, monkeypatch, told, "true")
    with capture_logs() as logs:
        await compile_once()
    assert told.read_text().split()[1:] == ["-m", "controller.routing.compile_policies"]
    assert [entry["event"] for entry in logs] == ["policies.compiling"]


async def test_nothing_is_started_when_the_code_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: Path, told: Path
) -> None:
    compiler(tmp_path, monkeypatch, told, "true")
    mark.parent.mkdir()
    mark.touch()
    await compile_once()
    assert not told.exists()


async def test_nothing_is_started_where_code_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Path
) -> None:
    compiler(tmp_path, monkeypatch, told, "true")
    monkeypatch.setattr(compilation, "compiled_mark", lambda: None)
    await compile_once()
    assert not told.exists()


async def test_log_says_why_it_failed_and_the_controller_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: Path, told: Path
) -> None:
    compiler(tmp_path, monkeypatch, told, "echo no room left >&2; exit 3")
    with capture_logs() as logs:
        await compile_once()
    assert logs[-1]["event"] == "policies.compile_failed"
    assert logs[-1]["reason"] == "no room left"


async def test_a_python_that_is_gone_is_no_reason_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))
    with capture_logs() as logs:
        await compile_once()
    assert "nowhere" in logs[-1]["reason"]


async def test_nobody_waits_for_a_compiler_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: Path, told: Path
) -> None:
    compiler(tmp_path, monkeypatch, told, "exec sleep 600")
    monkeypatch.setattr(compilation, "_COMPILE_SECONDS", 0.5)
    with capture_logs() as logs:
        await asyncio.wait_for(compile_once(), PATIENCE_SECONDS)
    assert "no end after 0.5 s" in logs[-1]["reason"]
    assert has_ended(int(told.read_text().split()[0]))


async def test_it_ends_with_who_asked_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: Path, told: Path
) -> None:
    compiler(tmp_path, monkeypatch, told, "exec sleep 600")
    asking = asyncio.create_task(compile_once())
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not told.exists() and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert has_ended(int(told.read_text().split()[0]))


def has_ended(process: int) -> bool:
    """Whether there is no such process any more."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False
