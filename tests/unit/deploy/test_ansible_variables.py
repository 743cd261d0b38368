import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import jinja2
import yaml
from jinja2.nativetypes import NativeEnvironment

from edge_agent.config import LinkSettings, MemorySettings, load_settings
from edge_agent.engine.remote.settings import RemoteSettings

ROLE = Path(__file__).resolve().parents[3] / "deploy" / "ansible" / "roles" / "edge_agent"


def load(file: str) -> Any:
    return yaml.safe_load((ROLE / file).read_text(encoding="utf-8"))


def test_every_public_variable_is_described_and_has_its_stated_default() -> None:
    options = load("meta/argument_specs.yml")["argument_specs"]["main"]["options"]
    stated = {name: option["default"] for name, option in options.items()}
    assert stated == load("defaults/main.yml")
    assert all(option["description"] for option in options.values())


def test_agent_joins_the_groups_of_sensors_and_gpus_that_a_host_has() -> None:
    wanted = load("defaults/main.yml")["edge_agent_supplementary_groups"]
    assert {"video", "render"} <= set(wanted)
    user = next(task for task in load("tasks/install.yml") if "ansible.builtin.user" in task)
    template = NativeEnvironment().from_string(user["ansible.builtin.user"]["groups"].strip())
    host = {"getent_group": {"video": ["x", "44", ""], "audio": ["x", "29", ""]}}
    joined = template.render(edge_agent_supplementary_groups=wanted, ansible_facts=host)
    assert joined == ["video"]


def test_every_model_setting_that_is_described_is_written_to_the_settings_file() -> None:
    options = load("meta/argument_specs.yml")["argument_specs"]["main"]["options"]
    # "remote" is written as it stands, a table of its own.
    described = set(options["edge_agent_models"]["options"]) - {"name", "remote"}
    written = load("vars/main.yml")
    assert described == {
        *written["_edge_agent_model_counts"],
        *written["_edge_agent_model_amounts"],
        *written["_edge_agent_model_switches"],
        *written["_edge_agent_model_texts"],
    }


def test_remote_and_memory_settings_of_the_role_are_the_agents() -> None:
    options = load("meta/argument_specs.yml")["argument_specs"]["main"]["options"]
    remote = options["edge_agent_models"]["options"]["remote"]["options"]
    assert set(remote) == {entry.name for entry in fields(RemoteSettings)}
    memory = options["edge_agent_memory"]["options"]
    assert set(memory) == {entry.name for entry in fields(MemorySettings)}
    link = options["edge_agent_link"]["options"]
    assert set(link) == {entry.name for entry in fields(LinkSettings)}


def test_settings_file_with_remote_models_and_a_memory_budget_is_read_by_the_agent(
    tmp_path: Path,
) -> None:
    template = (ROLE / "templates" / "agent.toml.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(trim_blocks=True)
    environment.filters |= {
        "comment": lambda text: f"# {text}",
        "to_json": lambda value, **_: json.dumps(value),
        "bool": bool,
        "ternary": lambda value, yes, no: yes if value else no,
    }
    variables = {**load("defaults/main.yml"), **load("vars/main.yml"), "ansible_managed": "x"}
    variables |= {
        "edge_agent_node_id": "gpu-1",
        "edge_agent_controller_address": "controller:1",
        "edge_agent_memory": {"budget_ratio": 0.5, "idle_seconds": 600},
        "edge_agent_link": {"is_metered": True, "transmit_usd_per_gigabyte": 2},
        "edge_agent_models": [
            {
                "name": "large",
                "slots": 16,
                "is_pinned": True,
                "remote": {
                    "base_url": "https://api.example/v1",
                    "parameters_billions": 70,
                    "omit_parameters": ["top_k"],
                    "calibrate": False,
                },
            },
            {"name": "small", "load_at_start": False},
        ],
    }
    path = tmp_path / "agent.toml"
    path.write_text(environment.from_string(template).render(**variables))
    settings = load_settings(path, {})
    large, small = settings.models
    assert large.remote is not None
    assert (large.remote.base_url, large.remote.calibrate) == ("https://api.example/v1", False)
    assert large.remote.omit_parameters == ("top_k",)
    assert (large.slots, large.is_pinned, small.load_at_start) == (16, True, False)
    assert (settings.memory.budget_ratio, settings.memory.idle_seconds) == (0.5, 600.0)
    assert settings.link == LinkSettings(True, 0.0, 2.0)
