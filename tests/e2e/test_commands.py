"""Both commands as a user runs them: processes, arguments, exit codes."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from controller.config import ServerSettings
from controller.security.tls import server_certificate
from pointsman.v1 import admin_pb2

FOLDER = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[2]
FREE = "127.0.0.1:0"
PATIENCE_SECONDS = 100.0
"""Bounds every wait; a controller takes two seconds to start, and a minute with a cold cache."""

Ended = subprocess.CompletedProcess[str]


def run(command: str, *arguments: str | bytes, **options: Any) -> Ended:
    """Run a command to its end."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("POINTSMAN_", "EDGE_AGENT_"))
    }
    return subprocess.run(
        [FOLDER / command, *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=PATIENCE_SECONDS,
        env=environment,
        **options,
    )


def until(is_so: Callable[[], bool]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)


@contextlib.contextmanager
def running(arguments: Sequence[str | Path], log: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process in the background; killed at the end if it is still there."""
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [str(argument) for argument in arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
        )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_SECONDS)


@dataclass
class Controller:
    """A running `edge-controller serve`; `told` is the line that it printed when it was ready."""

    process: "subprocess.Popen[str]"
    told: dict[str, Any]

    @property
    def address(self) -> str:
        return str(self.told["listen"])

    def ask(self, *arguments: str | bytes) -> Ended:
        """Ask it through its own command line."""
        command, *rest = arguments
        return run("edge-controller", command, "--controller", self.address, "--insecure", *rest)

    def json(self, *arguments: str) -> dict[str, Any]:
        """Ask it for JSON, and expect success."""
        ended = self.ask(arguments[0], "--json", *arguments[1:])
        assert ended.returncode == 0, ended.stderr
        answer: dict[str, Any] = json.loads(ended.stdout)
        return answer


@contextlib.contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[Controller]:
    """`edge-controller serve` on free ports."""
    command = [FOLDER / "edge-controller", "serve", "--data-dir", folder, "--listen", FREE]
    with running([*command, "--http-listen", FREE, *arguments], folder / "log") as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (folder / "log").read_text()
        yield Controller(process, json.loads(line))


@contextlib.contextmanager
def fake_agent(folder: Path, address: str, ca_file: str = "") -> Iterator["subprocess.Popen[str]"]:
    """An agent with a fake engine."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.fakes.agent_process", folder, address, ca_file]
    with running(command, folder / "log") as process:
        yield process


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, float]:
    """Send SIGTERM; exit code, standard output and seconds."""
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode, out, time.monotonic() - started


