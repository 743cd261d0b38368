import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.hosts.nspawn import DebianHost, debian_host, why_no_hosts
from tests.e2e.hosts.processes import running

REPOSITORY = Path(__file__).resolve().parents[2]
PLAYBOOK_FOLDER = REPOSITORY / "deploy" / "ansible"
COMMANDS = Path(sys.executable).parent
HOST_PYTHON = "3.11"  # of Debian 12
MODEL = "smollm2-135m-instruct-q4_1"
# Compiling llama.cpp where pip has not cached it takes most of this.
WHEELHOUSE_DEADLINE_SECONDS = 1800
PLAYBOOK_DEADLINE_SECONDS = 300
STATUS_DEADLINE_SECONDS = 60


def why_not() -> str | None:
    if reason := why_no_hosts():
        return reason
    if not (COMMANDS / "ansible-playbook").exists():
        return "ansible-core is not installed here: pip install ansible-core"
    return None


pytestmark = [
    pytest.mark.privileged,
    pytest.mark.slow,
    pytest.mark.llama,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


@pytest.fixture(scope="module")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    version = "{}.{}".format(*sys.version_info[:2])
    python = sys.executable if version == HOST_PYTHON else shutil.which(f"python{HOST_PYTHON}")
    if python is None:
        pytest.skip(f"no Python {HOST_PYTHON}, which the hosts have, to build wheels with")
    output = tmp_path_factory.mktemp("wheels") / "wheelhouse"
    build = REPOSITORY / "deploy" / "build_wheelhouse.py"
    # Portable or native does not matter for a host on this very machine; pip's cache does.
    environment = {name: value for name, value in os.environ.items() if name != "CMAKE_ARGS"}
    built = subprocess.run(
        [sys.executable, str(build), "--python", python, "--output", str(output)],
        capture_output=True,
        text=True,
        env=environment,
        stdin=subprocess.DEVNULL,
        timeout=WHEELHOUSE_DEADLINE_SECONDS,
        check=False,
    )
    assert built.returncode == 0, built.stderr[-4000:]
    return output


@dataclass
class Control:
    """The control side: a controller's address and certificate, and a folder to work in."""

    host: DebianHost
    folder: Path
    address: str
    ca_file: Path
    settings: dict[str, Any] = field(default_factory=dict)

    def playbook(self, *arguments: str, **changed: Any) -> "PlaybookRun":
        """Run site.yml on the host, with some of the role's variables changed."""
        host_variables = {
            "ansible_host": self.host.address,
            "ansible_user": self.host.user,
            "ansible_ssh_common_args": " ".join(self.host.ssh_options),
            "ansible_python_interpreter": "/usr/bin/python3",
            **self.settings,
            **changed,
        }
        inventory = self.folder / "inventory.json"
        inventory.write_text(
            json.dumps({"edge_agents": {"hosts": {"node-1": host_variables}}}), encoding="utf-8"
        )
        result = subprocess.run(
            [
                *("setpriv", "--pdeathsig=KILL", str(COMMANDS / "ansible-playbook")),
                *("-i", str(inventory), str(PLAYBOOK_FOLDER / "site.yml"), *arguments),
            ],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(self.folder),
                "LC_ALL": "C.UTF-8",
                "ANSIBLE_CONFIG": str(PLAYBOOK_FOLDER / "ansible.cfg"),
                # A kept connection outlives the playbook, and must not outlive the test.
                "ANSIBLE_SSH_ARGS": "-oControlMaster=auto -oControlPersist=5s",
            },
            timeout=PLAYBOOK_DEADLINE_SECONDS,
            check=False,
        )
        return PlaybookRun(result.returncode, result.stdout + result.stderr)

    def ask(self, *arguments: str) -> Any:
        """Run an edge-controller command as a client and return its JSON."""
        command = [str(COMMANDS / "edge-controller"), *arguments, "--json"]
        command += ["--controller", self.address, "--ca-file", str(self.ca_file)]
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=STATUS_DEADLINE_SECONDS, check=False
        )
        assert answer.returncode == 0, answer.stderr
        return json.loads(answer.stdout)

    def agent_status(self) -> Any:
        """Ask the agent on the host, as an operator there would."""
        answer = self.host.run("edge-agent status --json")
        assert answer.returncode == 0, answer.stdout + answer.stderr
        return json.loads(answer.stdout)


