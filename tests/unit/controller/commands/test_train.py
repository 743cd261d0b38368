"""Training from the command line."""

import json
from pathlib import Path

from click.testing import CliRunner

from controller.commands.train import train


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(train, list(arguments))
    return result.exit_code, result.output


def test_training_writes_what_a_controller_serves_and_goes_on_when_told(tmp_path: Path) -> None:
    options = ("ppo", "--out", str(tmp_path), "--episodes")
    assert run(*options, "16")[0] == 0
    manifest = json.loads((tmp_path / "ppo" / "manifest.json").read_text())
    assert manifest["architecture"] == "factorised"
    code, output = run(*options, "32")
    assert code == 2
    assert "--resume" in output
    assert run(*options, "32", "--resume")[0] == 0
    assert len((tmp_path / "curve.csv").read_text().splitlines()) == 3


def test_unknown_scenario_is_wrong_usage_and_lists_those_there_are(tmp_path: Path) -> None:
    code, output = run("ppo-set", "--out", str(tmp_path), "--scenario", "papr")
    assert code == 2
    assert "stranger:SEED" in output
