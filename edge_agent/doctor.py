"""What `edge-agent doctor` checks, and the exact fix for what it finds."""

import asyncio
import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

from edge_agent.build_fit import compare_features, maps_gpu_memory_virtually
from edge_agent.config import Settings
from edge_agent.engine.memory import largest_free_block_bytes
from edge_agent.engine.registry import spec_of
from edge_agent.engine.spec import PreparedModel
from edge_agent.errors import AgentError, NotRunningError, UnknownModelError, UsageError
from edge_agent.findings import Finding
from edge_agent.identity import describe_host, is_loopback, user_name
from edge_agent.sensors.jetson import is_jetson
from edge_agent.sensors.sysfs import in_order
from edge_agent.status import ask_status
from edge_agent.tls_check import check_certificate

if TYPE_CHECKING:
    from edge_agent.models.catalog import Catalog
    from edge_agent.models.store import ModelStore

_EARLIEST_PLAUSIBLE_TIME: Final = 1_767_225_600  # 2026-01-01: older than this software
_DISK_RESERVE_BYTES: Final = 1_000_000_000
_CHECK_SECONDS: Final = 15.0
_REBUILD: Final = (
    "CMAKE_ARGS=-DGGML_NATIVE=on pip install --no-cache-dir --force-reinstall "
    "--no-binary llama-cpp-python llama-cpp-python, on this device"
)
_JETSON_REBUILD: Final = _REBUILD.replace(
    "-DGGML_NATIVE=on", "'-DGGML_CUDA=on -DGGML_CUDA_NO_VMM=on -DCMAKE_CUDA_ARCHITECTURES=87'"
)
_AGENT_FIX: Final = "edge-agent status, and its log: journalctl -u edge-agent"
_DEVICES: Final = (
    "dev/dri/renderD*",
    "dev/nvidia[0-9]*",
    "dev/nvmap",
    "dev/nvhost-gpu",
    "dev/vcio",
)
"""What GPUs and a Pi's firmware are reached by; each belongs to a group."""


async def examine(settings: Settings) -> list[Finding]:
    """Run every check; one that fails itself is reported as an error and stops nothing."""
    checks: tuple[tuple[str, Callable[[Settings], Awaitable[list[Finding]]]], ...] = (
        ("engine", _check_engine),
        ("data_dir", _check_data_dir),
        ("models", _check_models),
        ("memory", _check_memory),
        ("devices", _check_devices),
        ("sensors", _check_sensors),
        ("clock", _check_clock),
        ("controller", _check_controller),
        ("agent", _check_agent),
    )
    findings: list[Finding] = []
    for name, check in checks:
        try:
            findings += await asyncio.wait_for(check(settings), _CHECK_SECONDS)
        except asyncio.TimeoutError:
            findings.append(
                Finding(name, "error", f"the check took longer than {_CHECK_SECONDS:g} s")
            )
        except (OSError, AgentError) as error:
            findings.append(Finding(name, "error", str(error)))
        except Exception as error:  # the doctor must not die of what it looks for
            text = f"the check itself failed: {type(error).__name__}: {error}"
            findings.append(Finding(name, "error", text))
    return findings


