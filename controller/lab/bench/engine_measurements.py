"""Measures the real engine on this machine under several limits, as if on unlike devices."""

import asyncio
import contextlib
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import grpc

from controller.client import Connection, connected
from controller.lab.demo.errors import DemoError
from controller.lab.demo.processes import Processes, command_path
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
        question_ratio: share of the questions that are asked under it, less where answers are slow.
    """

    name: str
    threads: int
    cpu_share_ratio: float
    question_ratio: float = 1.0

    @property
    def hardware(self) -> str:
        """What the node says it is; the fitted latency predictor's kind of device."""
        share = f"{self.cpu_share_ratio:.0%} of {self.threads} threads"
        return f"{platform.machine()} host, {share}"


LIMITS: Final = (
    Limit("one-thread", 1, 1.0),
    Limit("two-threads", 2, 1.0),
    Limit("half-thread", 1, 0.5, 1 / 3),
    Limit("quarter-thread", 1, 0.25, 1 / 6),
)


@dataclass(frozen=True, slots=True)
class MeasurementDesign:
    """What is measured; a folder goes on only with an equal one.

    Attributes:
        workloads: question sets, as `edge-controller lab profile run --workload` takes them.
        models: of the catalogue.
        limits: the device classes.
        sample: questions of each workload.
        max_tokens: longest answer.
        seed: of the choice of questions.
        limits_each: limits under which one model is asked one question, 1 to all. With fewer than
            all they are taken in turn, by question, model and limit, as in a Latin square: the same
            time buys more questions, and a model's answer to a question is as long on any device.
    """

    workloads: tuple[str, ...]
    models: tuple[str, ...] = MODELS
    limits: tuple[Limit, ...] = LIMITS
    sample: int = 10
    max_tokens: int = 64
    seed: int = 0
    limits_each: int = len(LIMITS)

    def __post_init__(self) -> None:
        if not 1 <= self.limits_each <= len(self.limits):
            raise EngineMeasurementsError(
                f"{self.limits_each} limits for each question; there are {len(self.limits)}"
            )

    def parts(self, limit: int, model: int) -> list[int]:
        """Which questions a model is asked under a limit: their number, modulo the limits."""
        count = len(self.limits)
        return [
            residue for residue in range(count)
            if (residue + limit + model) % count < self.limits_each
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class MeasurementProgress:
    """Folders of measurements that are whole, and how many there will be."""

    folders: list[Path]
    total: int

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to measure."""
        return len(self.folders) == self.total


async def measure_engine(
    out: Path,
    models_folder: Path,
    design: MeasurementDesign,
    *,
    catalog: Path | None = None,
    seconds: float | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> MeasurementProgress:
    """Measure what is not measured yet, for `edge-controller lab fit` to read.

    One agent at a time runs the models, and one question at a time is asked, so that nothing but
    the machine's other work disturbs.

    Args:
        out: gets LIMIT/MODEL/measurements.csv, and logs; a run that was cut off goes on.
        models_folder: where model files are, or are put.
        design: what is measured.
        catalog: models beyond those that the agent knows.
        seconds: stop after so long; None goes on to the end.
        say: told what is being done.

    Raises:
        EngineMeasurementsError: a model cannot be had, a process failed, or the folder was begun
            with another design.
    """
    _begin(out, design)
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(_measure(out, models_folder, design, catalog, say), seconds)
    whole = [folder for _, _, folder in _folders(out, design) if _is_whole(folder)]
    return MeasurementProgress(whole, len(design.limits) * len(design.models))


def _begin(out: Path, design: MeasurementDesign) -> None:
    """Write down what is measured, or check that it is what was begun here."""
    text = json.dumps(asdict(design), indent=1)
    path = out / "design.json"
    if not path.exists():
        path.write_text(text, encoding="utf-8")
    elif path.read_text(encoding="utf-8") != text:
        raise EngineMeasurementsError(
            f"{out} was begun with other questions, models, limits or settings ({path.name} in it "
            "has them); go on with the same, or take another folder"
        )


def _folders(out: Path, design: MeasurementDesign) -> Iterator[tuple[int, int, Path]]:
    """(limit, model, folder) of each part of the measurement."""
    for at, limit in enumerate(design.limits):
        for index, model in enumerate(design.models):
            yield at, index, out / limit.name / model


def _is_whole(folder: Path) -> bool:
    return (folder / "measurements.csv").exists()  # which is written last


async def _measure(
    out: Path,
    models_folder: Path,
    design: MeasurementDesign,
    catalog: Path | None,
    say: Callable[[str], None],
) -> None:
    left = [part for part in _folders(out, design) if not _is_whole(part[2])]
    puller = out / "puller.toml"
    puller.write_text(_agent_head(out / "agents" / "puller", models_folder, catalog), "utf-8")
    for model in sorted({index for _, index, _ in left}):
        say(f"model {design.models[model]}")
        await _run(
            [
                command_path("edge-agent"), "models", "pull", design.models[model],
                "--config", str(puller), "--json",
            ],
            _PULL_SECONDS,
        )  # fmt: skip
    for at, limit in enumerate(design.limits):
        parts = [(index, folder) for place, index, folder in left if place == at]
        if not parts:
            continue
        models = [design.models[index] for index, _ in parts]
        processes = Processes(out / "logs" / limit.name)
        try:
            connection = await _start_controller(processes, out)
            settings = agent_settings(connection, out, models_folder, limit, models, catalog)
            await _start_agent(processes, connection, out, limit, settings, say)
            for index, folder in parts:
                say(f"{limit.hardware}: {design.models[index]}")
                await _profile(connection, folder, design, at, index)
        except DemoError as error:
            raise EngineMeasurementsError(str(error)) from error
        finally:
            await asyncio.shield(processes.stop())


async def _profile(
    connection: Connection, folder: Path, design: MeasurementDesign, limit: int, model: int
) -> None:
    resume = ["--resume"] if folder.exists() else []
    chosen = [word for name in design.workloads for word in ("--workload", name)]
    asked = max(1, round(design.sample * design.limits[limit].question_ratio))
    count = len(design.limits)
    parts = [
        word for part in design.parts(limit, model) for word in ("--part", f"{part + 1}/{count}")
    ]
    await _run(
        [
            command_path("edge-controller"), "profile", *chosen, *parts,
            "--sample", str(design.sample), "--limit", str(asked), "--seed", str(design.seed),
            "--max-tokens", str(design.max_tokens), "--no-teach",
            "--model", design.models[model], "--out", str(folder), *resume,
            "--controller", connection.address, "--ca-file", str(connection.ca_file), "--json",
        ],
        _PROFILE_SECONDS,
    )  # fmt: skip
    await _run(
        [
            command_path("edge-controller"), "profile", "export", str(folder), "--format", "csv",
        ],
        _EXPORT_SECONDS,
    )  # fmt: skip


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
    limit: Limit,
    settings: str,
    say: Callable[[str], None],
) -> None:
    say(f"agent {limit.name}: {limit.hardware}")
    path = out / f"{limit.name}.toml"
    path.write_text(settings, encoding="utf-8")
    await processes.start(limit.name, [command_path("edge-agent"), "run", "--config", str(path)])
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
    connection: Connection,
    out: Path,
    models_folder: Path,
    limit: Limit,
    models: Sequence[str],
    catalog: Path | None = None,
) -> str:
    """The agent's TOML; JSON's strings are TOML's, too."""
    head = f"""\
node_id = {json.dumps(limit.name)}
hardware = {json.dumps(limit.hardware)}
{_agent_head(out / "agents" / limit.name, models_folder, catalog)}
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


def _agent_head(data_dir: Path, models_folder: Path, catalog: Path | None) -> str:
    own = "" if catalog is None else f"catalog_file = {json.dumps(str(catalog))}\n"
    return f"""\
data_dir = {json.dumps(str(data_dir))}
models_dir = {json.dumps(str(models_folder))}
{own}"""