@dataclass(frozen=True)
class PlaybookRun:
    """How a playbook ended."""

    returncode: int
    output: str

    def recap(self, counter: str) -> int:
        """Return one of the counters under PLAY RECAP, such as `changed`."""
        match = re.search(rf"^node-1\s.*\b{counter}=(\d+)", self.output, re.MULTILINE)
        assert match is not None, self.output
        return int(match.group(1))


@pytest.fixture
def control(wheelhouse: Path, smollm2: Path, tmp_path: Path) -> Iterator[Control]:
    with debian_host() as host:
        serve = [str(COMMANDS / "edge-controller"), "serve", "--listen", "0.0.0.0:0"]
        serve += ["--http-listen", "", "--data-dir", str(tmp_path / "controller")]
        serve += ["--tls-name", host.control_address]
        with running(serve, tmp_path / "controller.log", ready_seconds=60) as first_line:
            ready = json.loads(first_line)
            port = ready["listen"].rpartition(":")[2]
            address = f"{host.control_address}:{port}"
            yield Control(
                host=host,
                folder=tmp_path,
                address=address,
                ca_file=Path(ready["ca_file"]),
                settings={
                    "edge_agent_wheelhouse": str(wheelhouse),
                    "edge_agent_controller_address": address,
                    "edge_agent_controller_ca_file": ready["ca_file"],
                    "edge_agent_model_files": [str(smollm2)],
                    "edge_agent_models": [
                        {"name": MODEL, "slots": 2, "threads": 1, "context_tokens": 512}
                    ],
                    "edge_agent_power": {"idle_watts": 3, "max_watts": 12},
                    "edge_agent_ready_seconds": 120,
                },
            )


def renamed_release(wheelhouse: Path, folder: Path, release: str, **changed: str) -> Path:
    """Return a copy of a wheelhouse that claims to be another release."""
    shutil.copytree(wheelhouse, folder, copy_function=os.link)
    manifest_file = folder / "wheelhouse.json"
    manifest = json.loads(manifest_file.read_text(encoding="utf-8"))
    manifest_file.unlink()
    manifest_file.write_text(json.dumps({**manifest, "release": release, **changed}))
    return folder


