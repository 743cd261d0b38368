"""The comparison on DRLM's cluster with few requests, its files, and its command."""

import csv
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from controller.cli import main
from controller.lab.experiments.claims import targets_of
from controller.lab.experiments.comparison_setting import Setting
from controller.lab.experiments.comparisons import COMPARED, Comparison
from controller.lab.experiments.contenders import (
    ALL,
    GREEDY,
    LEARNED_POLICIES,
    PAPER,
    SEARCHING,
    SPREAD,
    Contender,
    SpreadPolicy,
    policy_of,
    trained,
)
from controller.lab.experiments.drlm import Design, Results, run_experiment
from controller.lab.experiments.drlm_report import write_report
from controller.lab.experiments.figures import draw_figures
from controller.lab.experiments.runs import METRICS, SimulatedLoad, workload_for
from controller.lab.experiments.statistics import Difference
from controller.lab.simulator.inputs import save_inputs, scenario_of, synthetic_inputs
from controller.lab.simulator.problems import ProblemSource
from controller.lab.simulator.scenario_file import read_scenario
from controller.routing.policies import policy_named
from controller.routing.policy import Budget

SMALL = Design(requests=(6, 12), rates=(1.0,), runs=2)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    path = tmp_path_factory.mktemp("inputs") / "inputs"
    save_inputs(synthetic_inputs(read_scenario("drlm"), 0, 90), path)
    return Setting("drlm", path, None)


def without_clock(results: Results) -> list[dict[str, Any]]:
    rows = [asdict(row) for row in results.rows]
    for row in rows:
        del row["means"]["decision_milliseconds"], row["deviations"]["decision_milliseconds"]
    return rows


def test_every_policy_serves_everything_the_same_twice(setting: Setting) -> None:
    contenders = (*PAPER, GREEDY, *SPREAD, *SEARCHING)
    first = run_experiment(setting, contenders, SMALL)
    second = run_experiment(setting, contenders, SMALL)
    assert without_clock(first) == without_clock(second)
    assert [row.policy for row in first.rows] == [c.label for c in contenders] * 2
    for row in first.rows:
        assert row.failed == 0
        assert set(row.means) == set(METRICS) == set(row.deviations)
        for shares in (row.model_shares, row.group_shares, row.class_shares):
            assert sum(shares.values()) == pytest.approx(1.0, abs=1e-3)
        assert row.means["end_to_end_seconds"] == pytest.approx(
            row.means["inference_seconds"] + row.means["waiting_seconds"]
        )
        assert -0.3 <= row.means["reward"] <= 0.8
        assert row.waiting_quantiles == sorted(row.waiting_quantiles)
    best = {row.policy: row.means for row in first.rows if row.requests == 12}
    # By what they look at alone: the one takes the least service, the other the best reward.
    assert best["fastest"]["inference_seconds"] < best["random"]["inference_seconds"]
    assert best["greedy-reward"]["reward"] > best["random"]["reward"]
    # The same model where it is ready sooner.
    spread, crowded = best["high-accuracy (spread)"], best["high-accuracy"]
    assert spread["quality"] == crowded["quality"]
    assert spread["waiting_seconds"] < crowded["waiting_seconds"]


def test_several_processes_find_the_same(setting: Setting) -> None:
    design = Design(requests=(4,), rates=(1.0,), runs=1)
    alone = run_experiment(setting, PAPER[:3], design)
    together = run_experiment(setting, PAPER[:3], design, jobs=2)
    assert without_clock(alone) == without_clock(together)


def test_arrivals_are_the_same_for_every_policy_and_differ_by_seed(
    setting: Setting, tmp_path: Path
) -> None:
    _, _, scenario = setting.open()
    trace = tmp_path / "trace.csv"
    stamps = "\n".join(
        f"2023-11-16 18:{at // 60:02}:{at % 60:02},{at},7" for at in range(0, 900, 3)
    )
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + stamps)
    for arrivals in ("poisson", "bursts", str(trace)):
        load = SimulatedLoad(9, 1.0, arrivals)
        first, again = workload_for(load, scenario, 3), workload_for(load, scenario, 3)
        np.testing.assert_array_equal(first.arrivals, again.arrivals)
        np.testing.assert_array_equal(first.query, again.query)
        other = workload_for(load, scenario, 4)
        assert (first.luck != other.luck).any()
        assert (first.query != other.query).any()


