"""A policy on a described cluster, from the command line."""

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from controller.cli import main

SMALL = """
format = "pointsman.scenario/1"
name = "small"
[[device]]
class = "VM"
cores = 4
memory_gib = 16
[[nodes]]
name = "vm"
class = "VM"
count = 2
memory_gib = 16
[[model]]
family = "gemma3"
billions = 1
quantisation_bits = [4]
classes = ["VM"]
[[event]]
node = "vm-0"
at_seconds = 2
what = "fails"
"""


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["lab", "simulate", *arguments])


def test_a_cluster_from_a_file_loses_a_node_and_serves_on(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    options = ["--scenario", str(path), "--policy", "least-loaded", "--requests", "20"]
    found = run(*options, "--rate", "5", "--lease-seconds", "1", "--runs", "2", "--json")
    assert found.exit_code == 0, found.output
    result = json.loads(found.stdout)
    assert result["groups"] == ["vm"]
    assert [each["seed"] for each in result["runs"]] == [0, 1]
    for each in result["runs"]:
        assert each["requeued"] > 0
        assert each["served_ratio"] + each["failed"] / 20 == 1.0


def test_figures_are_printed_a_line_each() -> None:
    found = run("--policy", "fastest", "--requests", "5")
    assert found.exit_code == 0, found.output
    lines = dict(line.split(": ") for line in found.stdout.splitlines())
    assert float(lines["served_ratio"]) == 1.0
    assert float(lines["failed"]) == 0.0


def test_what_cannot_be_simulated_is_told(tmp_path: Path) -> None:
    found = run("--policy", "ppo")
    assert found.exit_code == 2
    assert "edge-controller lab train ppo" in found.output
    found = run("--policy", "memetik")
    assert found.exit_code == 2
    assert "Did you mean 'memetic'?" in found.output
    found = run("--scenario", str(tmp_path / "absent.toml"))
    assert found.exit_code == 2
    assert "cannot be read" in found.output
