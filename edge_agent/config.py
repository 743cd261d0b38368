"""The agent's settings: one TOML file, overridden by environment, overridden by flags."""

import difflib
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, TypeVar, get_type_hints
from urllib.parse import urlsplit

from edge_agent.errors import UsageError
from edge_agent.limits import limit_problems

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T", int, float)

_NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """Where the controller is.

    Attributes:
        address: host:port.
        insecure: True connects without TLS; only for one machine or a trusted network.
        ca_file: PEM of the authority to trust; empty trusts the system's.
        server_name: name expected in the certificate, when it differs from the address.
    """

    address: str = ""
    insecure: bool = False
    ca_file: str = ""
    server_name: str = ""


@dataclass(frozen=True, slots=True)
class PowerSettings:
    """Power of the whole board; both or neither. Without them a table of boards is asked.

    Attributes:
        idle_watts: drawn when idle.
        max_watts: drawn when fully busy.
        transmit_watts: extra while sending.
        receive_watts: extra while receiving.
        pmic_scale: a Pi 5's power divided by the sum of its measured rails; unset takes 1.145.
        pmic_offset_watts: what a Pi 5 draws beside its measured rails; unset takes 0.588.
    """

    idle_watts: float | None = None
    max_watts: float | None = None
    transmit_watts: float | None = None
    receive_watts: float | None = None
    pmic_scale: float | None = None
    pmic_offset_watts: float | None = None


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """Memory that loaded models may take together, and when they give it back.

    Attributes:
        budget_bytes: at most so much; 0 goes by the next setting.
        budget_ratio: at most this share of the machine's memory; 0 takes what is available when
            the agent starts, less the reserve.
        reserve_bytes: left to everything else when neither of the two is set.
        idle_seconds: a model that has answered nothing for so long is unloaded; 0 never does.
        drain_seconds: how long running answers may go on when their model is unloaded.
    """

    budget_bytes: int = 0
    budget_ratio: float = 0.0
    reserve_bytes: int = 268_435_456
    idle_seconds: float = 0.0
    drain_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """An OpenAI-compatible server that answers for a model, which then needs no file here.

    Attributes:
        base_url: where it is, up to and with /v1, such as "http://gpu-server:8080/v1"; required.
        model: the model's name there; empty takes the only one that the server has.
        api_key_file: file with the API key, read anew for each request.
        api_key_env: environment variable with the API key, when there is no file.
        context_tokens: longest prompt plus answer; 0 takes what the server says, else 4096.
        family: model family that routing knows it by; the model's name when empty.
        parameters_billions: size that routing derives the expected quality from; above 0, required.
        quantisation: quantisation that routing derives the expected quality from.
        is_base_model: not tuned to follow instructions; chats are refused.
        supports_raw_prompts: false when the server has no /v1/completions; raw prompts are refused.
        supports_response_format: false when the server ignores response_format; requests for a
            format are refused then.
        omit_parameters: request parameters that the server refuses, such as ["top_k"].
        first_token_seconds: an answer that has not begun after so long is given up.
        calibrate: false sends no requests to measure its speed; nor does a model with a price.
        prefill_tokens_per_second: prompt tokens it reads a second; unset measures it.
        decode_tokens_per_second: tokens a second of one answer alone; unset measures it.
        saturated_decode_tokens_per_second: tokens a second of all slots; unset measures it.
    """

    base_url: str = ""
    model: str = ""
    api_key_file: str = ""
    api_key_env: str = ""
    context_tokens: int = 0
    family: str = ""
    parameters_billions: float = 0.0
    quantisation: str = "F16"
    is_base_model: bool = False
    supports_raw_prompts: bool = True
    supports_response_format: bool = True
    omit_parameters: tuple[str, ...] = ()
    first_token_seconds: float = 300.0
    calibrate: bool = True
    prefill_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    saturated_decode_tokens_per_second: float | None = None


