from pathlib import Path
from typing import Any

import yaml

ROLE = Path(__file__).resolve().parents[3] / "deploy" / "ansible" / "roles" / "edge_agent"


def load(file: str) -> Any:
    return yaml.safe_load((ROLE / file).read_text(encoding="utf-8"))


def test_every_public_variable_is_described_and_has_its_stated_default() -> None:
    options = load("meta/argument_specs.yml")["argument_specs"]["main"]["options"]
    stated = {name: option["default"] for name, option in options.items()}
    assert stated == load("defaults/main.yml")
    assert all(option["description"] for option in options.values())


def test_every_model_setting_that_is_described_is_written_to_the_settings_file() -> None:
    options = load("meta/argument_specs.yml")["argument_specs"]["main"]["options"]
    described = set(options["edge_agent_models"]["options"]) - {"name"}
    written = load("vars/main.yml")
    assert described == {
        *written["_edge_agent_model_counts"],
        *written["_edge_agent_model_amounts"],
    }
