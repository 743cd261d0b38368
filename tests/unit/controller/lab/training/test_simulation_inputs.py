from dataclasses import replace

import numpy as np
import pytest

from controller.domain.hardware import DeviceClass
from controller.lab.simulator.inputs import InputsError, pair_names, scenario_of
from controller.lab.simulator.scenario_file import read_scenario
from controller.lab.training.fit_predictors import fit, split_queries
from controller.lab.training.measurement_table import TrainingTable
from controller.lab.training.paper_setting import TIME_SIGMA, PaperSetting, paper_cluster, table_one
from controller.lab.training.simulation_inputs import simulation_inputs

DEVICES = paper_cluster().devices


def embed(texts):
    found = [np.random.default_rng(ord(text[0])).normal(size=384) for text in texts]
    return np.array(found, dtype=np.float32)


@pytest.fixture(scope="module")
def setting():
    """Table I's placements with forty made-up queries."""
    rng = np.random.default_rng(0)
    models, placements = table_one()
    queries = 40
    label = np.arange(queries) % 2
    first = np.full((queries, 85), 0.1)
    true = first + rng.uniform(1, 30, 85)
    correct = rng.random((queries, 23)) < 0.5
    tokens = np.full((queries, 23), 50.0) + 100 * label[:, None]
    column = [models.index(model) for model, _ in placements]
    query = np.repeat(np.arange(queries), 85)
    model = np.tile(column, queries)
    table = TrainingTable(
        prompts=tuple(f"{'ab'[kind]} word{at}" for at, kind in enumerate(label)),
        classes=("biology", "mathematics"),
        class_index=label,
        model_names=tuple(model.name for model in models),
        models=models,
        devices=DEVICES,
        query=query,
        model=model,
        device=np.tile([DEVICES.index(device) for _, device in placements], queries),
        seconds=true.ravel(),
        completion_tokens=tokens[query, model],
        score_ratio=correct[query, model].astype(float),
    )
    return PaperSetting(
        table, models, DEVICES, placements, true, true, first, correct,
        np.zeros_like(correct), tokens, {}, (),
    )  # fmt: skip


@pytest.fixture(scope="module")
def fitted(setting):
    return fit(setting.table, embed, seed=3, boosted_trees=80, forest_trees=10, threads=1)[0]


def test_the_simulator_takes_what_was_fitted_on_the_papers_setting(setting, fitted):
    cluster = read_scenario("drlm")
    inputs = simulation_inputs(setting, fitted, embed, cluster, seed=3)
    assert inputs.pairs == pair_names(cluster)
    assert (inputs.is_held_out == split_queries(40, 3)).all()
    assert inputs.noise == TIME_SIGMA
    names = [f"{model.name}@{device.kind}" for model, device in setting.placements]
    for at in (0, 40, 84):
        column = names.index(inputs.pairs[at])
        assert inputs.true_seconds[:, at].tolist() == setting.true_seconds[:, column].tolist()
    assert np.corrcoef(np.log(inputs.seconds[0]), np.log(inputs.true_seconds[0]))[0, 1] > 0.8
    chosen = [model.name for model in cluster.configurations].index("gpt-oss-20b-z4")
    expected = setting.correct[:, setting.table.model_names.index("gpt-oss-20b-z4")]
    assert inputs.correct[:, chosen].tolist() == expected.tolist()
    scenario = scenario_of(cluster, inputs.part(inputs.is_held_out))
    assert scenario.quality.shape == (8, 23)


def test_a_cluster_with_other_devices_is_refused(setting, fitted):
    cluster = read_scenario("drlm")
    strange = replace(cluster, devices=(DeviceClass("TPU", 1, 1), *cluster.devices[1:]))
    with pytest.raises(InputsError, match="@TPU"):
        simulation_inputs(setting, fitted, embed, strange, seed=3)
