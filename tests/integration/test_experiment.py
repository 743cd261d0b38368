"""`edge-controller lab experiment drlm --quick` as an operator runs it."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from controller.cli import main


@pytest.mark.slow
def test_the_quick_experiment_writes_its_files(tmp_path: Path) -> None:
    found = CliRunner().invoke(
        main, ["lab", "experiment", "drlm", "--quick", "--out", str(tmp_path)]
    )
    assert found.exit_code == 0, found.output
    results = json.loads((tmp_path / "results.json").read_text())
    policies = [row["policy"] for row in results["rows"]]
    assert policies[:6] == [
        "random",
        "high-accuracy",
        "fastest",
        "routellm",
        "optllm",
        "greedy-reward",
    ]
    assert "memetic (window)" in policies
    assert {row["failed"] for row in results["rows"]} == {0}
    assert {row["means"]["served_ratio"] for row in results["rows"]} == {1.0}
    figures = tmp_path / "figures"
    assert (figures / "latency-by-load.png").read_bytes().startswith(b"\x89PNG")
    assert "25 requests, 2 a second, 2 runs" in (tmp_path / "tables.md").read_text()