def test_spreading_keeps_the_model_and_takes_the_node_that_is_ready_first() -> None:
    cluster = read_scenario("drlm")
    scenario = scenario_of(cluster, synthetic_inputs(cluster, 0, 30))
    source = ProblemSource(scenario, np.array([0.7, 0.0, 0.0, 0.3]))
    waits = np.random.default_rng(0).exponential(20.0, scenario.nodes)
    problem = source.problem([0, 1, 2], waits, np.ones(scenario.nodes, dtype=np.bool_))
    rng = np.random.default_rng(0)
    plain = policy_named("high-accuracy").decide(problem, rng, Budget()).assignment
    spread = SpreadPolicy(policy_named("high-accuracy")).decide(problem, rng, Budget()).assignment
    np.testing.assert_array_equal(scenario.model_of[plain], scenario.model_of[spread])
    hosts = np.flatnonzero(scenario.model_of == scenario.model_of[plain[0]])
    ready = problem.latency_seconds[0, hosts] + waits[scenario.node_of[hosts]]
    assert spread[0] == hosts[np.argmin(ready)]


def test_contenders_have_labels_of_their_own() -> None:
    assert len({contender.label for contender in ALL}) == len(ALL)
    assert policy_of(Contender("x", "optllm", is_spread=True)).name == "optllm (spread)"


def test_policies_without_artifacts_are_left_out(tmp_path: Path) -> None:
    left = trained(ALL, tmp_path)
    assert [c.policy for c in ALL if c not in left] == list(LEARNED_POLICIES)
    assert trained(PAPER, None) == PAPER


def difference(change: float, low: float, high: float) -> Difference:
    return Difference(change, low, high, change, low, high)


def test_claims_are_met_on_average_or_for_certain() -> None:
    def one(metric: str, against: str, found: Difference) -> Any:
        comparison = Comparison("ppo", against, 100, 2.0, metric, found)
        (target,) = targets_of([comparison])
        return target.is_met, target.is_certain

    wait = "waiting_seconds"
    assert one(wait, "optllm", difference(-0.7, -0.8, -0.6)) == (True, True)
    assert one(wait, "optllm", difference(-0.6, -0.8, -0.4)) == (True, False)
    assert one(wait, "optllm", difference(-0.5, -0.9, -0.1)) == (False, False)
    assert one("quality", "routellm", difference(-0.05, -0.07, -0.03)) == (True, True)
    assert one("quality", "routellm", difference(-0.09, -0.2, 0.0)) == (False, False)
    assert one("reward", "greedy-reward", difference(0.01, -0.01, 0.03)) == (True, False)
    assert targets_of([Comparison("ppo", "optllm", 50, 2.0, wait, difference(0, 0, 0))]) == []


def test_the_report_holds_every_row_and_the_figures_are_drawn(
    setting: Setting, tmp_path: Path
) -> None:
    results = run_experiment(setting, PAPER[:2], SMALL)
    (tmp_path / "curve-ppo.csv").write_text("episodes,reward,value_loss\n16,0.1,3\n32,0.2,1\n")
    out = tmp_path / "new"
    written = write_report(results, out)
    assert {path.name for path in written} == {
        "results.json",
        "table.csv",
        "comparisons.csv",
        "tables.md",
    }
    found = json.loads((out / "results.json").read_text())
    assert found["design"]["seeds"] == [0, 1]
    assert found["setting"]["pairs_with_classes"] == 85
    assert found["rows"] == [asdict(row) for row in results.rows]
    assert len(found["runs"]) == 2 * 2 * 2
    with (out / "table.csv").open(newline="") as file:
        assert [line["policy"] for line in csv.DictReader(file)] == [
            row.policy for row in results.rows
        ]
    text = (out / "tables.md").read_text()
    assert text.count("| random |") == 2 + 4  # a row a load, and one in each table of all loads
    assert "| policy | 6, 1/s | 12, 1/s |" in text
    drawn = draw_figures(results, out / "figures", tmp_path)
    assert {path.name for path in drawn} == {
        f"{name}.{suffix}"
        for name in (
            "decision-time",
            "waiting-cdf",
            "assignment-shares",
            "quality-by-load",
            "latency-by-load",
            "training",
        )
        for suffix in ("png", "svg")
    }
    assert all(path.stat().st_size > 1000 for path in drawn)


def test_a_run_that_serves_nothing_leaves_gaps_and_no_nan_in_the_json(
    setting: Setting, tmp_path: Path
) -> None:
    results = run_experiment(setting, PAPER[:1], SMALL)
    row = results.rows[0]
    row.means["reward"] = float("nan")
    write_report(results, tmp_path)
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["rows"][0]["means"]["reward"] is None


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["lab", "experiment", "drlm", *arguments])


