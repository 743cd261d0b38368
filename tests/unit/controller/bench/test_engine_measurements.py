from pathlib import Path

import pytest

from controller.bench.engine_measurements import LIMITS, Limit, agent_settings
from controller.client import Connection
from edge_agent.config import load_settings


def test_the_agents_settings_carry_the_limit(tmp_path: Path):
    connection = Connection("127.0.0.1:5000", False, tmp_path / "ca.pem")
    limit = Limit("half", 1, 0.5)
    path = tmp_path / "agent.toml"
    path.write_text(agent_settings(connection, tmp_path, tmp_path / "models", limit, ["a", "b"]))
    settings = load_settings(path)
    assert settings.node_id == "half"
    assert [(m.name, m.threads, m.cpu_share_ratio, m.slots) for m in settings.models] == [
        ("a", 1, 0.5, 1),
        ("b", 1, 0.5, 1),
    ]
    assert settings.hardware == limit.hardware


def test_limits_are_told_apart_by_their_hardware():
    assert len({limit.hardware for limit in LIMITS}) == len(LIMITS)


@pytest.mark.parametrize("limit", LIMITS)
def test_names_of_limits_are_folder_names(limit):
    assert Path(limit.name).name == limit.name
