"""The controller's settings: one TOML file, overridden by environment, overridden by flags.

Environment variables are `POINTSMAN_` + section + `_` + key in capitals, for instance
`POINTSMAN_BATCHING_WINDOW_SECONDS=0.5`.
"""

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pointsman.settings_table import TableReader, put, read_toml


class SettingsError(Exception):
    """The settings are wrong; the text lists everything that is."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where the controller listens, and for whom.

    Attributes:
        listen: Address (host:port) for gRPC: clients, operators and agents.
        http_listen: Address (host:port) for the OpenAI-compatible HTTP. Empty: off.
        data_dir: Folder for certificates and state.
        insecure: Serve without TLS. Only for one machine or a trusted network.
        tls_cert_file: PEM file of the certificate chain. Empty: a certificate is made in data_dir.
        tls_key_file: PEM file of the chain's private key.
        tls_names: More host names and addresses for the certificate made in data_dir.
        grace_seconds: Time for running answers to end after SIGTERM.
        log_level: Least level logged: debug, info, warning or error.
    """

    listen: str = "0.0.0.0:50551"
    http_listen: str = "127.0.0.1:8080"
    data_dir: Path = Path("~/.local/share/pointsman/controller")
    insecure: bool = False
    tls_cert_file: str = ""
    tls_key_file: str = ""
    tls_names: tuple[str, ...] = ()
    grace_seconds: float = 10.0
    log_level: str = "info"


@dataclass(frozen=True, slots=True)
class BatchingSettings:
    """When a window of requests closes.

    Attributes:
        window_seconds: Longest wait for other requests to join a batch (the paper's interval is 1
            s).
        max_requests: Number of requests that closes a window at once (the paper's R_m is 128).
        quiet_seconds: Close the window early when the fleet is idle and no request has arrived for
            this long. 0: always wait the whole interval, as in the paper.
        max_waiting_requests: Maximum number of waiting requests. More are refused.
        max_attempts: Maximum number of dispatches of one request.
    """

    window_seconds: float = 1.0
    max_requests: int = 128
    quiet_seconds: float = 0.1
    max_waiting_requests: int = 2048
    max_attempts: int = 3


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    """How a batch is decided.

    Attributes:
        policy: Policy that decides. `edge-controller policy set` overrides policy, weights and
            normalisation until one of the three changes here.
        weights: Weights of quality, cost, energy and time. Scaled to a sum of 1.
        normalisation: Scaling of the four terms: payoff, minmax or random.
        budget_seconds: Time limit of the policy for one batch.
        seed: Seed of the policy's random generator.
        ppo_artifacts: Folder written by `edge-controller lab train`, with `ppo` and `ppo-set`.
            Without the folder or the policy in it, `greedy-reward` decides.
        marginal_energy: Leave idle power out of the energy, for boards that are never switched off.
    """

    policy: str = "memetic"
    weights: tuple[float, ...] = (0.25, 0.25, 0.25, 0.25)
    normalisation: str = "payoff"
    budget_seconds: float = 0.05
    seed: int = 0
    ppo_artifacts: str = ""
    marginal_energy: bool = False


@dataclass(frozen=True, slots=True)
class QualitySettings:
    """Where expected quality comes from.

    Attributes:
        is_enabled: Estimate quality from similar prompts. False: use only the prior by model size.
        embedding_dir: Folder of the embedding model. Empty: the cache folder that `edge-controller
            embedding export` fills.
        max_prompts: Maximum number of prompts kept. Prompts with the oldest last outcome are
            dropped first.
        keep_days: Days a prompt is kept after its last outcome. 0: no limit.
    """

    is_enabled: bool = True
    embedding_dir: str = ""
    max_prompts: int = 1_000_000
    keep_days: float = 0.0


@dataclass(frozen=True, slots=True)
class PredictorSettings:
    """DRLM's predictors, which need the embedding model.

    Attributes:
        folder: Folder written by `edge-controller lab fit`. If set, quality, answer length and
            latency come from these predictors for every model and device they cover.
            Empty: not used.
    """

    folder: str = ""


