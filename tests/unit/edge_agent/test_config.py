import dataclasses
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from edge_agent.config import (
    ControllerSettings,
    ModelSettings,
    PowerSettings,
    Settings,
    load_settings,
)
from edge_agent.engine.remote.settings import RemoteSettings
from edge_agent.errors import UsageError

ALL = """
node_id = "pi-5"
kind = "edge"
data_dir = "/var/lib/agent"

[controller]
address = "controller.example:50551"
ca_file = "/etc/ca.pem"

[power]
idle_watts = 3
max_watts = 12.5

[[models]]
name = "smollm2"
slots = 2

[[models]]
name = "gemma"
"""


def load(tmp_path: Path, text: str, **environ: str) -> Settings:
    path = tmp_path / "agent.toml"
    path.write_text(text, encoding="utf-8")
    return load_settings(path, environ)


def problems_of(tmp_path: Path, text: str, **environ: str) -> list[str]:
    with pytest.raises(UsageError) as failure:
        load(tmp_path, text, **environ)
    return str(failure.value).splitlines()


def test_file_is_read(tmp_path: Path) -> None:
    settings = load(tmp_path, ALL)
    assert settings.node_id == "pi-5"
    assert settings.controller == ControllerSettings(
        "controller.example:50551", ca_file="/etc/ca.pem"
    )
    assert settings.power == PowerSettings(3.0, 12.5)
    assert settings.models == (ModelSettings("smollm2", slots=2), ModelSettings("gemma"))
    assert settings.models_path == Path("/var/lib/agent/models")
    assert settings.socket_path == Path("/var/lib/agent/status.sock")


def test_defaults_need_no_file_and_name_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "pi-5.example.org")
    settings = load_settings(None, {})
    assert settings.node_id == "pi-5"
    assert settings.data_dir.is_absolute()
    assert settings.models == ()
    assert not settings.controller.insecure


def test_file_is_overridden_by_environment_and_that_by_flags(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(ALL, encoding="utf-8")
    settings = load_settings(
        path,
        {
            "EDGE_AGENT_KIND": "cloud",
            "EDGE_AGENT_NODE_ID": "from-environment",
            "EDGE_AGENT_CONTROLLER_INSECURE": "yes",
            "EDGE_AGENT_CONTROLLER_ADDRESS": "env.example:1",
            "EDGE_AGENT_POWER_MAX_WATTS": "20",
            "POINTSMAN_SERVER_LISTEN": "not ours",
        },
        {
            "node_id": "from-flag",
            "controller.address": "flag.example:2",
            "hardware": None,
            "models": [{"name": "tiny", "threads": 2}],
        },
    )
    assert (settings.node_id, settings.kind) == ("from-flag", "cloud")
    assert settings.controller.address == "flag.example:2"
    assert settings.controller.insecure is True
    assert settings.controller.ca_file == "/etc/ca.pem"
    assert settings.power.max_watts == 20.0
    assert settings.models == (ModelSettings("tiny", threads=2),)


def test_everything_wrong_is_told_at_once(tmp_path: Path) -> None:
    text = """
    nod_id = "x"
    kind = "fog"
    drain_seconds = "long"
    [controller]
    adress = "x"
    insecure = "perhaps"
    [power]
    idle_watts = 5
    [[models]]
    slots = 0
    [[models]]
    name = "a"
    slots = 1.5
    """
    problems = "\n".join(problems_of(tmp_path, text, EDGE_AGENT_LOG_LEVEL="loud"))
    for part in (
        "nod_id: no such setting; did you mean 'node_id'?",
        "kind: edge or cloud, not 'fog'",
        "drain_seconds: must be a number, not 'long'",
        "controller.adress: no such setting; did you mean 'address'?",
        "controller.insecure: must be true or false, not 'perhaps'",
        "power.idle_watts and power.max_watts belong together",
        "models[0]: name is missing",
        "models[1].slots: must be a whole number, not 1.5",
        "log_level: debug, info, warning or error, not 'loud'",
    ):
        assert part in problems


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('node_id = "has space"\n', "node_id"),
        ('node_id = "-dash-first"\n', "node_id"),
        (f'node_id = "{"x" * 64}"\n', "node_id"),
        ("node_id = 5\n", "node_id: must be text, not 5"),
        ("drain_seconds = -1\n", "drain_seconds"),
        ("drain_seconds = nan\n", "drain_seconds"),
        ("drain_seconds = true\n", "drain_seconds: must not be True"),
        ("[power]\nidle_watts = -1\nmax_watts = 5\n", "power.idle_watts"),
        ("[power]\nidle_watts = nan\nmax_watts = 5\n", "power.idle_watts"),
        ("[power]\nidle_watts = 9\nmax_watts = 5\n", "power.max_watts: at least idle_watts"),
        ("[power]\ntransmit_watts = inf\n", "power.transmit_watts"),
        ('[[models]]\nname = "a"\n[[models]]\nname = "a"\n', "'a' is listed twice"),
        ('[[models]]\nname = ""\n', "models[0]: name is missing"),
        ('[[models]]\nname = "a"\nslots = 257\n', "models a: slots"),
        ('[[models]]\nname = "a"\nthreads = -1\n', "models a: threads"),
        ('[[models]]\nname = "a"\ncontext_tokens = -1\n', "models a: context_tokens must be 0 to"),
        (f'[[models]]\nname = "a"\ncontext_tokens = {(1 << 20) + 1}\n', "not 1048577"),
        ('[[models]]\nname = "a"\ncpu_share_ratio = 0\n', "models a: cpu_share_ratio"),
        ('[[models]]\nname = "a"\ncpu_share_ratio = 1.1\n', "models a: cpu_share_ratio"),
        ('[[models]]\nname = "a"\nrequest_usd = -1\n', "models a: prices"),
        ('[[models]]\nname = "a"\nprompt_usd_per_token = nan\n', "models a: prices"),
        ('controller = "host:1"\n', "controller: must be a table"),
        ("models = 5\n", "models[0]: must be a table"),
        ('models = ["a"]\n', "models[0]: must be a table"),
        ("power = []\n", "power: must be a table"),
    ],
)
def test_wrong_value_is_refused_by_its_name(tmp_path: Path, text: str, named: str) -> None:
    (problem,) = problems_of(tmp_path, text)
    assert named in problem


