import asyncio
from pathlib import Path

import pytest

from controller.client import Connection
from controller.lab.bench.engine_measurements import (
    LIMITS,
    EngineMeasurementsError,
    Limit,
    MeasurementDesign,
    agent_settings,
    measure_engine,
)
from edge_agent.config import load_settings


def test_the_agents_settings_carry_the_limit(tmp_path: Path):
    connection = Connection("127.0.0.1:5000", False, tmp_path / "ca.pem")
    limit = Limit("half", 1, 0.5)
    path = tmp_path / "agent.toml"
    own = tmp_path / "own.yaml"
    path.write_text(
        agent_settings(connection, tmp_path, tmp_path / "models", limit, ["a", "b"], own)
    )
    settings = load_settings(path)
    assert settings.node_id == "half"
    assert [(m.name, m.threads, m.cpu_share_ratio, m.slots) for m in settings.models] == [
        ("a", 1, 0.5, 1),
        ("b", 1, 0.5, 1),
    ]
    assert settings.hardware == limit.hardware
    assert settings.catalog_path == own
    assert settings.models_path == tmp_path / "models"


def test_limits_are_told_apart_by_their_hardware():
    assert len({limit.hardware for limit in LIMITS}) == len(LIMITS)


@pytest.mark.parametrize("limit", LIMITS)
def test_names_of_limits_are_folder_names(limit):
    assert Path(limit.name).name == limit.name


@pytest.mark.parametrize("each", [1, 2, 4])
def test_each_model_is_asked_each_question_under_as_many_limits_as_wanted(each: int):
    design = MeasurementDesign(("questions",), models=("a", "b", "c"), limits_each=each)
    for model in range(3):
        asked = [part for limit in range(len(LIMITS)) for part in design.parts(limit, model)]
        assert sorted(asked) == sorted(list(range(len(LIMITS))) * each)
    if each < len(LIMITS):
        assert design.parts(0, 0) != design.parts(0, 1)
        assert design.parts(0, 0) != design.parts(1, 0)


@pytest.mark.parametrize("each", [0, 5])
def test_more_limits_than_there_are_cannot_be_asked_for(each: int):
    with pytest.raises(EngineMeasurementsError, match="4"):
        MeasurementDesign(("questions",), limits_each=each)


def test_a_folder_does_not_go_on_with_another_design(tmp_path: Path):
    whole = MeasurementDesign(("questions",), models=("a",))
    for limit in LIMITS:  # as if all were measured, so that no process is started
        folder = tmp_path / limit.name / "a"
        folder.mkdir(parents=True)
        (folder / "measurements.csv").write_text("")
    progress = asyncio.run(measure_engine(tmp_path, tmp_path / "models", whole))
    assert progress.is_complete
    other = MeasurementDesign(("questions",), models=("a",), sample=11)
    with pytest.raises(EngineMeasurementsError, match=r"design\.json"):
        asyncio.run(measure_engine(tmp_path, tmp_path / "models", other))