def test_agent_is_installed_run_upgraded_and_removed_on_a_host_without_a_network(
    control: Control, wheelhouse: Path, smollm2: Path, tmp_path: Path
) -> None:
    """The life of an agent on one host (field failures O1, O2, O4, O6).

    1. Wheels for another Python are refused, with the remedy, before anything changes.
    2. The agent is installed, runs under systemd, is connected, and answers a request.
    3. A second run changes nothing.
    4. The agent is back after the host was rebooted.
    5. Another release is installed beside the first, and is the one that runs; no answer that has
       begun meanwhile is cut.
    6. `absent` removes all but the data and the user; `purge` removes those too.
    """
    host = control.host

    # 1
    foreign = renamed_release(wheelhouse, tmp_path / "foreign", "foreign", python="3.99")
    refused = control.playbook(edge_agent_wheelhouse=str(foreign))
    assert refused.returncode != 0
    assert "but the wheels are for 3.99" in refused.output
    assert refused.recap("changed") == 0
    assert host.run("ls -d /opt/edge-agent || id edge-agent").returncode != 0

    # 2
    installed = control.playbook()
    assert installed.returncode == 0, installed.output
    assert host.run("systemctl is-active edge-agent").stdout.strip() == "active"
    assert host.run("systemctl show -P User edge-agent").stdout.strip() == "edge-agent"
    assert_ready_and_connected(control)
    answer = control.ask("infer", "Name a colour.", "--model", MODEL, "--max-tokens", "8")
    assert answer["text"]

    # 3
    again = control.playbook()
    assert again.returncode == 0, again.output
    assert again.recap("changed") == 0, again.output

    # 3b: a reload reads the settings again without a restart, and says so to systemd
    running_now = host.run("systemctl show -P MainPID edge-agent").stdout
    host.run("sed -i 's/^slots = 2/slots = 3/' /etc/edge-agent/agent.toml")
    assert host.run("systemctl reload edge-agent").returncode == 0
    verified = control.playbook("--tags", "verify")
    assert verified.returncode == 0, verified.output
    assert host.run("systemctl show -P MainPID edge-agent").stdout == running_now
    host.run("sed -i 's/^slots = 3/slots = 2/' /etc/edge-agent/agent.toml")

    # 4
    host.reboot()
    verified = control.playbook("--tags", "verify")
    assert verified.returncode == 0, verified.output
    assert_ready_and_connected(control)

    # 5
    running_before = host.run("systemctl show -P MainPID edge-agent").stdout
    newer = renamed_release(wheelhouse, tmp_path / "newer", "99.0-newer")
    with answered_meanwhile(control) as answers:
        upgraded = control.playbook(edge_agent_wheelhouse=str(newer))
    assert upgraded.returncode == 0, upgraded.output
    assert any(answer.returncode == 0 for answer in answers), answers[-1].stderr
    assert not [answer.stderr for answer in answers if answer.returncode and answer.stdout.strip()]
    main_pid = host.run("systemctl show -P MainPID edge-agent").stdout.strip()
    assert main_pid != running_before.strip()
    assert "/versions/99.0-newer/" in host.run(f"cat /proc/{main_pid}/cmdline").stdout
    assert len(host.run("ls /opt/edge-agent/versions").stdout.split()) == 2
    assert_ready_and_connected(control)

    # 6
    removed = control.playbook(edge_agent_state="absent")
    assert removed.returncode == 0, removed.output
    for path in ("/etc/edge-agent", "/opt/edge-agent", "/usr/local/bin/edge-agent"):
        assert host.run(f"ls -d {path}").returncode != 0, path
    assert "could not be found" in host.run("systemctl status edge-agent").stderr
    assert host.run("pgrep -u edge-agent").returncode == 1
    assert host.run(f"ls /var/lib/edge-agent/models/{smollm2.name}").returncode == 0
    assert control.playbook(edge_agent_state="absent").recap("changed") == 0

    purged = control.playbook(edge_agent_state="absent", edge_agent_purge=True)
    assert purged.returncode == 0, purged.output
    assert host.run("ls -d /var/lib/edge-agent").returncode != 0
    assert host.run("id edge-agent").returncode != 0


@contextmanager
def answered_meanwhile(control: Control) -> Iterator[list["subprocess.CompletedProcess[str]"]]:
    """Ask for one answer after the other during the block; how each of them ended.

    One that is refused has no text; one that is cut has some, and an error.
    """
    command = [str(COMMANDS / "edge-controller"), "infer", "Count: one, two,", "--model", MODEL]
    command += ["--max-tokens", "80", "--controller", control.address]
    command += ["--ca-file", str(control.ca_file)]
    answers: list[subprocess.CompletedProcess[str]] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            answers.append(
                subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    timeout=STATUS_DEADLINE_SECONDS,
                    check=False,
                )
            )

    asking = threading.Thread(target=ask, name="asking")
    asking.start()
    try:
        yield answers
    finally:
        is_over.set()
        asking.join(2 * STATUS_DEADLINE_SECONDS)


def assert_ready_and_connected(control: Control) -> None:
    status = control.agent_status()
    assert status["state"] == "ready", status
    assert status["controller"]["is_connected"] is True, status