PREFIX_REUSES: Final = ("off", "session", "system", "any")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """One model to be served.

    Attributes:
        name: its name in the catalogue; any name for a remote model.
        slots: sequences decoded at once.
        threads: decoding threads; 0 leaves one core to the agent.
        context_tokens: longest prompt plus answer of one sequence; 0 takes the catalogue's.
        gpu_layers: layers offloaded to a GPU.
        cpu_share_ratio: below 1 leaves the rest of its threads' time to the device's other work.
        prompt_usd_per_token: price that routing counts.
        completion_usd_per_token: price that routing counts.
        request_usd: price that routing counts.
        load_at_start: false leaves it unloaded until it is ordered (`models load`).
        is_pinned: never unloaded to make room or for being idle.
        prefix_reuse: whose held keys and values a prompt may start from: off, session (the same
            conversation), system (of others the whole system prompt, too) or any. A client can time
            its first token and so learn that somebody has sent the same text.
        remote: the server that answers for it; unset loads the model here.
    """

    name: str
    slots: int = 4
    threads: int = 0
    context_tokens: int = 0
    gpu_layers: int = 0
    cpu_share_ratio: float = 1.0
    prompt_usd_per_token: float = 0.0
    completion_usd_per_token: float = 0.0
    request_usd: float = 0.0
    load_at_start: bool = True
    is_pinned: bool = False
    prefix_reuse: str = "system"
    remote: RemoteSettings | None = None

    @property
    def has_price(self) -> bool:
        """Whether an answer costs money."""
        return any((self.prompt_usd_per_token, self.completion_usd_per_token, self.request_usd))


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything the agent can be told.

    Attributes:
        node_id: the node's name; the host's name when empty.
        kind: edge or cloud.
        hardware: what the node is, for people; read from the board when empty.
        data_dir: where models, calibrations and the status socket are.
        models_dir: where model files are; `data_dir/models` when empty.
        catalog_file: your own catalogue, added to the one that comes with the agent.
        drain_seconds: how long running answers may go on after SIGTERM.
        log_level: debug, info, warning or error.
        controller: where the controller is.
        power: what the board draws.
        memory: what loaded models may take together.
        models: what this node serves.
    """

    node_id: str = ""
    kind: str = "edge"
    hardware: str = ""
    data_dir: Path = Path("~/.local/share/pointsman/agent")
    models_dir: str = ""
    catalog_file: str = ""
    drain_seconds: float = 20.0
    log_level: str = "info"
    controller: ControllerSettings = field(default_factory=ControllerSettings)
    power: PowerSettings = field(default_factory=PowerSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    models: tuple[ModelSettings, ...] = ()

    @property
    def models_path(self) -> Path:
        """Where model files are."""
        return Path(self.models_dir).expanduser() if self.models_dir else self.data_dir / "models"

    @property
    def socket_path(self) -> Path:
        """Where `edge-agent status` asks."""
        return self.data_dir / "status.sock"

    @property
    def control_path(self) -> Path:
        """Where `edge-agent models load` and its like ask."""
        return self.data_dir / "control.sock"

    @property
    def catalog_path(self) -> Path | None:
        """The operator's own catalogue."""
        return Path(self.catalog_file).expanduser() if self.catalog_file else None