def processes_with(variable: str) -> list[int]:
    """Processes whose environment has this text in it."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if variable.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    """A controller with one fake agent that is ready."""
    folder = tmp_path_factory.mktemp("controller")
    with (
        serving(folder, "--insecure", "--window-seconds", "0.1") as controller,
        fake_agent(folder / "agent", controller.address),
    ):

        def is_ready() -> bool:
            nodes = controller.json("nodes")["nodes"]
            return bool(nodes) and nodes[0]["state"] == "ready" and "health" in nodes[0]

        until(is_ready)
        yield controller


@pytest.fixture
def busy_port() -> Iterator[str]:
    """The address of a port that somebody else listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def closed_port() -> str:
    """The address of a port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


# -- a controller and what is asked of it ----------------------------------------------------------


def test_answer_streams_to_output_and_its_account_to_errors(controller: Controller) -> None:
    asked = controller.ask("infer", "What is the capital of France?", "--seed", "1")
    assert asked.returncode == 0
    assert asked.stdout.startswith("Fake answer ")
    assert "fake-a on fake" in asked.stderr
    raw = controller.ask("infer", "--raw", "What is the capital of France?", "--seed", "1")
    assert raw.stdout == asked.stdout


def test_answer_is_one_object_with_json(controller: Controller) -> None:
    answer = controller.json("infer", "Hello", "--seed", "1", "--request-id", "mine")
    assert answer["text"].startswith("Fake answer ")
    account = answer["account"]
    assert (account["request_id"], account["node_id"], account["model"]) == (
        "mine",
        "fake",
        "fake-a",
    )
    assert account["finish_reason"] == "FINISH_REASON_STOP"
    assert account["usage"]["energy_source"] == "POWER_SOURCE_ESTIMATE"
    explained = controller.json("explain", "mine")
    assert explained["state"] == "completed"
    assert explained["placement"]["chosen"]["node_id"] == "fake"
    shown = controller.ask("explain", "mine")
    assert "mine: completed" in shown.stdout
    assert "Predicted to finish" in shown.stdout


def test_route_decides_and_sends_nothing(controller: Controller, tmp_path: Path) -> None:
    batch = tmp_path / "batch.txt"
    batch.write_text('A line of text?\n\n{"prompt": "As JSON", "model": "fake-a"}\n')
    completed = controller.json("nodes")["nodes"][0]["completed_requests"]
    decided = controller.json("route", "One?", "Two?", "--file", str(batch), "--policy", "fastest")
    assert [place["chosen"]["node_id"] for place in decided["placements"]] == ["fake"] * 4
    assert decided["decision"]["policy"] == "fastest"
    assert decided["decision"]["batch_size"] == 4
    table = controller.ask("route", "One?")
    assert table.returncode == 0
    assert "fake-a" in table.stdout
    assert controller.json("nodes")["nodes"][0]["completed_requests"] == completed


def test_nodes_are_listed_drained_and_lifted(controller: Controller) -> None:
    (node,) = controller.json("nodes")["nodes"]
    # Goodput is absent until the first probes that carry something have come back.
    later = {"receive_bytes_per_second", "transmit_bytes_per_second", "goodput_age_seconds"}
    assert set(node) >= {field.name for field in admin_pb2.NodeStatus.DESCRIPTOR.fields} - later
    assert "fake" in controller.ask("nodes").stdout
    assert controller.ask("nodes", "drain", "fake").stdout == "fake is draining\n"
    refused = controller.ask("infer", "Hello")
    assert refused.returncode == 1
    assert "node is draining" in refused.stderr
    assert controller.ask("nodes", "undrain", "fake").stdout == "fake is ready\n"
    assert controller.ask("infer", "Hello").returncode == 0
    unknown = controller.ask("nodes", "drain", "other")
    assert unknown.returncode == 2
    assert "No node is called 'other'. Known: fake." in unknown.stderr
    connected = controller.ask("nodes", "forget", "fake")
    assert connected.returncode == 1
    assert "stop its agent first" in connected.stderr


def test_policy_is_shown_and_set(controller: Controller) -> None:
    before = controller.json("policy")
    changed = controller.ask("policy", "set", "round-robin", "--weights", "3,0,0,1")
    assert changed.returncode == 0
    assert changed.stdout.startswith(
        "round-robin, weights quality 0.75, cost 0, energy 0, time 0.25"
    )
    assert controller.json("policy")["policy"] == "round-robin"
    assert "round-robin" in controller.ask("policy").stdout
    assert (
        controller.ask("policy", "set", str(before["policy"]), "--weights", "1,1,1,1").returncode
        == 0
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["infer", "Hello", "--model", "large"],
            "No node serves model 'large'. Served now: fake-a.",
        ),
        (["infer", ""], "prompt is empty"),
        (["infer", "Hello", "--max-tokens", "0"], "max_tokens"),
        (["infer", "Hello", "--max-tokens", "-3"], "max_tokens"),
        (["infer", "word " * 9000], "context"),
        (["infer", b"caf\xe9"], "not valid UTF-8"),
        (["route", b"caf\xe9"], "not valid UTF-8"),
        (["route", "Hello", "--policy", "roundrobin"], "Did you mean 'round-robin'?"),
        (["route", "Hello", "--weights", "0,0,0,0"], "at least one weight must be above 0"),
        (["route", "Hello", "--weights", "-1,1,1,1"], "not negative"),
        (["policy", "set", "roundrobin"], "Did you mean 'round-robin'?"),
        (["policy", "set", "--normalisation", "none"], "normalisation"),
        (["explain", "never"], "no record of request 'never'"),
    ],
    ids=lambda value: None if isinstance(value, list) else value[:20],
)
def test_what_the_user_can_mend_is_exit_code_2(
    controller: Controller, arguments: list[str | bytes], words: str
) -> None:
    asked = controller.ask(*arguments)
    assert asked.returncode == 2
    assert words in asked.stderr
    assert "Traceback" not in asked.stderr
    assert asked.stdout.strip() == ""


def test_nobody_at_the_address_is_exit_code_1_soon(closed_port: str) -> None:
    started = time.monotonic()
    asked = run("edge-controller", "infer", "Hello", "--controller", closed_port, "--insecure")
    assert asked.returncode == 1
    assert f"no controller answers at {closed_port}" in asked.stderr
    assert "edge-controller serve" in asked.stderr
    assert time.monotonic() - started < PATIENCE_SECONDS / 4


# -- starting and stopping a controller ------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "other"), [("--listen", "--http-listen"), ("--http-listen", "--listen")]
)
def test_port_in_use_is_exit_code_1_and_named(
    busy_port: str, tmp_path: Path, option: str, other: str
) -> None:
    arguments = ("--data-dir", str(tmp_path), "--insecure", option, busy_port, other, FREE)
    asked = run("edge-controller", "serve", *arguments)
    assert asked.returncode == 1
    assert f"cannot listen on {busy_port}" in asked.stderr
    assert "in use" in asked.stderr
    assert f"choose another with {option}" in asked.stderr
    assert "Traceback" not in asked.stderr
    assert asked.stdout == ""


def test_wrong_settings_are_exit_code_2_and_all_told(tmp_path: Path) -> None:
    path = tmp_path / "controller.toml"
    path.write_text("[batching]\nwindow_secnds = 1\nmax_requests = 0\n")
    asked = run("edge-controller", "serve", "--config", str(path))
    assert asked.returncode == 2
    assert "did you mean 'window_seconds'?" in asked.stderr
    assert "batching.max_requests" in asked.stderr


def test_termination_ends_a_controller_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POINTSMAN_SERVER_GRACE_SECONDS", "90")
    with serving(tmp_path, "--insecure") as controller:
        code, out, seconds = ended(controller.process)
    assert (code, out) == (0, "")
    assert seconds < 45.0, "half its grace period, with nothing running"


def test_termination_ends_a_controller_that_still_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "code"))  # nothing is compiled there yet
    command = [FOLDER / "edge-controller", "serve", "--data-dir", tmp_path, "--listen", FREE]
    with running([*command, "--insecure"], tmp_path / "log") as process:
        until(lambda: "policies.compiling" in (tmp_path / "log").read_text())
        code, out, seconds = ended(process)
    assert (code, out) == (0, "")
    assert seconds < 30.0, "no waiting for the compiler, which takes a minute"
    until(lambda: not processes_with(f"NUMBA_CACHE_DIR={tmp_path}"))


def test_tls_from_end_to_end(tmp_path: Path) -> None:
    with serving(tmp_path) as controller:
        ca_file = controller.told["ca_file"]
        assert controller.told["http"].startswith("https://")
        port = controller.address.rpartition(":")[2]
        trusting = ("--controller", f"localhost:{port}", "--ca-file", ca_file)
        assert run("edge-controller", "nodes", *trusting).returncode == 0
        for distrusting in (
            ("--controller", f"localhost:{port}"),
            ("--controller", controller.address, "--insecure"),
        ):
            asked = run("edge-controller", "nodes", *distrusting)
            assert asked.returncode == 1
            assert "no controller answers at" in asked.stderr
            assert "--insecure" in asked.stderr
        with fake_agent(tmp_path / "agent", f"localhost:{port}", ca_file):
            until(lambda: status(tmp_path / "agent")[0] == 0)
        foreign = server_certificate(ServerSettings(data_dir=tmp_path / "foreign"))
        assert foreign is not None
        with fake_agent(tmp_path / "other", f"localhost:{port}", str(foreign.ca_file)):
            until(lambda: "CERTIFICATE_VERIFY_FAILED" in str(status(tmp_path / "other")[1]))
            code, answer = status(tmp_path / "other")
            assert code == 4
            assert any(issue.startswith("controller_unreachable") for issue in answer["issues"])


# -- the agent -------------------------------------------------------------------------------------


def status(folder: Path) -> tuple[int, dict[str, Any]]:
    """Exit code and answer of `edge-agent status`."""
    asked = run("edge-agent", "status", "--json", "--data-dir", str(folder))
    answer: dict[str, Any] = json.loads(asked.stdout)
    return asked.returncode, answer


def test_status_of_an_agent_that_does_not_run_is_exit_code_3(tmp_path: Path) -> None:
    code, answer = status(tmp_path)
    assert code == 3
    assert answer["state"] == "not_running"
    asked = run("edge-agent", "status", "--data-dir", str(tmp_path))
    assert asked.returncode == 3
    assert "edge-agent run" in asked.stderr


def test_agent_whose_controller_is_away_stays_up_and_says_so(
    tmp_path: Path, closed_port: str
) -> None:
    command = [FOLDER / "edge-agent", "run", "--data-dir", tmp_path, "--node-id", "pi"]
    with running([*command, "--controller", closed_port, "--insecure"], tmp_path / "log") as agent:
        until(lambda: "unavailable" in str(status(tmp_path)[1].get("issues")))
        code, answer = status(tmp_path)
        assert code == 4
        assert answer["node_id"] == "pi"
        assert not answer["controller"]["is_connected"]
        assert any(
            issue.startswith("controller_unreachable") and closed_port in issue
            for issue in answer["issues"]
        )
        shown = run("edge-agent", "status", "--data-dir", str(tmp_path))
        assert shown.returncode == 4
        assert f"not connected to {closed_port}" in shown.stdout
        second = run("edge-agent", "run", "--data-dir", str(tmp_path), "--controller", closed_port)
        assert second.returncode == 1
        assert "already running" in second.stderr
        assert agent.poll() is None
        code, _, _ = ended(agent)
        assert code == 0
    assert status(tmp_path)[0] == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], "host:port such as"),
        (["run", "--controller", "nowhere"], "host:port such as"),
        (["run", "--controller", "host:1", "--slots", "2"], "need --model"),
        (["run", "--controller", "host:1", "--idle-watts", "3"], "belong together"),
        (["run", "--controller", "host:1", "--node-id", "has space"], "node_id"),
        (["run", "--config", "missing.toml"], "missing.toml"),
        (["status", "--config", "missing.toml"], "missing.toml"),
        (["bench"], "name a MODEL"),
    ],
)
def test_wrong_usage_of_the_agent_is_exit_code_2(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    command, *rest = arguments
    asked = run("edge-agent", command, "--data-dir", str(tmp_path), *rest, cwd=tmp_path)
    assert asked.returncode == 2
    assert words in asked.stderr
    assert "Traceback" not in asked.stderr


def test_every_wrong_setting_of_the_agent_is_told(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_text('knd = "edge"\n[[models]]\nslots = 2\n')
    asked = run("edge-agent", "run", "--config", str(path))
    assert asked.returncode == 2
    assert "did you mean 'kind'?" in asked.stderr
    assert "models[0]: name is missing" in asked.stderr


# -- a light agent ---------------------------------------------------------------------------------

HEAVY = ("controller", "numpy", "torch", "llama_cpp", "scipy", "numba", "pydantic", "starlette")


def heavy_among(modules: Sequence[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules} & set(HEAVY)


def test_agent_that_serves_a_model_imports_nothing_heavy(
    controller: Controller, tmp_path: Path
) -> None:
    with fake_agent(tmp_path, controller.address) as agent:
        until(lambda: status(tmp_path)[0] == 0)
        code, out, _ = ended(agent)
    assert code == 0
    modules = json.loads(out)
    assert "edge_agent.link.session" in modules
    assert heavy_among(modules) == set()


def imported_by(program: str) -> list[str]:
    """Modules that a program of ours has imported when it ends."""
    code = f"{program}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    modules: list[str] = json.loads(done.stdout.splitlines()[-1])
    return modules


def test_asking_for_the_status_imports_nothing_heavy(tmp_path: Path) -> None:
    arguments = ["status", "--json", "--data-dir", str(tmp_path)]
    program = (
        "from edge_agent.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit as end: assert end.code == 3"
    )
    modules = imported_by(program)
    assert heavy_among(modules) == set()
    assert "grpc" not in modules


def test_command_line_of_the_agent_starts_light() -> None:
    """On a Raspberry Pi every import counts; what a command needs it imports itself."""
    modules = imported_by("import edge_agent.cli")
    roots = {name.partition(".")[0] for name in modules}
    assert heavy_among(modules) == set()
    assert roots.isdisjoint({"grpc", "google", "rich", "psutil", "httpx", "yaml", "structlog"})
