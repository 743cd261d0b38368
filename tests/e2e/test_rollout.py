"""The playbook's order of hosts, with a role that only leaves a mark."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PLAYBOOK = Path(__file__).resolve().parents[2] / "deploy" / "ansible" / "site.yml"
ANSIBLE = Path(sys.executable).parent / "ansible-playbook"
DEADLINE_SECONDS = 110

ROLE = """\
- name: Leave a mark
  ansible.builtin.lineinfile:
    path: "{{ marks }}"
    line: "{{ inventory_hostname }} in {{ ansible_play_batch | join(' ') }}"
    create: true
    mode: "0600"
- name: Wait until the agent says it is ready
  ansible.builtin.assert:
    that: inventory_hostname != broken
"""


def rollout(folder: Path, hosts: int, broken: str) -> tuple[int, dict[str, str]]:
    """Roll out to this many hosts; the exit code, and each host's batch in the order of the marks.

    The hosts are this machine.
    """
    (folder / "roles/edge_agent/tasks").mkdir(parents=True)
    (folder / "roles/edge_agent/tasks/main.yml").write_text(ROLE)
    shutil.copy(PLAYBOOK, folder)
    variables = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "marks": str(folder / "marks"),
        "broken": broken,
    }
    names = [f"node-{number}" for number in range(1, hosts + 1)]
    inventory = {"edge_agents": {"hosts": {name: {} for name in names}, "vars": variables}}
    (folder / "inventory.json").write_text(json.dumps(inventory))
    run = subprocess.run(
        [str(ANSIBLE), "-i", str(folder / "inventory.json"), "--forks=1", str(folder / "site.yml")],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "LC_ALL": "C.UTF-8"},
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    marks = folder / "marks"
    assert marks.exists(), run.stdout + run.stderr
    return run.returncode, dict(line.split(" in ") for line in marks.read_text().splitlines())


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ANSIBLE.exists(), reason="ansible-core is not installed"),
]


def test_one_host_goes_first_and_then_a_quarter_at_a_time(tmp_path: Path) -> None:
    """O4."""
    code, batches = rollout(tmp_path, 9, broken="none")
    assert code == 0
    assert list(dict.fromkeys(batches.values())) == [
        "node-1",
        "node-2 node-3",
        "node-4 node-5",
        "node-6 node-7",
        "node-8 node-9",
    ]


@pytest.mark.parametrize(("broken", "reached"), [("node-1", 1), ("node-4", 5)])
def test_host_that_does_not_become_ready_ends_the_rollout(
    tmp_path: Path, broken: str, reached: int
) -> None:
    """O4: the others keep what they run."""
    code, batches = rollout(tmp_path, 9, broken)
    assert code != 0
    assert list(batches) == [f"node-{number}" for number in range(1, reached + 1)]