def load_settings(
    path: Path | None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Settings:
    """Read, merge and check the settings.

    Args:
        path: the TOML file; None reads none.
        environ: `EDGE_AGENT_` + key in capitals, such as EDGE_AGENT_CONTROLLER_ADDRESS.
        overrides: dotted key to value, from the command line; None values are left out.

    Raises:
        UsageError: with everything that is wrong, one line each.
    """
    problems: list[str] = []
    table = _read(path)
    for name, value in (os.environ if environ is None else environ).items():
        if name.startswith("EDGE_AGENT_"):
            _put_variable(table, name, value, problems)
    for key, given in (overrides or {}).items():
        if given is not None:
            _put(table, key, given)
    # What could not be read has its default here, which is never a second problem.
    settings = _complete(_build(Settings, "", table, problems))
    problems += _check(settings)
    if problems:
        raise UsageError("\n".join(problems))
    return settings


def _read(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from error


def _put_variable(table: dict[str, Any], name: str, value: str, problems: list[str]) -> None:
    key = name.removeprefix("EDGE_AGENT_").lower()
    for section in ("controller", "power", "memory"):
        if key.startswith(f"{section}_"):
            key = f"{section}.{key.removeprefix(f'{section}_')}"
            break
    if key.split(".")[0] == "models":
        problems.append(f"{name}: models are listed in the settings file")
        return
    _put(table, key, value)


def _put(table: dict[str, Any], key: str, value: object) -> None:
    section, _, leaf = key.rpartition(".")
    target = table.setdefault(section, {}) if section else table
    if isinstance(target, dict):  # `_build` tells of a section that is none
        target[leaf] = value


def _build(cls: type[Any], where: str, table: object, problems: list[str]) -> Any:
    if not isinstance(table, Mapping):
        problems.append(f"{where}: must be a table")
        return cls(**({"name": ""} if cls is ModelSettings else {}))
    hints = get_type_hints(cls)
    values: dict[str, object] = {}
    for key, value in table.items():
        label = f"{where}.{key}" if where else str(key)
        if key not in hints:
            near = difflib.get_close_matches(str(key), list(hints), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(hints)}"
            problems.append(f"{label}: no such setting; {hint}")
            continue
        if hints[key] in (ControllerSettings, PowerSettings, MemorySettings):
            values[key] = _build(hints[key], label, value, problems)
        elif hints[key] == RemoteSettings | None:
            is_built = value is None or isinstance(value, RemoteSettings)
            values[key] = value if is_built else _build(RemoteSettings, label, value, problems)
        elif hints[key] == tuple[ModelSettings, ...]:
            entries = value if isinstance(value, list | tuple) else [value]
            values[key] = tuple(
                entry
                if isinstance(entry, ModelSettings)
                else _build(ModelSettings, f"{label}[{index}]", entry, problems)
                for index, entry in enumerate(entries)
            )
        else:
            try:
                values[key] = _convert(hints[key], value)
            except ValueError as error:
                problems.append(f"{label}: {error}")
    if cls is ModelSettings and not values.get("name"):
        problems.append(f"{where}: name is missing")
        values["name"] = ""
    if cls is RemoteSettings:
        required = ("base_url", "parameters_billions")
        problems += [f"{where}: {key} is missing" for key in required if not table.get(key)]
    return cls(**values)


def _convert(kind: object, value: object) -> object:
    if kind is bool:
        text = str(value).lower()
        if text in ("true", "1", "yes"):
            return True
        if text in ("false", "0", "no"):
            return False
        raise ValueError(f"must be true or false, not {value!r}")
    if isinstance(value, bool):
        raise ValueError(f"must not be {value!r}")
    if kind is int:
        return _number(int, value, "a whole number")
    if kind in (float, float | None):
        return _number(float, value, "a number")
    if kind is Path:
        return Path(str(value))
    if kind == tuple[str, ...]:
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise ValueError(f"must be a list of texts, not {value!r}")
        return tuple(value)
    if not isinstance(value, str):
        raise ValueError(f"must be text, not {value!r}")
    return value


def _number(kind: Callable[[str], T], value: object, what: str) -> T:
    try:
        return kind(str(value))
    except ValueError:
        raise ValueError(f"must be {what}, not {value!r}") from None


def _complete(settings: Settings) -> Settings:
    return replace(
        settings,
        node_id=settings.node_id or socket.gethostname().split(".")[0],
        data_dir=Path(settings.data_dir).expanduser().absolute(),
    )


def _check(settings: Settings) -> list[str]:
    problems = []
    if not _NODE_ID.fullmatch(settings.node_id):
        problems.append(
            f"node_id: letters, digits, dots, dashes and underscores, not {settings.node_id!r}"
        )
    if settings.kind not in ("edge", "cloud"):
        problems.append(f"kind: edge or cloud, not {settings.kind!r}")
    if settings.log_level not in ("debug", "info", "warning", "error"):
        problems.append(f"log_level: debug, info, warning or error, not {settings.log_level!r}")
    if not settings.drain_seconds >= 0:
        problems.append("drain_seconds: 0 or more")
    power = settings.power
    if (power.idle_watts is None) != (power.max_watts is None):
        problems.append("power.idle_watts and power.max_watts belong together")
    for entry in fields(power):
        watts = getattr(power, entry.name)
        if watts is not None and not 0 <= watts < 1e6:
            problems.append(f"power.{entry.name}: 0 or more, not {watts}")
    if power.pmic_scale == 0:
        problems.append("power.pmic_scale: above 0; 1 takes the rails as they are")
    idle, busy = power.idle_watts, power.max_watts
    if idle is not None and busy is not None and idle > busy:
        problems.append("power.max_watts: at least idle_watts")
    problems += [f"memory.{problem}" for problem in _memory_problems(settings.memory)]
    names = [model.name for model in settings.models if model.name]
    problems += [f"models: {name!r} is listed twice" for name in {*names} if names.count(name) > 1]
    for model in settings.models:
        problems += [
            f"models {model.name}: {problem}"
            for problem in limit_problems(model.slots, model.context_tokens, 0)
        ]
        if model.threads < 0 or model.gpu_layers < 0:
            problems.append(f"models {model.name}: threads and gpu_layers are not negative")
        if model.prefix_reuse not in PREFIX_REUSES:
            problems.append(
                f"models {model.name}: prefix_reuse is one of {', '.join(PREFIX_REUSES)}"
            )
        if not 0 < model.cpu_share_ratio <= 1:
            problems.append(f"models {model.name}: cpu_share_ratio above 0, at most 1")
        prices = (model.prompt_usd_per_token, model.completion_usd_per_token, model.request_usd)
        if not all(0 <= price < 1e6 for price in prices):
            problems.append(f"models {model.name}: prices are 0 or more")
        if model.remote is not None:
            label = f"models {model.name}: remote"
            problems += [f"{label}.{problem}" for problem in _remote_problems(model.remote)]
    return problems


def _memory_problems(memory: MemorySettings) -> list[str]:
    problems = [
        f"{name}: 0 or more"
        for name in ("budget_bytes", "reserve_bytes", "idle_seconds", "drain_seconds")
        if not 0 <= getattr(memory, name) < 1e18
    ]
    if not 0 <= memory.budget_ratio <= 1:
        problems.append("budget_ratio: 0 to 1")
    if memory.budget_bytes and memory.budget_ratio:
        problems.append("budget_bytes and budget_ratio: one of them")
    return problems


def _remote_problems(remote: RemoteSettings) -> list[str]:
    problems = []
    url = urlsplit(remote.base_url)
    try:
        is_address = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # a port that is no number
        is_address = False
    if url.username is not None or url.password is not None:
        # Not shown: it is a secret.
        problems.append("base_url: no user or password in it; use api_key_file")
    elif remote.base_url and (not is_address or url.query or url.fragment):
        problems.append(
            f'base_url: an address such as "http://gpu-server:8080/v1", not {remote.base_url!r}'
        )
    if remote.api_key_file and remote.api_key_env:
        problems.append("api_key_file and api_key_env: one of them")
    if remote.api_key_env and not _VARIABLE.fullmatch(remote.api_key_env):
        # Not shown: what stands there in error may be the key itself.
        problems.append("api_key_env: the name of an environment variable, not the key")
    if remote.context_tokens < 0:
        problems.append("context_tokens: 0 or more")
    if not 0 <= remote.parameters_billions < 1e6:
        problems.append("parameters_billions: above 0; guess it where the vendor does not say")
    if not remote.first_token_seconds > 0:
        problems.append("first_token_seconds: above 0")
    for name in (
        "prefill_tokens_per_second",
        "decode_tokens_per_second",
        "saturated_decode_tokens_per_second",
    ):
        rate = getattr(remote, name)
        if rate is not None and not 0 < rate < 1e9:
            problems.append(f"{name}: above 0, not {rate}")
    return problems
