"""The demonstration: pull models, start a controller and three agents, route a batch, report."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from controller.client import Client, Connection, connected
from controller.lab.demo.errors import DemoError
from controller.lab.demo.processes import Processes, command_path
from controller.lab.demo.questions import QUESTIONS, DemoQuestion
from controller.lab.demo.results import Answer, BatchFigures, PolicyResult, to_json
from controller.lab.demo.tables import print_answers, print_summary
from pointsman.v1 import admin_pb2, fleet_pb2, router_pb2, types_pb2

DEFAULT_POLICIES: Final = ("memetic", "round-robin", "least-loaded")

_CONTROLLER_SECONDS: Final = 240.0
_AGENT_SECONDS: Final = 180.0
_ANSWER_SECONDS: Final = 120.0
_MAX_TOKENS: Final = 32
_SYSTEM: Final = "Answer the question in one short sentence."


@dataclass(frozen=True, slots=True)
class StandIn:
    """One agent whose limits stand in for a device.

    Attributes:
        cpu_share: of one thread's time; together they leave the machine's second core some air,
            so that the agents do not slow each other down and predictions mean something.
        idle_watts, max_watts: of the whole device; for the VM, of its part of a server.
        usd_per_million_tokens: what a rented machine's tokens cost; one's own boards cost none.
    """

    node_id: str
    kind: str
    hardware: str
    model: str
    slots: int
    cpu_share: float
    idle_watts: float
    max_watts: float
    usd_per_million_tokens: float = 0.0


FLEET: Final = (
    StandIn("pi", "edge", "stand-in for a Raspberry Pi 5", "smollm2-135m-instruct-q4_1",
            slots=2, cpu_share=0.3, idle_watts=3.0, max_watts=12.0),
    StandIn("jetson", "edge", "stand-in for a Jetson Orin Nano", "gemma-3-270m-q4_k_m",
            slots=4, cpu_share=0.5, idle_watts=5.0, max_watts=15.0),
    StandIn("vm", "cloud", "stand-in for a cloud VM", "smollm2-135m-instruct-q4_0",
            slots=8, cpu_share=0.8, idle_watts=10.0, max_watts=40.0,
            usd_per_million_tokens=0.05),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the command line asks for.

    Attributes:
        cache: where model files, calibrations and logs are kept between runs.
        learns: what the fleet answers teaches how later prompts are answered; of earlier runs it
            knows nothing.
    """

    cache: Path
    policies: tuple[str, ...] = DEFAULT_POLICIES
    stay: bool = False
    json_file: Path | None = None
    questions: Sequence[DemoQuestion] = field(default=QUESTIONS)
    learns: bool = False


async def run_demo(options: DemoOptions, console: Console) -> list[PolicyResult]:
    """Run it all; nothing is left behind, however it ends.

    Raises:
        DemoError: a part could not be started.
        asyncio.CancelledError: Ctrl-C.
    """
    async with running_fleet(options, console) as fleet:
        results = [
            await _ask_everything(fleet.client, fleet.processes, policy, options, console)
            for policy in options.policies
        ]
        print_answers(results, console)
        print_summary(results, console)
        if options.json_file is not None:
            _write_json(options.json_file, results)
        if options.stay:
            await _stay(fleet.processes, fleet.connection, console)
    return results


@dataclass(frozen=True, slots=True)
class DemoFleet:
    """A controller and its agents, running as processes of this machine."""

    client: Client
    processes: Processes
    connection: Connection


@contextlib.asynccontextmanager
async def running_fleet(options: DemoOptions, console: Console) -> AsyncIterator[DemoFleet]:
    """The demonstration's fleet with real models; stopped at the end, however that comes.

    Raises:
        DemoError: a part could not be started.
        asyncio.CancelledError: Ctrl-C.
    """
    folder = options.cache / "demo"
    if options.learns:
        shutil.rmtree(folder / "controller" / "quality", ignore_errors=True)
    processes = Processes(folder / "logs")
    with _stopped_by_signals():
        try:
            await _pull_models(options, console)
            connection = await _start_controller(processes, folder, options, console)
            async with connected(connection) as client:
                await _start_agents(processes, options, connection, client, console)
                yield DemoFleet(client, processes, connection)
        finally:
            stopping = asyncio.create_task(processes.stop())
            # Whoever read our output may have gone, which rich answers with SystemExit.
            with contextlib.suppress(OSError, SystemExit):
                console.print("Stopping everything ...", style="dim")
            await asyncio.shield(stopping)


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into the cancellation of this task."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _pull_models(options: DemoOptions, console: Console) -> None:
    edge_agent = command_path("edge-agent")
    for agent in FLEET:
        console.print(f"Model {agent.model}", style="bold")
        process = await asyncio.create_subprocess_exec(
            edge_agent,
            "models",
            "pull",
            agent.model,
            "--data-dir",
            str(options.cache),
            "--json",  # its progress goes to standard error
            stdout=asyncio.subprocess.DEVNULL,
        )
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
            raise
        if code != 0:
            raise DemoError(f"{agent.model} could not be had; the lines above say why")


