import asyncio
import os
import shutil
import time
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from edge_agent.config import ControllerSettings, ModelSettings, Settings
from edge_agent.doctor import examine, examine_devices, judge_build
from edge_agent.findings import Finding
from edge_agent.identity import is_loopback
from edge_agent.status import StatusServer
from tests.fixtures.sysfs.boards import orin_nano, write, x86_vm

pytestmark = pytest.mark.anyio

_Usage = namedtuple("_Usage", "total used free")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(node_id="pi", data_dir=tmp_path)


async def findings_of(settings: Settings, check: str) -> list[Finding]:
    return [finding for finding in await examine(settings) if finding.check == check]


async def finding_of(settings: Settings, check: str) -> Finding:
    (finding,) = await findings_of(settings, check)
    return finding


async def test_every_finding_that_is_not_ok_says_what_to_do(settings: Settings) -> None:
    findings = await examine(settings)
    assert {finding.check for finding in findings} == {
        "engine",
        "data_dir",
        "models",
        "memory",
        "devices",
        "sensors",
        "clock",
        "controller",
        "agent",
    }
    for finding in findings:
        assert finding.level in ("ok", "warning", "error")
        assert finding.text
        assert bool(finding.fix) == (finding.level != "ok")


async def test_clock_that_was_never_set_is_an_error(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 86_400.0)
    finding = await finding_of(settings, "clock")
    assert finding.level == "error"
    assert "not yet valid" in finding.text
    assert "set-ntp" in finding.fix


async def test_full_disk_is_a_warning(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(10, 9, 1))
    finding = await finding_of(settings, "data_dir")
    assert finding.level == "warning"
    assert "0.0 GB" in finding.text


async def test_data_directory_that_is_not_there_yet_is_judged_by_its_parent(
    settings: Settings, tmp_path: Path
) -> None:
    absent = replace(settings, data_dir=tmp_path / "not" / "yet")
    assert (await finding_of(absent, "data_dir")).level == "ok"
    assert not (tmp_path / "not").exists()


async def test_little_memory_is_a_warning(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = psutil.virtual_memory()._replace(available=100_000_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert (await finding_of(settings, "memory")).level == "warning"


async def test_model_that_is_not_here_or_not_known_is_told(settings: Settings) -> None:
    absent = replace(settings, models=(ModelSettings("smollm2-135m-instruct-q4_1"),))
    finding = await finding_of(absent, "models")
    assert finding.level == "warning"
    assert finding.fix == "edge-agent models pull smollm2-135m-instruct-q4_1"
    unknown = replace(settings, models=(ModelSettings("smollm2-135m-instruct-q4-1"),))
    finding = await finding_of(unknown, "models")
    assert finding.level == "error"
    assert "smollm2-135m-instruct-q4_1" in finding.text + finding.fix


async def test_controller_that_answers_is_ok(settings: Settings) -> None:
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1") as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        there = replace(settings, controller=ControllerSettings(address, insecure=True))
        assert (await finding_of(there, "controller")).level == "ok"
    away = await finding_of(there, "controller")
    assert away.level == "error"
    assert "edge-controller serve" in away.fix


def test_unencrypted_is_well_on_this_machine_only() -> None:
    assert all(is_loopback(host) for host in ("localhost", "127.0.0.1", "127.1.2.3", "::1"))
    assert not any(is_loopback(host) for host in ("", "controller.example", "10.0.0.127", "::"))


def test_cuda_build_with_virtual_memory_is_a_warning_on_a_jetson(tmp_path: Path) -> None:
    info = "CUDA : ARCHS = 870 | USE_GRAPHS = 1 | CPU : NEON = 1 | "
    (warning,) = judge_build("0.3", info, write(tmp_path / "jetson", orin_nano()))
    assert warning.level == "warning"
    assert "-DGGML_CUDA_NO_VMM=on" in warning.fix
    mended = info.replace("USE_GRAPHS", "NO_VMM = 1 | USE_GRAPHS")
    assert judge_build("0.3", mended, tmp_path / "jetson")[0].level == "ok"
    assert judge_build("0.3", info, write(tmp_path / "server", x86_vm()))[0].level == "ok"


@pytest.mark.parametrize("address", ["controller.example", "host:http", ":1", "host:99999"])
async def test_address_that_cannot_be_one_is_told_as_such(settings: Settings, address: str) -> None:
    wrong = replace(settings, controller=ControllerSettings(address))
    finding = await finding_of(wrong, "controller")
    assert finding.level == "error"
    assert "host:port" in finding.text


async def test_authority_file_that_is_not_there_is_told(settings: Settings) -> None:
    wrong = replace(settings, controller=ControllerSettings("127.0.0.1:1", ca_file="/no/ca.pem"))
    finding = await finding_of(wrong, "controller")
    assert finding.level == "error"
    assert "/no/ca.pem" in finding.text


async def test_running_agent_is_asked_and_its_issues_are_passed_on(settings: Settings) -> None:
    issues = ["model_file_missing: small", "power_sensor_unreadable: rapl: no; fix: chmod it"]
    status = {"state": "degraded", "issues": issues}
    server = StatusServer(settings.socket_path, lambda: status)
    await server.start()
    running, issue, sensor = await findings_of(settings, "agent")
    status["state"], status["issues"] = "ready", []
    ready = await finding_of(settings, "agent")
    await server.close()
    assert (running.level, running.text) == ("warning", "running, degraded")
    assert (issue.level, issue.text) == ("warning", "model_file_missing: small")
    assert "journalctl" in running.fix
    assert "journalctl" in issue.fix
    assert (sensor.text, sensor.fix) == ("power_sensor_unreadable: rapl: no", "chmod it")
    assert (ready.level, ready.text) == ("ok", "running, ready")


@pytest.mark.parametrize("failure", [OSError("the disk is gone"), KeyError("the disk is gone")])
async def test_check_that_fails_itself_stops_nothing(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def fail(_: object) -> None:
        raise failure

    monkeypatch.setattr(shutil, "disk_usage", fail)
    finding = await finding_of(settings, "data_dir")
    assert finding.level == "error"
    assert "the disk is gone" in finding.text
    assert (await finding_of(settings, "clock")).level == "ok"


def test_device_that_cannot_be_opened_names_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path / "dev" / "vcio"
    device.parent.mkdir()
    device.touch()
    (opened,) = examine_devices(tmp_path)
    assert (opened.level, opened.text) == ("ok", "vcio can be opened")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    (closed,) = examine_devices(tmp_path)
    assert closed.level == "warning"
    assert f"usermod -aG {device.group()} " in closed.fix
    (nothing,) = examine_devices(tmp_path / "dev")
    assert nothing.level == "ok"


async def test_model_for_which_the_disk_has_no_room_is_an_error(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(10**9, 0, 10**9))
    absent = replace(settings, models=(ModelSettings("smollm2-135m-instruct-q4_1"),))
    finding = await finding_of(absent, "models")
    assert finding.level == "error"
    assert "0.1 GB" in finding.text
    assert "models remove" in finding.fix
