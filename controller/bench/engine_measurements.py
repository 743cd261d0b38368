"""Measures the real engine on this machine under several limits, as if on unlike devices."""

import asyncio
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from controller.client import Connection, connected
from controller.demo.errors import DemoError
from controller.demo.processes import Processes, command_path
from pointsman.v1 import admin_pb2

MODELS: Final = (
    "smollm2-135m-instruct-q4_1",
    "smollm2-135m-instruct-q4_0",
    "smollm2-135m-instruct-q8_0",
    "gemma-3-270m-q4_k_m",
)
_CONTROLLER_SECONDS: Final = 300.0
_AGENT_SECONDS: Final = 900.0
_PROFILE_SECONDS: Final = 3600.0
_PULL_SECONDS: Final = 3600.0
_EXPORT_SECONDS: Final = 120.0


class EngineMeasurementsError(Exception):
    """The measurement could not be made; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What an agent may use of this machine: one class of devices.

    Attributes:
        name: of the node, and in its hardware's name.
        threads: of the engine.
        cpu_share_ratio: of these threads' time.
    """

    name: str
    threads: int
    cpu_share_ratio: float

    @property
    def hardware(self) -> str:
        """What the node says it is; the fitted latency predictor's kind of device."""
        share = f"{self.cpu_share_ratio:.0%} of {self.threads} threads"
        return f"{platform.machine()} host, {share}"


LIMITS: Final = (
    Limit("one-thread", 1, 1.0),
    Limit("two-threads", 2, 1.0),
    Limit("half-thread", 1, 0.5),
    Limit("quarter-thread", 1, 0.25),
)


async def measure_engine(
    out: Path,
    models_folder: Path,
    workloads: Sequence[str],
    *,
    sample: int = 10,
    max_tokens: int = 64,
    seed: int = 0,
    models: Sequence[str] = MODELS,
    limits: Sequence[Limit] = LIMITS,
    say: Callable[[str], None] = lambda _: None,
) -> list[Path]:
    """Folders of measurements, one for each limit and model, which `edge-controller fit` reads.

    One agent at a time runs all models, and one question at a time is asked, so that nothing but
    the machine's other work disturbs.

    Args:
        out: gets LIMIT/MODEL/measurements.csv, and logs; a run that was cut off goes on.
        models_folder: where model files are, or are put.
        workloads: question sets, as `edge-controller profile --workload` takes them.
        sample: questions of each workload.
        max_tokens: longest answer.
        seed: of the choice of questions.
        models: of the catalogue.
        limits: the device classes.
        say: told what is being done.

    Raises:
        EngineMeasurementsError: a model cannot be had, or a process failed.
    """
    for model in models:
        say(f"model {model}")
        await _run(
            [
                command_path("edge-agent"), "models", "pull", model,
                "--data-dir", str(models_folder.parent), "--json",
            ],
            _PULL_SECONDS,
        )  # fmt: skip
    found: list[Path] = []
    for limit in limits:
        processes = Processes(out / "logs" / limit.name)
        try:
            connection = await _start_controller(processes, out)
            await _start_agent(processes, connection, out, models_folder, limit, models, say)
            for model in models:
                folder = out / limit.name / model
                say(f"{limit.hardware}: {model}")
                resume = ["--resume"] if folder.exists() else []
                chosen = [part for name in workloads for part in ("--workload", name)]
                await _run(
                    [
                        command_path("edge-controller"), "profile", *chosen,
                        "--sample", str(sample), "--max-tokens", str(max_tokens), "--no-teach",
                        "--seed", str(seed),
                        "--model", model, "--out", str(folder), *resume,
                        "--controller", connection.address, "--ca-file", str(connection.ca_file),
                        "--json",
                    ],
                    _PROFILE_SECONDS,
                )  # fmt: skip
                await _run(
                    [
                        command_path("edge-controller"), "profile", "export", str(folder),
                        "--format", "csv",
                    ],
                    _EXPORT_SECONDS,
                )  # fmt: skip
                found.append(folder)
        except DemoError as error:
            raise EngineMeasurementsError(str(error)) from error
        finally:
            await asyncio.shield(processes.stop())
    return found


async def _run(arguments: Sequence[str], seconds: float) -> None:
    process = await asyncio.create_subprocess_exec(
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, complaint = await asyncio.wait_for(process.communicate(), seconds)
    except (asyncio.TimeoutError, asyncio.CancelledError):
        process.terminate()
        await process.wait()
        raise
    if process.returncode != 0:
        last = complaint.decode(errors="replace").strip().splitlines()[-5:]
        raise EngineMeasurementsError("\n".join([" ".join(arguments[:4]) + " failed:", *last]))


async def _start_controller(processes: Processes, out: Path) -> Connection:
    process = await processes.start(
        "controller",
        [
            command_path("edge-controller"), "serve", "--listen", "127.0.0.1:0",
            "--http-listen", "127.0.0.1:0", "--data-dir", str(out / "controller"),
        ],
        {"POINTSMAN_QUALITY_IS_ENABLED": "false"},
    )  # fmt: skip
    line = await processes.first_line("controller", process, _CONTROLLER_SECONDS)
    return Connection(line["listen"], False, Path(line["ca_file"]))


async def _start_agent(
    processes: Processes,
    connection: Connection,
    out: Path,
    models_folder: Path,
    limit: Limit,
    models: Sequence[str],
    say: Callable[[str], None],
) -> None:
    say(f"agent {limit.name}: {limit.hardware}")
    settings = out / f"{limit.name}.toml"
    settings.write_text(
        agent_settings(connection, out, models_folder, limit, models), encoding="utf-8"
    )
    await processes.start(
        limit.name, [command_path("edge-agent"), "run", "--config", str(settings)]
    )
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _AGENT_SECONDS
    async with connected(connection) as client:
        while loop.time() < deadline:
            try:
                listed = await client.admin.ListNodes(admin_pb2.ListNodesRequest(), timeout=10)
            except grpc.aio.AioRpcError as error:
                raise EngineMeasurementsError(error.details() or error.code().name) from error
            if any(node.node_id == limit.name and node.state == "ready" for node in listed.nodes):
                return
            ended = processes.ended()
            if ended is not None:
                raise EngineMeasurementsError(f"{ended} ended:\n{processes.failure_of(ended)}")
            await asyncio.sleep(0.2)
    raise EngineMeasurementsError(
        f"{limit.name} was not ready; see {processes.log_path(limit.name)}"
    )


def agent_settings(
    connection: Connection, out: Path, models_folder: Path, limit: Limit, models: Sequence[str]
) -> str:
    """The agent's TOML; JSON's strings are TOML's, too."""
    head = f"""\
node_id = {json.dumps(limit.name)}
hardware = {json.dumps(limit.hardware)}
data_dir = {json.dumps(str(out / "agents" / limit.name))}
models_dir = {json.dumps(str(models_folder))}

[controller]
address = {json.dumps(connection.address)}
ca_file = {json.dumps(str(connection.ca_file))}
"""
    blocks = [
        f"""
[[models]]
name = {json.dumps(model)}
slots = 1
threads = {limit.threads}
context_tokens = 2048
cpu_share_ratio = {limit.cpu_share_ratio}
"""
        for model in models
    ]
    return head + "".join(blocks)
