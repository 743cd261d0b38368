"""Training from the command line."""

import json
from pathlib import Path

from click.testing import CliRunner

from controller.lab.commands.train import train
from controller.request_manager.policy_files import load_policy
from controller.routing.problem import name_key


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(train, list(arguments))
    return result.exit_code, result.output


def test_training_writes_what_a_controller_serves_and_goes_on_when_told(tmp_path: Path) -> None:
    options = ("ppo", "--out", str(tmp_path), "--episodes")
    assert run(*options, "16")[0] == 0
    manifest = json.loads((tmp_path / "ppo" / "manifest.json").read_text())
    assert manifest["details"]["architecture"] == "factorised"
    code, output = run(*options, "32")
    assert code == 2
    assert "--resume" in output
    assert run(*options, "32", "--resume")[0] == 0
    assert len((tmp_path / "curve.csv").read_text().splitlines()) == 1 + 32 // 8


def test_unknown_scenario_is_wrong_usage_and_lists_those_there_are(tmp_path: Path) -> None:
    code, output = run("ppo-set", "--out", str(tmp_path), "--scenario", "papr")
    assert code == 2
    assert "stranger:SEED" in output


def test_a_policy_for_the_simulators_cluster_knows_its_nodes(tmp_path: Path) -> None:
    code, output = run("ppo", "--out", str(tmp_path), "--episodes", "8", "--scenario", "drlm")
    assert code == 0, output
    layout = load_policy(tmp_path / "ppo").layout
    assert layout is not None
    assert name_key("orin-agx-0") in layout.node_keys
    assert name_key("gpt-oss-20b-z4") in layout.model_keys


def test_inputs_need_a_scenario_of_the_simulator(tmp_path: Path) -> None:
    wrong = tmp_path / "inputs"
    wrong.mkdir()
    made_up = ("--scenario", "stranger:1")
    code, output = run("ppo", "--out", str(tmp_path), "--inputs", str(wrong), *made_up)
    assert code == 2
    assert "give --scenario drlm" in output
    options = ("--scenario", "drlm", "--inputs", str(wrong))
    code, output = run("ppo", "--out", str(tmp_path), *options)
    assert code == 2
    assert "make it again" in output


def test_the_plain_policy_has_one_architecture(tmp_path: Path) -> None:
    code, output = run("ppo", "--out", str(tmp_path), "--plain", "--architecture", "flat")
    assert code == 2
    assert "three heads" in output
