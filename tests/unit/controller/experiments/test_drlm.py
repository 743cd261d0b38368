"""The comparison on a small fleet, and its files."""

import csv
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner

from controller.cli import main
from controller.experiments.drlm import (
    BASELINES,
    SEARCHING,
    Design,
    arrival_times,
    compare,
    paper_names,
    paper_scenario,
    provenance,
    scenario_of,
)
from controller.experiments.report import write_report
from controller.training.worlds import strange_world

SMALL = Design(requests=(6, 12), rates=(1.0,), runs=2)


def without_clock(row: Any) -> dict[str, Any]:
    values = asdict(row)
    del values["decision_milliseconds"]
    return values


def test_every_policy_serves_everything_the_same_twice() -> None:
    scenario = scenario_of(strange_world(3, queries=40))
    contenders = (*BASELINES, *SEARCHING)
    first = compare(scenario, contenders, SMALL)
    second = compare(scenario, contenders, SMALL)
    assert [without_clock(row) for row in first] == [without_clock(row) for row in second]
    assert [row.policy for row in first] == [c.label for c in contenders] * 2
    for row in first:
        assert row.unserved == 0
        assert abs(sum(row.kind_shares.values()) - 1.0) < 1e-3
        assert row.end_to_end_seconds >= row.inference_seconds
        assert -0.3 <= row.reward <= 0.8
    best = {row.policy: row for row in first if row.requests == 12}
    # By what they look at alone: the one takes the best answers, the other the least service.
    assert best["fastest"].inference_seconds < best["random"].inference_seconds
    assert best["greedy-reward"].reward > best["random"].reward


def test_arrivals_are_the_same_for_every_policy_and_differ_by_seed() -> None:
    np.testing.assert_array_equal(
        arrival_times("bursts", 9, 1.0, 3), arrival_times("bursts", 9, 1.0, 3)
    )
    assert (arrival_times("poisson", 9, 1.0, 3) != arrival_times("poisson", 9, 1.0, 4)).all()


def test_the_papers_cluster_has_its_nodes_and_names() -> None:
    scenario, names = paper_scenario(), paper_names()
    assert scenario.nodes == 64
    assert len(names.models) == scenario.parameters_billions.size == 23
    assert names.models[0] == "gpt-oss-20b-q4"
    assert len(names.kinds) == scenario.seconds.shape[2] == 5


def test_the_report_holds_every_row(tmp_path: Path) -> None:
    scenario = scenario_of(strange_world(3, queries=40))
    rows = compare(scenario, BASELINES[:2], SMALL)
    written = write_report(rows, provenance(SMALL, BASELINES[:2], 1.0), tmp_path / "new")
    assert {path.name for path in written} == {
        "results.json",
        "table.csv",
        "table.md",
        "load-1.png",
        "assignment-shares.png",
    }
    results = json.loads((tmp_path / "new" / "results.json").read_text())
    assert results["seeds"] == [0, 1]
    assert results["rows"] == [asdict(row) for row in rows]
    with (tmp_path / "new" / "table.csv").open(newline="") as file:
        assert [line["policy"] for line in csv.DictReader(file)] == [row.policy for row in rows]
    table = (tmp_path / "new" / "table.md").read_text()
    assert table.count("| random |") == 2
    assert all(path.stat().st_size > 100 for path in written)


def test_artifacts_without_a_policy_are_refused(tmp_path: Path) -> None:
    arguments = ["experiment", "drlm", "--quick", "--out", str(tmp_path / "out")]
    found = CliRunner().invoke(main, [*arguments, "--artifacts", str(tmp_path)])
    assert found.exit_code == 2
    assert "holds neither" in found.output
    assert not (tmp_path / "out").exists()


def test_a_trace_that_is_none_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("when\n1\n")
    arguments = ["experiment", "drlm", "--quick", "--out", str(tmp_path / "out")]
    found = CliRunner().invoke(main, [*arguments, "--trace", str(trace)])
    assert found.exit_code == 2
    assert "no column TIMESTAMP" in found.output
