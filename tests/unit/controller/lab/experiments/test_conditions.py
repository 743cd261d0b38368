"""Policies under other weights and on a fleet that comes and goes."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from controller.cli import main
from controller.lab.experiments.comparison_setting import Setting
from controller.lab.experiments.condition_report import condition_tables, write_condition_report
from controller.lab.experiments.conditions import (
    NothingLearned,
    churn_plan,
    mixed_weights,
    run_plan,
    seconds_plan,
    weights_plan,
)
from controller.lab.experiments.runs import SimulatedLoad
from controller.lab.simulator.inputs import save_inputs, synthetic_inputs
from controller.lab.simulator.scenario_file import read_scenario
from controller.request_manager.policy_files import save_policy
from controller.routing.ppo.artifact import PolicyArtifact
from controller.routing.ppo.observation import CANDIDATE_FEATURES, DRLM_WEIGHTS


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """With a set policy that adds nothing to the one-step reward: greedy under any weights."""
    inputs, hidden = len(CANDIDATE_FEATURES), 2

    def zeros(*shape: int) -> np.ndarray:
        return np.zeros(shape, dtype=np.float32)

    weights = {"input_mean": zeros(inputs), "input_deviation": zeros(inputs) + 1}
    shapes = {
        "candidate.0": (hidden, inputs),
        "candidate.2": (hidden, hidden),
        "context": (hidden, 2 * hidden),
        "score_candidate": (hidden, hidden),
        "score_context": (hidden, hidden),
        "score": (1, hidden),
    }
    for name, shape in shapes.items():
        weights[f"{name}.weight"], weights[f"{name}.bias"] = zeros(*shape), zeros(shape[0])
    weights["reward_gain"] = np.array(1.0, dtype=np.float32)
    low = zeros(inputs)
    folder = tmp_path_factory.mktemp("policies")
    save_policy(folder / "ppo-set", PolicyArtifact("set", weights, low - 1e6, low + 1e6, None, {}))
    save_inputs(synthetic_inputs(read_scenario("drlm"), 0, 90), folder / "inputs")
    return Setting("drlm", folder / "inputs", folder)


def test_weights_add_up_and_none_on_the_others_is_drlms() -> None:
    assert mixed_weights() == pytest.approx(DRLM_WEIGHTS)
    assert sum(mixed_weights(energy=0.25, cost=0.25)) == pytest.approx(1.0)
    assert mixed_weights(energy=0.4)[2] == 0.4


def test_weight_on_energy_or_money_saves_it_where_the_policy_heeds_weights(
    setting: Setting,
) -> None:
    results = run_plan(weights_plan(SimulatedLoad(12, 1.0)), setting, range(2))
    means = {(row.condition, row.policy): row.means for row in results.rows}
    base, set_policy = "DRLM's weights", "ppo-set"
    for name, quantity in (("energy 0.5", "energy_joules"), ("money 0.5", "cost_usd")):
        assert means[name, set_policy][quantity] < means[base, set_policy][quantity]
        # It looks at quality and latency alone, whatever it is told: once is enough.
        assert (name, "greedy-reward") not in means
    by_row = {(row.condition, row.policy): row.differences for row in results.rows}
    assert by_row[base, set_policy] == {}
    assert by_row["energy 0.5", set_policy][set_policy]["energy_joules"].change < 0.0


def test_nodes_that_fail_cost_requests_that_are_routed_again(setting: Setting) -> None:
    plan = churn_plan(SimulatedLoad(60, 2.0), lease_seconds=5.0)
    results = run_plan(plan, setting, range(1))
    calm, _, often = (condition.name for condition in plan.conditions)
    for row in results.rows:
        if row.condition == calm:
            assert row.means["served_ratio"] == 1.0
            assert row.means["requeued"] == 0.0
        assert (row.differences == {}) == (row.policy == "greedy-reward")
    lost = [
        row.means["requeued"] + row.means["failed"]
        for row in results.rows
        if row.condition == often
    ]
    assert max(lost) > 0.0


def test_files_and_table_have_every_row(setting: Setting, tmp_path: Path) -> None:
    results = run_plan(weights_plan(SimulatedLoad(3, 1.0)), setting, range(1))
    write_condition_report(results, tmp_path)
    found = json.loads((tmp_path / "results.json").read_text())
    assert (found["experiment"], found["seeds"]) == ("weights", [0])
    assert found["setting"]["scenario"] == "drlm"
    assert len(found["rows"]) == len(found["runs"]) == len(results.rows)
    with (tmp_path / "table.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(results.rows)
    table = condition_tables(results).split("## ppo-set")[1].split("##")[0]
    for condition in results.plan.conditions:
        assert f"| {condition.name} |" in table


def test_a_folder_without_policies_is_refused(setting: Setting, tmp_path: Path) -> None:
    with pytest.raises(NothingLearned, match="edge-controller lab train"):
        run_plan(
            weights_plan(SimulatedLoad(3, 1.0)), replace(setting, artifacts=tmp_path), range(1)
        )
    arguments = ["lab", "experiment", "churn", "--artifacts", str(tmp_path)]
    arguments += ["--out", str(tmp_path / "o")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "edge-controller lab train" in result.output


def test_more_weight_on_time_buys_seconds_for_quality_within_the_bound(setting: Setting) -> None:
    results = run_plan(seconds_plan(SimulatedLoad(12, 1.0)), setting, range(2))
    means = {(row.condition, row.policy): row.means for row in results.rows}
    first, last = (means[results.plan.conditions[at].name, "ppo-set"] for at in (0, -1))
    assert last["inference_seconds"] < first["inference_seconds"]
    assert last["quality"] < first["quality"]
    by_row = {(row.condition, row.policy): row.differences for row in results.rows}
    assert set(by_row["time 0.9", "ppo-set"]) == {"optllm", "routellm"}
    base = results.plan.conditions[0].name
    assert set(by_row[base, "optllm"]) == {"routellm"}
    assert ("time 0.9", "optllm") not in by_row
    # A shorter limit never has better quality.
    bounds = dict(results.bounds)
    assert bounds["38 % less than routellm's"].quality <= bounds["routellm's"].quality
    assert bounds["routellm's"].quality <= bounds["no limit"].quality
    claims = condition_tables(results).split("## DRLM's claims, together")[1].split("##")[0]
    assert "| time 0.98 | ppo-set |" in claims
    assert f"| {base} | optllm |" not in claims  # not compared with itself


def test_the_commands_print_their_tables_and_go_on_where_they_were(
    setting: Setting, tmp_path: Path
) -> None:
    told = {"weights": "| money 0.5 |", "churn": "## all stay", "seconds": "| time 0.98 |"}
    for name, said in told.items():
        arguments = ["--artifacts", str(setting.artifacts), "--out", str(tmp_path / name)]
        few = ["--requests", "3", "--runs", "1", "--jobs", "1"]
        result = CliRunner().invoke(main, ["lab", "experiment", name, *arguments, *few])
        assert result.exit_code == 0, result.output
        assert said in result.stdout
        assert (tmp_path / name / "tables.md").exists()
        before = json.loads((tmp_path / name / "results.json").read_text())["runs"]
        again = CliRunner().invoke(main, ["lab", "experiment", name, *arguments, *few])
        assert again.exit_code == 0, again.output
        after = json.loads((tmp_path / name / "results.json").read_text())["runs"]
        assert after == before  # decision times and all: nothing ran again