@dataclass(frozen=True, slots=True)
class StorageSettings:
    """What is kept over restarts, in controller.db in the data_dir.

    Attributes:
        is_enabled: Keep nodes, calibrations and finished requests on disk. False: in memory only.
        keep_days: Days finished requests are kept.
        max_requests: Maximum number of finished requests kept.
        max_megabytes: Maximum size of the database. The oldest finished requests are dropped
            first.
        keep_prompts: Keep the text of prompts with finished requests, so they can be judged after
            a restart. Prompts can hold personal data.
    """

    is_enabled: bool = True
    keep_days: float = 30.0
    max_requests: int = 1_000_000
    max_megabytes: int = 2048
    keep_prompts: bool = False


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """What is expected of a connected agent.

    Attributes:
        health_interval_seconds: Time between two health reports of a node.
        lease_seconds: Silence after which a node counts as lost.
        probe_interval_seconds: Time between two measurements of the round trip.
        goodput_interval_seconds: Time between two measurements of goodput, of some kilobytes each,
            alternately to the node and back. Only idle links that are not metered are measured.
    """

    health_interval_seconds: float = 1.0
    lease_seconds: float = 10.0
    probe_interval_seconds: float = 5.0
    goodput_interval_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class OrderSettings:
    """Orders to nodes about their models: loading, unloading, measuring.

    Attributes:
        accept_seconds: Time for a node to acknowledge an order. After it the order fails (usually
            the agent is too old).
        silence_seconds: Maximum time between two reports on an order.
        total_seconds: Maximum time from an order to its end. Fetching a large file takes long.
        max_running: Maximum number of running orders. More are refused.
    """

    accept_seconds: float = 10.0
    silence_seconds: float = 300.0
    total_seconds: float = 7200.0
    max_running: int = 256


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """Deadlines of one request, counted by the controller.

    Attributes:
        first_token_seconds: Maximum time from dispatch to the engine's first sign of progress.
        progress_seconds: Maximum time between two signs of progress.
        total_seconds: Maximum time from admission to the last token.
        max_prompt_bytes: Maximum size of a prompt. Longer ones are refused.
        max_buffered_bytes: Maximum size of a client's unread answer text. A client beyond it is
            cancelled.
        kept_records: Maximum number of finished requests kept for `explain`.
    """

    first_token_seconds: float = 300.0
    progress_seconds: float = 60.0
    total_seconds: float = 900.0
    max_prompt_bytes: int = 1_000_000
    max_buffered_bytes: int = 1_000_000
    kept_records: int = 10_000


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """How much and how long the OpenAI-compatible HTTP waits for a client.

    Attributes:
        max_body_bytes: Maximum size of a request's body. Larger ones are refused. JSON can need
            several bytes for one byte of the prompt.
        body_seconds: Time for a request's body to arrive.
        hold_seconds: Time a stream's status line waits for the first event, so that a refusal is
            an HTTP error. Set it above batching.window_seconds: refusals come at a window's end.
        keep_alive_seconds: A stream sends a comment after this time without an event.
        write_seconds: Time for a client to take in what was sent. A slower client counts as gone.
    """

    max_body_bytes: int = 4_000_000
    body_seconds: float = 30.0
    hold_seconds: float = 1.5
    keep_alive_seconds: float = 10.0
    write_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything the controller can be told."""

    server: ServerSettings = field(default_factory=ServerSettings)
    batching: BatchingSettings = field(default_factory=BatchingSettings)
    routing: RoutingSettings = field(default_factory=RoutingSettings)
    quality: QualitySettings = field(default_factory=QualitySettings)
    predictors: PredictorSettings = field(default_factory=PredictorSettings)
    storage: StorageSettings = field(default_factory=StorageSettings)
    fleet: FleetSettings = field(default_factory=FleetSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    orders: OrderSettings = field(default_factory=OrderSettings)


def load_settings(
    path: Path | None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[tuple[str, str], object] | None = None,
) -> Settings:
    """Read, merge and check the settings.

    Args:
        path: the TOML file; None reads none.
        environ: environment variables; None takes the process's.
        overrides: (section, key) to value, from the command line; None values are left out.

    Raises:
        SettingsError: with everything that is wrong, one line each.
    """
    try:
        table = read_toml(path)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    reader = TableReader(splits_texts=True)
    for name, value in list(table.items()):
        if not isinstance(value, dict):
            reader.problems.append(f"{name}: belongs in a section such as [server]")
            del table[name]
    sections = tuple(f"POINTSMAN_{entry.name.upper()}_" for entry in dataclasses.fields(Settings))
    variables = os.environ if environ is None else environ
    # Clients have variables of the same prefix.
    ours = {name: text for name, text in variables.items() if name.startswith(sections)}
    reader.put_variables(table, ours, "POINTSMAN_", Settings)
    for (section, key), given in (overrides or {}).items():
        if given is not None:
            put(table, f"{section}.{key}", given)
    settings = reader.build(Settings, table)
    problems = reader.problems + _check(settings)
    if problems:
        raise SettingsError("\n".join(problems))
    return dataclasses.replace(
        settings,
        server=dataclasses.replace(
            settings.server, data_dir=Path(settings.server.data_dir).expanduser()
        ),
    )


def _check(settings: Settings) -> list[str]:
    problems = []
    server, routing = settings.server, settings.routing
    problems += [f"server.listen: {why}" for why in _address_problems(server.listen)]
    if server.http_listen:
        problems += [f"server.http_listen: {why}" for why in _address_problems(server.http_listen)]
    if bool(server.tls_cert_file) != bool(server.tls_key_file):
        problems.append("server.tls_cert_file and server.tls_key_file belong together")
    if server.log_level not in ("debug", "info", "warning", "error"):
        problems.append("server.log_level: must be debug, info, warning or error")
    if len(routing.weights) != 4:
        problems.append("routing.weights: four numbers: quality, cost, energy, time")
    elif min(routing.weights) < 0 or not 0 < sum(routing.weights) < math.inf:
        problems.append("routing.weights: none negative, and a sum above 0")
    if routing.normalisation not in ("payoff", "minmax", "random"):
        problems.append("routing.normalisation: must be payoff, minmax or random")
    for name in _NOT_NEGATIVE:
        if not 0 <= _value(settings, name) < math.inf:
            problems.append(f"{name}: must be 0 or more")
    for name in _ABOVE_ZERO:
        if not 0 < _value(settings, name) < math.inf:
            problems.append(f"{name}: must be above 0")
    if settings.fleet.lease_seconds < 2 * settings.fleet.health_interval_seconds:
        problems.append("fleet.lease_seconds: at least twice health_interval_seconds")
    return problems


_NOT_NEGATIVE: Final = (
    "server.grace_seconds",
    "batching.window_seconds",
    "batching.quiet_seconds",
    "routing.seed",
    "quality.keep_days",
    "limits.kept_records",
    "gateway.hold_seconds",
)
_ABOVE_ZERO: Final = (
    "batching.max_requests",
    "batching.max_waiting_requests",
    "batching.max_attempts",
    "routing.budget_seconds",
    "quality.max_prompts",
    "storage.keep_days",
    "storage.max_requests",
    "storage.max_megabytes",
    "fleet.health_interval_seconds",
    "fleet.lease_seconds",
    "fleet.probe_interval_seconds",
    "fleet.goodput_interval_seconds",
    "orders.accept_seconds",
    "orders.silence_seconds",
    "orders.total_seconds",
    "orders.max_running",
    "limits.first_token_seconds",
    "limits.progress_seconds",
    "limits.total_seconds",
    "limits.max_prompt_bytes",
    "limits.max_buffered_bytes",
    "gateway.max_body_bytes",
    "gateway.body_seconds",
    "gateway.keep_alive_seconds",
    "gateway.write_seconds",
)


def _value(settings: Settings, name: str) -> float:
    section, _, key = name.partition(".")
    return float(getattr(getattr(settings, section), key))


def _address_problems(address: str) -> list[str]:
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and int(port) <= 65535:
        return []
    return [f"must be host:port such as 0.0.0.0:50551, not {address!r}"]