async def _check_engine(settings: Settings) -> list[Finding]:
    if settings.models and not any(spec_of(model).uses_this_machine for model in settings.models):
        return [Finding("engine", "ok", "not needed: every model is remote")]
    # In a child: a build for another CPU dies with an illegal instruction, and the doctor must not.
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import llama_cpp; llama_cpp.llama_backend_init(); print(llama_cpp.__version__);"
        "print(llama_cpp.llama_print_system_info().decode())",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode == 0:
        version, _, system_info = out.decode(errors="replace").strip().partition("\n")
        return judge_build(version, system_info)
    if process.returncode == -4:  # SIGILL
        return [
            Finding(
                "engine",
                "error",
                "llama.cpp was built for a CPU with instructions that this one lacks",
                _REBUILD,
            )
        ]
    last = (err.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
    text = f"llama.cpp cannot be used: {last}"
    return [Finding("engine", "error", text, "pip install pointsman[agent]")]


def judge_build(version: str, system_info: str, root: Path = Path("/")) -> list[Finding]:
    """What the engine's build makes of this machine.

    A build for another processor may run for a while before it dies of it, and one with
    CUDA's virtual memory until the board's memory is short.

    Args:
        version: of llama-cpp-python.
        system_info: llama.cpp's line of features.
        root: of the file system that is read; tests give a captured tree.
    """
    try:
        cpuinfo = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        cpuinfo = ""
    if is_jetson(root) and maps_gpu_memory_virtually(system_info):
        text = "llama.cpp was built with CUDA's virtual memory, which fails early on a Jetson"
        return [Finding("engine", "warning", text, _JETSON_REBUILD)]
    fit = compare_features(system_info, cpuinfo)
    if fit.lacking:
        text = f"llama.cpp was built for a CPU with {', '.join(fit.lacking)}, which this one lacks"
        return [Finding("engine", "error", text, _REBUILD)]
    works = f"llama-cpp-python {version} works"
    if fit.unused:
        text = f"{works}, but slower than it need be: its build does not use"
        return [Finding("engine", "warning", f"{text} {', '.join(fit.unused)}", _REBUILD)]
    return [Finding("engine", "ok", f"{works}, and its build suits this CPU")]


async def _check_data_dir(settings: Settings) -> list[Finding]:
    folder = settings.data_dir
    existing = folder
    while not existing.exists():
        existing = existing.parent
    if not os.access(existing, os.W_OK):
        return [
            Finding(
                "data_dir",
                "error",
                f"{existing} cannot be written by this user",
                f"run as the agent's user, or: chown -R {user_name()} {existing}",
            )
        ]
    free = shutil.disk_usage(existing).free
    if free < _DISK_RESERVE_BYTES:
        return [
            Finding(
                "data_dir",
                "warning",
                f"only {free / 1e9:.1f} GB are free under {existing}",
                "remove models that are not used: edge-agent models list",
            )
        ]
    return [Finding("data_dir", "ok", f"{folder}: writable, {free / 1e9:.1f} GB free")]


async def _check_models(settings: Settings) -> list[Finding]:
    if not settings.models:
        return [
            Finding(
                "models",
                "warning",
                "the settings list no model",
                'add [[models]] with name = "..." (edge-agent models list)',
            )
        ]
    shelf = _CatalogueShelf(settings)
    found: list[Finding] = []
    for model in settings.models:
        try:
            found += await spec_of(model).examine(model, shelf)
        except AgentError as error:
            found.append(Finding("models", "error", str(error)))
    # What is here comes before what is elsewhere.
    return sorted(found, key=lambda finding: finding.check != "models")


class _CatalogueShelf:
    """The files of the catalogue's models on this machine; see `Shelf`. Read when asked for."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @functools.cached_property
    def _catalog(self) -> "Catalog":
        from edge_agent.models.catalog import load_catalog

        return load_catalog(user_path=self._settings.catalog_path)

    @functools.cached_property
    def _store(self) -> "ModelStore":
        from edge_agent.models.store import ModelStore

        return ModelStore(self._settings.models_path)

    def find(self, name: str) -> PreparedModel | None:
        from edge_agent.models.store import ModelPresence

        try:
            entry = self._catalog.get(name)
        except UnknownModelError:
            return None
        if self._store.state_of(entry).presence is not ModelPresence.INSTALLED:
            return None
        path = self._store.path_of(entry)
        return PreparedModel(path, "", "", 0.0, "", entry.context_tokens, None)

    def examine(self, name: str) -> list[Finding]:
        from edge_agent.models.store import ModelPresence

        entry = self._catalog.get(name)
        presence = self._store.state_of(entry).presence
        if presence is ModelPresence.INSTALLED:
            return [Finding("models", "ok", f"{name}: {self._store.path_of(entry)}")]
        free = _free_bytes(self._settings.models_path)
        if entry.size_bytes is not None and free - entry.size_bytes < _DISK_RESERVE_BYTES:
            text = (
                f"{name}: {presence.value}; it has {entry.size_bytes / 1e9:.1f} GB, "
                f"{free / 1e9:.1f} GB are free, and {_DISK_RESERVE_BYTES / 1e9:g} GB stay free"
            )
            fix = "edge-agent models remove NAME of one that is not used, or set models_dir"
            return [Finding("models", "error", text, fix)]
        text = f"{name}: {presence.value}; the agent will fetch it when it starts"
        return [Finding("models", "warning", text, f"edge-agent models pull {name}")]


def _free_bytes(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


async def _check_memory(settings: Settings) -> list[Finding]:
    memory = psutil.virtual_memory()
    text = f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB available"
    # Elsewhere the GPU takes no memory of the board, and this figure would only worry people.
    largest = largest_free_block_bytes() if is_jetson(Path("/")) else None
    if largest is not None:
        text += f", the largest free block has {largest / 2**20:.3g} MiB"
    if memory.available < 400_000_000:
        return [Finding("memory", "warning", text, "stop other programs, or serve a smaller model")]
    return [Finding("memory", "ok", text), *await asyncio.to_thread(_check_budget, settings)]


def _check_budget(settings: Settings) -> list[Finding]:
    """Whether the models that are here and loaded at start fit the memory budget together."""
    from edge_agent.engine.memory import available_bytes
    from edge_agent.serving.residency import budget_of

    shelf = _CatalogueShelf(settings)
    needs: dict[str, int] = {}
    for model in settings.models:
        prepared = shelf.find(model.name) if model.load_at_start else None
        # One that is not here has no header to read; `_check_models` says so.
        needed = None if prepared is None else spec_of(model).needed_bytes(model, prepared)
        if needed:
            needs[model.name] = needed
    if not needs:
        return []
    available = available_bytes()
    budget = budget_of(settings.memory, available, psutil.virtual_memory().total)
    listed = ", ".join(f"{name} {needed / 1e9:.1f} GB" for name, needed in needs.items())
    text = f"models need about {sum(needs.values()) / 1e9:.1f} of {budget / 1e9:.1f} GB: {listed}"
    if sum(needs.values()) <= budget:
        return [Finding("memory", "ok", text)]
    fix = "give them fewer slots or a shorter context, or load_at_start = false for some of them"
    return [Finding("memory", "warning", text, fix)]


async def _check_devices(settings: Settings) -> list[Finding]:
    return examine_devices(Path("/"))


def examine_devices(root: Path) -> list[Finding]:
    """Whether this user may open the device files of GPUs and firmware."""
    found = [path for pattern in _DEVICES for path in in_order(root, pattern)]
    closed = [path for path in found if not os.access(path, os.R_OK | os.W_OK)]
    if not closed:
        names = ", ".join(path.name for path in found)
        text = f"{names} can be opened" if found else "no device files of a GPU or of firmware"
        return [Finding("devices", "ok", text)]
    findings = []
    for path in closed:
        try:
            group = path.group()
        except (KeyError, OSError):
            group = "video"
        text = f"{path} cannot be opened by {user_name()}"
        fix = (
            f"usermod -aG {group} {user_name()}, and restart the agent; with the Ansible role set"
            f" edge_agent_supplementary_groups and edge_agent_devices; in a container pass {path}"
        )
        findings.append(Finding("devices", "warning", text, fix))
    return findings


async def _check_sensors(settings: Settings) -> list[Finding]:
    from edge_agent.sensors.diagnosis import examine_sensors
    from edge_agent.sensors.power_model import power_model
    from edge_agent.sensors.sources import power_sensors, surroundings

    host, power = describe_host(), settings.power
    model = power_model(host.hardware, host.cpu_cores, power.idle_watts, power.max_watts)
    sensors = power_sensors(surroundings(power.pmic_scale, power.pmic_offset_watts))
    found = await asyncio.to_thread(examine_sensors, sensors, model, user_name())
    return [Finding("sensors", entry.level, entry.text, entry.fix) for entry in found]


async def _check_clock(settings: Settings) -> list[Finding]:
    if time.time() < _EARLIEST_PLAUSIBLE_TIME:
        return [
            Finding(
                "clock",
                "error",
                f"the clock says {time.strftime('%Y-%m-%d')}; certificates will look not yet valid",
                "timedatectl set-ntp true, and wait for the time to be set",
            )
        ]
    return [Finding("clock", "ok", time.strftime("%Y-%m-%d %H:%M:%S %Z"))]


async def _check_controller(settings: Settings) -> list[Finding]:
    controller = settings.controller
    if not controller.address:
        return [
            Finding(
                "controller",
                "warning",
                "no controller address is set",
                "edge-agent run --controller HOST:PORT, or [controller] address = ...",
            )
        ]
    if controller.ca_file and not Path(controller.ca_file).expanduser().is_file():
        return [
            Finding(
                "controller",
                "error",
                f"{controller.ca_file} is not there",
                "copy ca.pem from the controller's data directory (tls/ca.pem)",
            )
        ]
    from edge_agent.link.session import check_address

    try:
        check_address(controller)
    except UsageError as error:
        fix = "edge-agent run --controller HOST:PORT, or [controller] address = ..."
        return [Finding("controller", "error", str(error), fix)]
    host, _, port = controller.address.rpartition(":")
    try:
        if not controller.insecure:
            answer = await check_certificate(controller, time.time())
            return [Finding("controller", answer.level, answer.text, answer.fix)]
        _, writer = await asyncio.wait_for(
            asyncio.open_connection(host.strip("[]"), int(port)), 5.0
        )
    except (OSError, asyncio.TimeoutError) as error:
        reason = "no answer" if isinstance(error, asyncio.TimeoutError) else str(error)
        return [
            Finding(
                "controller",
                "error",
                f"{controller.address} cannot be reached: {reason}",
                "is `edge-controller serve` running there, and does a firewall let its port pass?",
            )
        ]
    writer.close()
    text = f"{controller.address} answers, unencrypted"
    if is_loopback(host.strip("[]")):
        return [Finding("controller", "ok", text)]
    fix = "start the controller without --insecure, set [controller] ca_file, and insecure = false"
    return [Finding("controller", "warning", text, fix)]


async def _check_agent(settings: Settings) -> list[Finding]:
    try:
        status = await ask_status(settings.socket_path)
    except NotRunningError:
        return [Finding("agent", "warning", "the agent is not running", "edge-agent run")]
    text = f"running, {status['state']}"
    if status["state"] == "ready":
        found = [Finding("agent", "ok", text)]
    else:
        found = [Finding("agent", "warning", text, _AGENT_FIX)]
    for issue in status.get("issues", ()):
        told, _, fix = issue.partition("; fix: ")
        found.append(Finding("agent", "warning", told, fix or _AGENT_FIX))
    return found