async def _start_controller(
    processes: Processes, folder: Path, options: DemoOptions, console: Console
) -> Connection:
    console.print(
        "Controller (compiles its search the first time, which takes about a minute)", style="bold"
    )
    process = await processes.start(
        "controller",
        [
            command_path("edge-controller"),
            "serve",
            "--listen",
            "127.0.0.1:0",
            "--http-listen",
            "127.0.0.1:0",
            "--data-dir",
            str(folder / "controller"),
        ],
        {
            "POINTSMAN_BATCHING_QUIET_SECONDS": "0.25",
            # What one policy's answers teach must not help the next, nor one run another.
            "POINTSMAN_QUALITY_IS_ENABLED": json.dumps(options.learns),
        },
    )
    line = await processes.first_line("controller", process, _CONTROLLER_SECONDS)
    console.print(f"  gRPC {line['listen']}, HTTP {line['http']}, TLS by {line['ca_file']}")
    return Connection(line["listen"], False, Path(line["ca_file"]))


async def _start_agents(
    processes: Processes,
    options: DemoOptions,
    connection: Connection,
    client: Client,
    console: Console,
) -> None:
    edge_agent = command_path("edge-agent")
    for agent in FLEET:
        # One after the other, so that each measures its speed undisturbed.
        console.print(f"Agent {agent.node_id}: {agent.model}, {agent.hardware}", style="bold")
        settings_file = options.cache / "demo" / f"{agent.node_id}.toml"
        settings_file.write_text(_agent_settings(agent, options, connection), encoding="utf-8")
        await processes.start(agent.node_id, [edge_agent, "run", "--config", str(settings_file)])
        node = await _wait_until_ready(processes, client, agent.node_id)
        speeds = node.models[0].calibration
        console.print(
            f"  reads {speeds.prefill_tokens_per_second:.0f}, writes "
            f"{speeds.decode_tokens_per_second:.0f} tokens/s alone and "
            f"{speeds.saturated_decode_tokens_per_second:.0f} with all slots busy"
        )


def _agent_settings(agent: StandIn, options: DemoOptions, connection: Connection) -> str:
    """The agent's settings as TOML; JSON's strings are TOML's, too."""
    return f"""\
node_id = {json.dumps(agent.node_id)}
kind = {json.dumps(agent.kind)}
hardware = {json.dumps(agent.hardware)}
data_dir = {json.dumps(str(options.cache / "demo" / agent.node_id))}
models_dir = {json.dumps(str(options.cache / "models"))}

[controller]
address = {json.dumps(connection.address)}
ca_file = {json.dumps(str(connection.ca_file))}

[power]
idle_watts = {agent.idle_watts}
max_watts = {agent.max_watts}

[[models]]
name = {json.dumps(agent.model)}
slots = {agent.slots}
threads = 1
context_tokens = 1024
cpu_share_ratio = {agent.cpu_share}
prompt_usd_per_token = {agent.usd_per_million_tokens * 1e-6:.3e}
completion_usd_per_token = {agent.usd_per_million_tokens * 1e-6:.3e}
"""


async def _wait_until_ready(
    processes: Processes, client: Client, node_id: str
) -> admin_pb2.NodeStatus:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _AGENT_SECONDS
    while loop.time() < deadline:
        response = await client.admin.ListNodes(admin_pb2.ListNodesRequest(), timeout=10)
        for node in response.nodes:
            if node.node_id == node_id and node.state == "ready" and node.HasField("health"):
                return node
            for model in node.models if node.node_id == node_id else ():
                if model.phase == fleet_pb2.MODEL_PHASE_FAILED:
                    raise DemoError(f"{node_id}: {model.issue}")
        ended = processes.ended()
        if ended is not None:
            raise DemoError(f"{ended} ended by itself:\n{processes.failure_of(ended)}")
        await asyncio.sleep(0.1)
    raise DemoError(f"{node_id} was not ready in time; see {processes.log_path(node_id)}")