def test_the_command_trains_compares_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.lab.commands.experiment.QUICK_EPISODES", {"ppo-set": 8})
    out = tmp_path / "out"
    arguments = ["--quick", "--out", str(out), "--requests", "5", "--rate", "1", "--runs", "1"]
    chosen = ["--policy", "ppo-set", "--policy", "greedy-reward", "--no-figures", "--json"]
    first = run(*arguments, *chosen)
    assert first.exit_code == 0, first.output
    found = json.loads(first.stdout)
    assert [row["policy"] for row in found["rows"]] == ["greedy-reward", "ppo-set"]
    assert all(row["means"]["fallback_ratio"] == 0.0 for row in found["rows"])
    results = json.loads((out / "results.json").read_text())
    assert {each["metric"] for each in results["comparisons"]} == set(COMPARED)
    assert results["policies"]["ppo-set"]["scenario"] == "drlm"
    weights = list(out.glob("policies/*/ppo-set/arrays.npz"))
    before = weights[0].stat().st_mtime_ns
    again = run(*arguments, *chosen)
    assert again.exit_code == 0, again.output
    assert weights[0].stat().st_mtime_ns == before
    assert json.loads(again.stdout)["rows"] == found["rows"]


@pytest.mark.slow
def test_further_trainings_are_told_apart_and_summed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.lab.commands.experiment.QUICK_EPISODES", {"ppo-set": 8})
    out = tmp_path / "out"
    arguments = ["--quick", "--out", str(out), "--requests", "5", "--rate", "1", "--no-figures"]
    chosen = ["--policy", "ppo-set", "--policy", "greedy-reward", "--policy", "random"]
    found = run(*arguments, *chosen, "--training-seed", "7", "--training-seed", "8")
    assert found.exit_code == 0, found.output
    results = json.loads((out / "results.json").read_text())
    further = ["ppo-set (training 7)", "ppo-set (training 8)"]
    assert [row["policy"] for row in results["rows"]] == [
        "random", "greedy-reward", "ppo-set", *further,
    ]  # fmt: skip
    seeds = {label: made["settings"]["seed"] for label, made in results["policies"].items()}
    assert seeds == {"ppo-set": 0, further[0]: 7, further[1]: 8}
    pairs = {(each["policy"], each["against"]) for each in results["comparisons"]}
    assert pairs == {
        ("ppo-set", "random"),
        *((label, "greedy-reward") for label in ("ppo-set", *further)),
    }
    spreads = {each["metric"]: each for each in results["trainings"]}
    assert spreads["waiting_seconds"]["seeds"] == [None, 7, 8]
    differences = {
        each["policy"]: each["difference"]
        for each in results["comparisons"]
        if (each["against"], each["metric"]) == ("greedy-reward", "waiting_seconds")
    }
    assert spreads["waiting_seconds"]["differences"] == list(differences.values())
    assert "## Trainings" in (out / "tables.md").read_text()
    (artifacts,) = (out / "policies").iterdir()
    given = run(*arguments, *chosen, "--artifacts", str(artifacts), "--training-seed", "9")
    assert given.exit_code == 1
    assert "has no ppo-set (training 9)" in given.output
    assert run(*arguments, "--training-seed", "0").exit_code == 2


def test_what_cannot_be_used_is_refused(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    found = run("--quick", "--out", out, "--artifacts", str(tmp_path))
    assert found.exit_code == 1
    assert "holds neither" in found.output
    found = run("--quick", "--out", out, "--policy", "clever")
    assert found.exit_code == 2
    assert "no policy clever" in found.output
    found = run("--quick", "--out", out, "--scenario", "nowhere.toml")
    assert found.exit_code == 2
    assert "cannot be read" in found.output
    found = run("--quick", "--out", out, "--policy", "ppo-flat")
    assert found.exit_code == 1
    assert "nothing is left to compare" in found.output
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    found = run("--quick", "--out", out, "--inputs", str(wrong))
    assert found.exit_code == 2
    assert "make it again" in found.output
    trace = tmp_path / "trace.csv"
    trace.write_text("when\n1\n")
    found = run("--quick", "--out", out, "--trace", str(trace), "--policy", "random")
    assert found.exit_code == 2
    assert "no column TIMESTAMP" in found.output
