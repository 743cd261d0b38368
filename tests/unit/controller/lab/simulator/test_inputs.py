"""Made-up inputs, their files, and what they make of a cluster."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from controller.lab.simulator.inputs import (
    InputsError,
    group_seconds,
    inputs_digest,
    load_inputs,
    pair_names,
    save_inputs,
    scenario_of,
    synthetic_inputs,
)
from controller.lab.simulator.scenario_file import read_scenario
from controller.storage.artifacts import load_artifact, save_artifact

CLUSTER = read_scenario("drlm")
INPUTS = synthetic_inputs(CLUSTER, 0, 300)


def test_the_same_seed_gives_the_same_inputs() -> None:
    assert inputs_digest(synthetic_inputs(CLUSTER, 0, 300)) == inputs_digest(INPUTS)
    assert inputs_digest(synthetic_inputs(CLUSTER, 1, 300)) != inputs_digest(INPUTS)


def test_larger_models_are_better_and_slower_and_small_boards_slower_still() -> None:
    names = [model.configuration.name for model in CLUSTER.models]
    large, small = names.index("gemma3-12b-z4"), names.index("gemma3-0.27b-z4")
    assert INPUTS.correct[:, large].mean() > INPUTS.correct[:, small].mean() + 0.1
    at = dict(zip(INPUTS.pairs, INPUTS.seconds.mean(axis=0), strict=True))
    assert at["gemma3-12b-z4@JOA"] > 5.0 * at["gemma3-0.27b-z4@JOA"]
    assert at["gemma3-1b-z4@RP"] > 3.0 * at["gemma3-1b-z4@VM"] > 3.0 * at["gemma3-1b-z4@JOA"]


def test_held_out_queries_are_a_fifth_and_do_not_shape_the_estimates() -> None:
    assert INPUTS.is_held_out.mean() == pytest.approx(0.2, abs=0.01)
    held_out = INPUTS.part(INPUTS.is_held_out)
    assert held_out.queries == 60
    assert held_out.is_held_out.all()
    # On average the estimate is right on queries it has not seen; it is no oracle on each.
    gap = held_out.quality.mean() - held_out.correct.mean()
    assert abs(gap) < 0.1
    assert not set(np.unique(held_out.quality)) & {0.0, 1.0}


def test_speed_ratios_divide_the_times_of_a_class() -> None:
    scenario = scenario_of(CLUSTER, INPUTS)
    groups = [group.name for group in CLUSTER.groups]
    model = [m.configuration.name for m in CLUSTER.models].index("gemma3-1b-z4")
    slow, fast = groups.index("rpi3"), groups.index("rpi4-4gb")
    np.testing.assert_allclose(
        scenario.seconds[:, model, slow] * 0.4, scenario.seconds[:, model, fast]
    )
    everywhere = group_seconds(CLUSTER, INPUTS.seconds)
    assert np.isinf(everywhere[:, ~CLUSTER.hosted]).all()
    assert np.isfinite(everywhere[:, CLUSTER.hosted]).all()


def test_the_scenario_is_the_clusters() -> None:
    scenario = scenario_of(CLUSTER, INPUTS)
    assert scenario.nodes == 64
    assert scenario.node_of.size == CLUSTER.destinations[0].size
    agx = list(CLUSTER.node_names).index("orin-agx-0")
    assert scenario.slots[agx] == 2
    assert scenario.watts[agx] == 20.0  # of each of its two slots
    assert scenario.is_edge is not None
    assert scenario.is_edge.sum() == 48


def test_a_folder_gives_back_what_was_saved(tmp_path: Path) -> None:
    folder = tmp_path / "inputs"
    measured = replace(INPUTS, true_seconds=INPUTS.seconds * 1.5)
    save_inputs(measured, folder)
    found = load_inputs(folder)
    assert found.pairs == measured.pairs
    assert found.source == measured.source
    assert found.true_seconds is not None
    np.testing.assert_allclose(found.true_seconds, INPUTS.seconds * 1.5, rtol=1e-6)
    np.testing.assert_array_equal(found.is_held_out, measured.is_held_out)
    save_inputs(INPUTS, folder)
    assert load_inputs(folder).true_seconds is None
    again = tmp_path / "again"
    save_inputs(load_inputs(folder), again)
    assert inputs_digest(load_inputs(again)) == inputs_digest(load_inputs(folder))


def test_a_torn_folder_and_another_scenarios_inputs_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "inputs"
    save_inputs(INPUTS, folder)
    arrays = folder / "arrays.npz"
    arrays.write_bytes(arrays.read_bytes()[:2000])
    with pytest.raises(InputsError, match="not the file that was saved"):
        load_inputs(folder)
    with pytest.raises(InputsError, match="holds no manifest"):
        load_inputs(tmp_path / "nowhere")
    smaller = replace(CLUSTER, models=CLUSTER.models[:5])
    with pytest.raises(InputsError, match="not of scenario drlm"):
        scenario_of(smaller, INPUTS)
    assert len(pair_names(smaller)) < len(INPUTS.pairs)


def test_inputs_with_an_array_missing_or_impossible_are_refused(tmp_path: Path) -> None:
    save_inputs(INPUTS, tmp_path / "inputs")
    whole = load_artifact(tmp_path / "inputs", "simulation-inputs")
    arrays = {name: value for name, value in whole.arrays.items() if name != "seconds"}
    save_artifact(tmp_path / "less", replace(whole, arrays=arrays))
    with pytest.raises(InputsError, match="is inconsistent"):
        load_inputs(tmp_path / "less")
    save_artifact(tmp_path / "wrong", replace(whole, details={**whole.details, "noise": 9.0}))
    with pytest.raises(InputsError, match="noise is 9"):
        load_inputs(tmp_path / "wrong")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"noise": float("nan")}, "noise is nan"),
        ({"seconds": INPUTS.seconds[:, :-1]}, "seconds has shape"),
        ({"quality": INPUTS.quality + 1.0}, "outside 0 to 1"),
        ({"true_seconds": -INPUTS.seconds}, "above 0"),
    ],
)
def test_impossible_inputs_are_refused(change: dict[str, object], found: str) -> None:
    with pytest.raises(InputsError, match=found):
        replace(INPUTS, **change)  # type: ignore[arg-type]