async def _ask_everything(
    client: Client, processes: Processes, policy: str, options: DemoOptions, console: Console
) -> PolicyResult:
    try:
        await client.admin.SetPolicy(admin_pb2.SetPolicyRequest(policy=policy), timeout=10)
    except grpc.aio.AioRpcError as error:
        raise DemoError(error.details() or error.code().name) from error
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn())  # fmt: skip
    if not console.is_terminal:
        console.print(f"Asking {len(options.questions)} questions with {policy}")
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(f"Asking with {policy}", total=len(options.questions))

        async def ask(question: DemoQuestion) -> tuple[Answer, str]:
            answer = await _ask(client, question)
            progress.advance(bar)
            return answer

        answers = await asyncio.gather(*(ask(question) for question in options.questions))
    ended = processes.ended()
    if ended is not None:
        raise DemoError(f"{ended} ended by itself:\n{processes.failure_of(ended)}")
    batches: dict[str, BatchFigures] = {}
    for answer, request_id in answers:
        if request_id and answer.batch_id not in batches:
            explained = await client.router.Explain(
                router_pb2.ExplainRequest(request_id=request_id), timeout=10
            )
            batches[answer.batch_id] = _figures(explained.decision)
    return PolicyResult(policy, tuple(answer for answer, _ in answers), tuple(batches.values()))


def _figures(decision: router_pb2.Decision) -> BatchFigures:
    return BatchFigures(
        decision.batch_size,
        decision.objective,
        decision.completion_seconds,
        decision.decision_milliseconds,
        decision.policy,
        decision.fallback_reason,
    )


async def _ask(client: Client, question: DemoQuestion) -> tuple[Answer, str]:
    """The answer and its request id; the id is empty when it failed."""
    request = types_pb2.InferenceRequest(
        chat=types_pb2.Chat(
            messages=[
                types_pb2.ChatMessage(role="system", content=_SYSTEM),
                types_pb2.ChatMessage(role="user", content=question.text),
            ]
        ),
        # A base model goes on with the next question by itself; a line is an answer.
        sampling=types_pb2.SamplingParameters(max_tokens=_MAX_TOKENS, temperature=0.0, stop=["\n"]),
    )
    pieces: list[str] = []
    try:
        stream = client.router.Infer(
            router_pb2.InferRequest(request=request), timeout=_ANSWER_SECONDS
        )
        async for event in stream:
            if event.WhichOneof("event") == "text":
                pieces.append(event.text.text)
            elif event.WhichOneof("event") == "account":
                account = event.account
                answer = Answer(
                    question,
                    "".join(pieces).strip(),
                    account.node_id,
                    account.model,
                    account.batch_id,
                    account.usage.energy_joules,
                    account.usage.energy_source == types_pb2.POWER_SOURCE_ESTIMATE,
                    account.measured_finish_seconds,
                )
                return answer, account.request_id
    except grpc.aio.AioRpcError as error:
        return Answer(question, error=f"{error.code().name}: {error.details()}"), ""
    return Answer(question, error="the stream ended without an account"), ""


def _write_json(path: Path, results: Sequence[PolicyResult]) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(to_json(results), indent=2, ensure_ascii=False) + "\n")
    os.replace(partial, path)


async def _stay(processes: Processes, connection: Connection, console: Console) -> None:
    options = f"--controller {connection.address} --ca-file {connection.ca_file}"
    console.print(
        f"\nIt keeps running until Ctrl-C. In another terminal, for example:\n"
        f'  edge-controller infer {options} "What is the capital of Italy?"\n'
        f"  edge-controller nodes {options}\n"
        f"  edge-controller policy set round-robin {options}",
        highlight=False,
        soft_wrap=True,
    )
    while processes.ended() is None:  # noqa: ASYNC110 - people wait here, not programs
        await asyncio.sleep(0.5)
    name = processes.ended() or ""
    raise DemoError(f"{name} ended by itself:\n{processes.failure_of(name)}")