def test_models_cannot_come_from_the_environment(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path, "", EDGE_AGENT_MODELS="smollm2")
    assert problem == "EDGE_AGENT_MODELS: models are listed in the settings file"


def test_section_that_is_no_table_is_told_also_beside_a_variable_of_it(tmp_path: Path) -> None:
    variable = {"EDGE_AGENT_CONTROLLER_ADDRESS": "host:1"}
    (problem,) = problems_of(tmp_path, 'controller = "host:1"\n', **variable)
    assert problem == "controller: must be a table"
    (problem,) = problems_of(tmp_path, "", EDGE_AGENT_CONTROLLER="host:1", **variable)
    assert problem == "controller: must be a table"


def test_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"missing\.toml: cannot be read: No such file"):
        load_settings(tmp_path / "missing.toml", {})
    (tmp_path / "bad.toml").write_text("[controller\n")
    with pytest.raises(UsageError, match=r"bad\.toml: not valid TOML"):
        load_settings(tmp_path / "bad.toml", {})


def described(cls: type[Any]) -> list[str]:
    _, _, section = (cls.__doc__ or "").partition("Attributes:")
    return [name for name, _ in re.findall(r"^ {8}(\w+): (\S.*)$", section, re.MULTILINE)]


REMOTE = """
[[models]]
name = "large"
completion_usd_per_token = 2e-6
[models.remote]
base_url = "https://api.example.com/v1"
parameters_billions = 70
"""


def test_remote_model_is_a_table_of_its_model(tmp_path: Path) -> None:
    text = REMOTE + 'omit_parameters = ["top_k"]\n[[models]]\nname = "smollm2"\n'
    large, small = load(tmp_path, text).models
    assert large.remote == RemoteSettings(
        "https://api.example.com/v1", parameters_billions=70.0, omit_parameters=("top_k",)
    )
    assert large.has_price
    assert (small.remote, small.has_price) == (None, False)


def test_everything_wrong_with_a_remote_model_is_told_at_once(tmp_path: Path) -> None:
    text = """
    [[models]]
    name = "large"
    [models.remote]
    base_ur = "http://gpu"
    model = 5
    api_key_file = "/etc/key"
    api_key_env = "KEY"
    context_tokens = -1
    omit_parameters = "top_k"
    first_token_seconds = 0
    calibrate = "perhaps"
    decode_tokens_per_second = nan
    """
    problems = problems_of(tmp_path, text)
    for part in (
        "models[0].remote.base_ur: no such setting; did you mean 'base_url'?",
        "models[0].remote: base_url is missing",
        "models[0].remote: parameters_billions is missing",
        "models[0].remote.model: must be text, not 5",
        "models large: remote.api_key_file and api_key_env: one of them",
        "models large: remote.context_tokens: 0 or more",
        "models[0].remote.omit_parameters: must be a list of texts, not 'top_k'",
        "models large: remote.first_token_seconds: above 0",
        "models[0].remote.calibrate: must be true or false, not 'perhaps'",
        "models large: remote.decode_tokens_per_second: above 0, not nan",
    ):
        assert part in problems
    assert len(problems) == 10


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('base_url = "gpu-server:8080"', "base_url"),
        ('base_url = "ftp://gpu/v1"', "base_url"),
        ('base_url = "http:///v1"', "base_url"),
        ('base_url = "http://gpu:port/v1"', "base_url"),
        ('base_url = "https://gpu/v1?key=x"', "base_url"),
        ('base_url = "https://me:hunter2@gpu/v1"', "base_url: no user or password"),
        ('base_url = "http://gpu/v1"\napi_key_env = "sk-hunter2"', "api_key_env"),
        ("base_url = 5", "base_url: must be text"),
    ],
)
def test_wrong_remote_value_is_refused_without_showing_a_secret(
    tmp_path: Path, line: str, named: str
) -> None:
    """O5."""
    text = f'[[models]]\nname = "a"\n[models.remote]\nparameters_billions = 1\n{line}\n'
    (problem,) = problems_of(tmp_path, text)
    assert named in problem
    assert "hunter2" not in problem


def test_remote_that_is_no_table_is_told(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path, '[[models]]\nname = "a"\nremote = "http://gpu"\n')
    assert problem == "models[0].remote: must be a table"


@pytest.mark.parametrize(
    "cls", [Settings, ControllerSettings, PowerSettings, ModelSettings, RemoteSettings]
)
def test_every_setting_has_its_sentence(cls: type[Any]) -> None:
    assert described(cls) == [field.name for field in dataclasses.fields(cls)]
