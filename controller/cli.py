"""The command `edge-controller`: parses, calls one function, prints."""

import asyncio
import dataclasses
import functools
import json
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
import grpc
from click.core import ParameterSource
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from controller import __version__
from controller.client import Client, ConnectError, Connection, connected
from pointsman.v1 import admin_pb2, router_pb2, types_pb2

T = TypeVar("T")


class CommandFailedError(click.ClickException):
    """A failure of exit code 1, told in one sentence."""

    exit_code = 1


class Wrong(click.ClickException):
    """Wrong usage, exit code 2."""

    exit_code = 2


def text(value: str) -> str:
    """A parameter's type: text that the wire can carry.

    Bytes that are not UTF-8 reach Python as lone surrogates.
    """
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise click.BadParameter("not valid UTF-8; check the terminal's encoding") from error
    return value


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="edge-controller")
def main() -> None:
    """Route LLM requests over a fleet of edge agents."""


# -- serve ----------------------------------------------------------------------------------------


@main.command()
@click.option("--config", type=click.Path(dir_okay=False, path_type=Path), help="TOML settings.")
@click.option("--listen", help="host:port for gRPC (clients, operators, agents).")
@click.option("--http-listen", help="host:port for the OpenAI-compatible HTTP; '' turns it off.")
@click.option("--data-dir", type=click.Path(file_okay=False, path_type=Path))
@click.option("--insecure", is_flag=True, default=None, help="Serve without TLS.")
@click.option("--tls-cert-file", help="PEM chain; without it a certificate is made in data-dir.")
@click.option("--tls-key-file", help="PEM key of the chain.")
@click.option("--tls-name", "tls_names", multiple=True, help="Further name of the certificate.")
@click.option("--policy", help="Routing policy at start.")
@click.option("--weights", help="quality,cost,energy,time, such as 0.4,0,0.2,0.4.")
@click.option("--window-seconds", type=float, help="Batching interval.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]))
def serve(
    config: Path | None,
    listen: str | None,
    http_listen: str | None,
    data_dir: Path | None,
    insecure: bool | None,
    tls_cert_file: str | None,
    tls_key_file: str | None,
    tls_names: tuple[str, ...],
    policy: str | None,
    weights: str | None,
    window_seconds: float | None,
    log_level: str | None,
) -> None:
    """Run the controller until SIGTERM or Ctrl-C."""
    from controller.config import SettingsError, load_settings
    from controller.telemetry.logs import configure_logs

    try:
        settings = load_settings(
            config,
            overrides={
                ("server", "listen"): listen,
                ("server", "http_listen"): http_listen,
                ("server", "data_dir"): data_dir,
                ("server", "insecure"): insecure,
                ("server", "tls_cert_file"): tls_cert_file,
                ("server", "tls_key_file"): tls_key_file,
                ("server", "tls_names"): tls_names or None,
                ("server", "log_level"): log_level,
                ("routing", "policy"): policy,
                ("routing", "weights"): weights,
                ("batching", "window_seconds"): window_seconds,
            },
        )
    except SettingsError as error:
        raise Wrong(str(error)) from error
    configure_logs(settings.server.log_level)
    from controller.api.grpc_server import ListenError
    from controller.app import Listening
    from controller.app import serve as run_controller
    from controller.errors import RouterError, UnknownPolicyError
    from controller.gateway.server import ListenError as HttpListenError

    def ready(listening: Listening) -> None:
        click.echo(
            json.dumps(
                {
                    "listen": listening.grpc_address,
                    "http": listening.http_address,
                    "ca_file": listening.ca_file,
                }
            )
        )
        sys.stdout.flush()

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await run_controller(settings, stop, ready)

    try:
        asyncio.run(run())
    except (SettingsError, UnknownPolicyError) as error:
        raise Wrong(str(error)) from error
    except (ListenError, HttpListenError, RouterError) as error:
        raise CommandFailedError(str(error)) from error
    except BaseException as error:
        for inner in _flatten(error):
            if isinstance(inner, ListenError | HttpListenError):
                raise CommandFailedError(str(inner)) from error
        raise


def _flatten(error: BaseException) -> Iterable[BaseException]:
    """Exceptions inside the groups that task groups raise."""
    inner = getattr(error, "exceptions", None)
    if inner is None:
        yield error
        return
    for one in inner:
        yield from _flatten(one)


# -- clients --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Target:
    """Which controller a command asks, and how it prints."""

    connection: Connection
    as_json: bool


def _asks_controller(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that name the controller, and give the command what they say as `target`.

    A subcommand that is not told something itself takes what its group was told.
    """

    @functools.wraps(command)
    def run(
        *arguments: Any,
        address: str,
        insecure: bool,
        ca_file: Path | None,
        as_json: bool,
        **others: Any,
    ) -> Any:
        context = click.get_current_context()
        target = _Target(Connection(address, insecure, ca_file), as_json)
        if isinstance(context.obj, _Target):
            target = _merged(context, context.obj, target)
        context.obj = target
        return command(*arguments, target=target, **others)

    wrapped: Callable[..., Any] = run
    for option in (
        click.option(
            "--ca-file",
            type=click.Path(dir_okay=False, path_type=Path),
            envvar="POINTSMAN_CA_FILE",
            help="PEM of the authority that signed the controller's certificate.",
        ),
        click.option(
            "--insecure", is_flag=True, envvar="POINTSMAN_INSECURE", help="Connect without TLS."
        ),
        click.option(
            "--controller",
            "address",
            default="localhost:50551",
            show_default=True,
            envvar="POINTSMAN_CONTROLLER",
            help="host:port of the controller.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
    ):
        wrapped = option(wrapped)
    return wrapped


def _merged(context: click.Context, group: _Target, own: _Target) -> _Target:
    def is_told(name: str) -> bool:
        return context.get_parameter_source(name) is ParameterSource.COMMANDLINE

    return _Target(
        Connection(
            own.connection.address if is_told("address") else group.connection.address,
            own.connection.insecure or group.connection.insecure,
            own.connection.ca_file if is_told("ca_file") else group.connection.ca_file,
        ),
        own.as_json or group.as_json,
    )


def _call(target: _Target, action: Callable[[Client], Awaitable[T]]) -> T:
    async def run() -> T:
        async with connected(target.connection) as client:
            return await action(client)

    return _run(run())


def _run(work: Coroutine[Any, Any, T]) -> T:
    try:
        return asyncio.run(work)
    except ConnectError as error:
        raise CommandFailedError(str(error)) from error
    except grpc.aio.AioRpcError as error:
        _fail(error)
    except KeyboardInterrupt:
        raise click.Abort from None


def _fail(error: grpc.aio.AioRpcError) -> NoReturn:
    wrong = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
    text = error.details() or error.code().name
    if error.code() in wrong:
        raise Wrong(text) from error
    raise CommandFailedError(f"{error.code().name.lower()}: {text}") from error


def _print_json(message: Message) -> None:
    click.echo(json.dumps(to_json(message), indent=2, ensure_ascii=False))


def to_json(message: Message) -> dict[str, Any]:
    """A message with the field names of the .proto files and every default filled in."""
    found: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return found


@main.command()
@click.argument("prompts", nargs=-1, type=text)
@click.option(
    "--file",
    "source",
    type=click.File("rb"),
    help='One request a line, text or JSON such as {"prompt": ..., "model": ...}; - is stdin.',
)
@click.option("--model", type=text, help="Ask for this model.")
@click.option("--max-tokens", type=int, default=256, show_default=True)
@click.option(
    "--policy", type=text, default="", help="Decide with this policy instead of the one in force."
)
@click.option("--weights", help="quality,cost,energy,time instead of those in force.")
@_asks_controller
def route(
    prompts: tuple[str, ...],
    source: Any,
    model: str | None,
    max_tokens: int,
    policy: str,
    weights: str | None,
    target: _Target,
) -> None:
    """Decide where a batch would go, and send nothing."""
    from controller import render

    requests = [_request(prompt, model, max_tokens) for prompt in prompts]
    requests += _requests_from_file(source, model, max_tokens) if source else []
    if not requests:
        raise click.UsageError("give at least one prompt, or --file")
    message = router_pb2.RouteRequest(
        requests=requests,
        policy=policy,
        weights=_parse_weights(weights) if weights is not None else None,
    )

    async def call(client: Client) -> router_pb2.RouteResponse:
        return await client.router.Route(message, timeout=30)

    response = _call(target, call)
    if target.as_json:
        _print_json(response)
    else:
        render.print_route(response)


def _request(prompt: str, model: str | None, max_tokens: int) -> types_pb2.InferenceRequest:
    return types_pb2.InferenceRequest(
        model=model or "",
        chat=types_pb2.Chat(messages=[types_pb2.ChatMessage(role="user", content=prompt)]),
        sampling=_sampling(max_tokens=max_tokens),
    )


def _sampling(**values: Any) -> types_pb2.SamplingParameters:
    try:
        return types_pb2.SamplingParameters(**values)
    except ValueError as error:  # a number outside the field's range
        raise Wrong(str(error)) from error


def _requests_from_file(
    source: Any, model: str | None, max_tokens: int
) -> list[types_pb2.InferenceRequest]:
    from google.protobuf.json_format import ParseDict, ParseError

    requests = []
    for number, raw in enumerate(source, 1):
        try:
            line = raw.decode().strip()
        except UnicodeDecodeError as error:
            raise Wrong(f"line {number}: not valid UTF-8 ({error.reason})") from error
        if not line:
            continue
        if not line.startswith("{"):
            requests.append(_request(line, model, max_tokens))
            continue
        try:
            message = ParseDict(json.loads(line), types_pb2.InferenceRequest())
        except (json.JSONDecodeError, ParseError) as error:
            raise Wrong(f"line {number}: {error}") from error
        if model and not message.model:
            message.model = model
        requests.append(message)
    return requests


def _parse_weights(text: str) -> types_pb2.ObjectiveWeights:
    try:
        quality, cost, energy, time = (float(part) for part in text.split(","))
    except ValueError as error:
        raise Wrong(f"--weights: four numbers quality,cost,energy,time, not {text!r}") from error
    return types_pb2.ObjectiveWeights(quality=quality, cost=cost, energy=energy, time=time)


@main.command()
@click.argument("prompt", type=text)
@click.option("--model", type=text, help="Ask for this model; otherwise the controller chooses.")
@click.option("--system", type=text, help="System message.")
@click.option("--raw", is_flag=True, help="Send the prompt as it stands, without a chat template.")
@click.option("--max-tokens", type=int, default=256, show_default=True)
@click.option("--temperature", type=float)
@click.option("--top-p", type=float)
@click.option("--top-k", type=int)
@click.option("--seed", type=int)
@click.option("--stop", type=text, multiple=True, help="End before this text; may be given again.")
@click.option("--request-id", type=text, default="", help="Your own id, for `explain`.")
@click.option("--min-quality", type=float, help="Least predicted quality, 0 to 1.")
@click.option("--deadline-seconds", type=float, help="Latest predicted finish.")
@click.option("--max-price-usd", type=float)
@click.option("--edge-only", is_flag=True, help="The prompt must not leave edge nodes.")
@click.option("--timeout", type=float, default=900.0, show_default=True, help="Seconds.")
@_asks_controller
def infer(
    prompt: str,
    model: str | None,
    system: str | None,
    raw: bool,
    max_tokens: int,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
    stop: tuple[str, ...],
    request_id: str,
    min_quality: float | None,
    deadline_seconds: float | None,
    max_price_usd: float | None,
    edge_only: bool,
    timeout: float,
    target: _Target,
) -> None:
    """Answer one prompt; the text streams to standard output, the account to standard error."""
    from controller import render

    message = types_pb2.InferenceRequest(
        request_id=request_id,
        model=model or "",
        sampling=_sampling(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop=stop,
        ),
        constraints=types_pb2.RequestConstraints(
            min_quality_ratio=min_quality,
            deadline_seconds=deadline_seconds,
            max_price_usd=max_price_usd,
            edge_only=edge_only,
        ),
    )
    if raw:
        message.prompt = prompt
    else:
        turns = [("system", system)] if system else []
        turns.append(("user", prompt))
        message.chat.messages.extend(
            types_pb2.ChatMessage(role=role, content=content) for role, content in turns
        )

    async def call(client: Client) -> tuple[str, router_pb2.Account]:
        pieces: list[str] = []
        stream = client.router.Infer(router_pb2.InferRequest(request=message), timeout=timeout)
        async for event in stream:
            match event.WhichOneof("event"):
                case "text":
                    pieces.append(event.text.text)
                    if not target.as_json:
                        click.echo(event.text.text, nl=False)
                        sys.stdout.flush()
                case "account":
                    return "".join(pieces), event.account
        raise CommandFailedError("the answer ended without its account")

    try:
        text, account = _call(target, call)
    except click.ClickException:
        if not target.as_json:
            click.echo()
        raise
    if target.as_json:
        body = {"text": text, "account": to_json(account)}
        click.echo(json.dumps(body, indent=2, ensure_ascii=False))
    else:
        click.echo()
        render.print_account(account)


@main.command()
@click.argument("request_id", type=text)
@_asks_controller
def explain(request_id: str, target: _Target) -> None:
    """Say why a request went where it went."""
    from controller import render

    async def call(client: Client) -> router_pb2.ExplainResponse:
        return await client.router.Explain(
            router_pb2.ExplainRequest(request_id=request_id), timeout=10
        )

    response = _call(target, call)
    if target.as_json:
        _print_json(response)
    else:
        render.print_explanation(request_id, response)


@main.command()
@click.argument("request_id")
@click.argument("score", type=click.FloatRange(0, 1))
@_asks_controller
def feedback(request_id: str, score: float, target: _Target) -> None:
    """Say how good a finished answer was: 0 wrong to 1 right.

    Similar prompts are routed by it from then on.
    """

    async def call(client: Client) -> router_pb2.FeedbackResponse:
        message = router_pb2.FeedbackRequest(request_id=request_id, score_ratio=score)
        return await client.router.Feedback(message, timeout=10)

    response = _call(target, call)
    if target.as_json:
        _print_json(response)


@main.group(invoke_without_command=True)
@_asks_controller
@click.pass_context
def nodes(context: click.Context, target: _Target) -> None:
    """List the nodes; drain, undrain or forget one."""
    from controller import render

    if context.invoked_subcommand is not None:
        return

    async def call(client: Client) -> admin_pb2.ListNodesResponse:
        return await client.admin.ListNodes(admin_pb2.ListNodesRequest(), timeout=10)

    response = _call(target, call)
    if target.as_json:
        _print_json(response)
    else:
        render.print_nodes(response)


@nodes.command()
@click.argument("node_id", type=text)
@_asks_controller
def drain(
    node_id: str,
    target: _Target,
) -> None:
    """Let a node finish what it has and send it nothing new."""
    _set_draining(target, node_id, True)


@nodes.command()
@click.argument("node_id", type=text)
@_asks_controller
def undrain(
    node_id: str,
    target: _Target,
) -> None:
    """Send a drained node requests again."""
    _set_draining(target, node_id, False)


def _set_draining(target: _Target, node_id: str, is_draining: bool) -> None:
    async def call(client: Client) -> admin_pb2.DrainNodeResponse:
        request = admin_pb2.DrainNodeRequest(node_id=node_id, is_draining=is_draining)
        return await client.admin.DrainNode(request, timeout=10)

    response = _call(target, call)
    if target.as_json:
        _print_json(response)
    else:
        click.echo(f"{node_id} is {response.node.state}")


@nodes.command()
@click.argument("node_id", type=text)
@_asks_controller
def forget(
    node_id: str,
    target: _Target,
) -> None:
    """Drop an offline node from the list."""

    async def call(client: Client) -> admin_pb2.ForgetNodeResponse:
        return await client.admin.ForgetNode(
            admin_pb2.ForgetNodeRequest(node_id=node_id), timeout=10
        )

    response = _call(target, call)
    if target.as_json:
        _print_json(response)
    else:
        click.echo(f"{node_id} is forgotten")


@main.group(invoke_without_command=True)
@_asks_controller
@click.pass_context
def policy(context: click.Context, target: _Target) -> None:
    """Show the policy in force; `policy set` changes it."""
    from controller import render

    if context.invoked_subcommand is not None:
        return

    async def call(client: Client) -> admin_pb2.GetPolicyResponse:
        return await client.admin.GetPolicy(admin_pb2.GetPolicyRequest(), timeout=10)

    response = _call(target, call)
    if target.as_json:
        _print_json(response)
    else:
        render.print_policy(response)


@policy.command("set")
@click.argument("name", type=text, required=False, default="")
@click.option("--weights", help="quality,cost,energy,time.")
@click.option("--normalisation", type=text, default="", help="payoff, minmax or random.")
@_asks_controller
def set_policy(
    name: str,
    weights: str | None,
    normalisation: str,
    target: _Target,
) -> None:
    """Change the policy, its weights or its normalisation from the next batch on."""
    if not (name or weights is not None or normalisation):
        raise click.UsageError("give a policy's name, --weights or --normalisation")
    request = admin_pb2.SetPolicyRequest(
        policy=name,
        weights=_parse_weights(weights) if weights is not None else None,
        normalisation=normalisation,
    )

    async def call(client: Client) -> admin_pb2.SetPolicyResponse:
        return await client.admin.SetPolicy(request, timeout=10)

    response = _call(target, call)
    if target.as_json:
        _print_json(response)
    else:
        values = response.weights
        click.echo(
            f"{response.policy}, weights quality {values.quality:g}, cost {values.cost:g}, "
            f"energy {values.energy:g}, time {values.time:g}, {response.normalisation}"
        )


# -- embedding ------------------------------------------------------------------------------------


@main.group()
def embedding() -> None:
    """The model that embeds prompts for the quality predictor."""


@embedding.command()
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where to; the cache folder by default.",
)
@click.option(
    "--weights-folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Has model.safetensors, config.json and tokenizer.json; otherwise they are fetched.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def export(folder: Path | None, weights_folder: Path | None, as_json: bool) -> None:
    """Make the ONNX files of all-MiniLM-L6-v2, in float and in int8; needs no torch."""
    from controller.predictors.embedding_export import ExportError, export_embedding_model

    try:
        report = export_embedding_model(
            folder, weights_folder=weights_folder, say=lambda line: click.echo(line, err=True)
        )
    except ExportError as error:
        raise CommandFailedError(str(error)) from error
    found = {
        "folder": str(report.folder),
        "float_bytes": report.float_bytes,
        "int8_bytes": report.int8_bytes,
        "agreement_ratio": report.agreement_ratio,
        "weights_are_published": report.weights_are_published,
    }
    if as_json:
        click.echo(json.dumps(found))
    else:
        click.echo(
            f"{report.folder}: float {report.float_bytes / 1e6:.0f} MB, int8 "
            f"{report.int8_bytes / 1e6:.0f} MB, least cosine between them "
            f"{report.agreement_ratio:.3f}"
        )


# -- research -------------------------------------------------------------------------------------


@main.group()
def problem() -> None:
    """Files of one routing decision; docs/problem-format.md describes them."""


@problem.command()
@click.option("--requests", type=int, required=True, help="R, requests of the batch.")
@click.option("--nodes", type=int, required=True, help="N, nodes of the fleet.")
@click.option("--models-per-node", type=int, default=1, show_default=True)
@click.option(
    "--queue", type=click.Choice(["serial", "batched"]), default="batched", show_default=True
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="A .npz file."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def sample(
    requests: int,
    nodes: int,
    models_per_node: int,
    queue: str,
    seed: int,
    out: Path,
    as_json: bool,
) -> None:
    """Write a made-up problem with the statistics of real fleets and workloads."""
    from controller.bench.sample import QueueModel, sample_problem
    from controller.routing.problem import save_problem

    try:
        made = sample_problem(requests, nodes, models_per_node, QueueModel(queue), seed).problem
        save_problem(made, out)
    except ValueError as error:
        raise Wrong(str(error)) from error
    except OSError as error:
        raise CommandFailedError(f"{out}: {error.strerror}") from error
    size = {"requests": made.n_requests, "destinations": made.n_destinations, "nodes": made.n_nodes}
    if as_json:
        click.echo(json.dumps({"file": str(out), **size}))
    else:
        click.echo(f"{out}: {size['requests']} requests, {size['destinations']} destinations")


@main.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--policy", "policy_name", default="memetic", show_default=True)
@click.option("--budget-ms", type=float, help="How long the policy may think.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def solve(file: Path, policy_name: str, budget_ms: float | None, seed: int, as_json: bool) -> None:
    """Decide the problem in FILE."""
    from controller.bench.solve import solve as solve_problem
    from controller.routing.exact import SolverMissing
    from controller.routing.policies import BrokenPolicy, UnknownPolicy
    from controller.routing.problem import load_problem

    try:
        budget = None if budget_ms is None else budget_ms / 1000.0
        report = solve_problem(load_problem(file), policy_name, budget, seed)
    except (UnknownPolicy, ValueError) as error:
        raise Wrong(str(error)) from error
    except (SolverMissing, BrokenPolicy) as error:
        raise CommandFailedError(str(error)) from error
    except OSError as error:
        raise CommandFailedError(f"{file}: {error.strerror}") from error
    found = report.as_json()
    if as_json:
        click.echo(json.dumps(found))
        return
    bound = "none" if found["lower_bound"] is None else f"{found['lower_bound']:.6f}"
    click.echo(
        f"{found['policy']}: J {found['objective']:.6f} (lower bound {bound}), quality loss "
        f"{found['quality_loss']:.4g}, {found['cost_usd']:.4g} USD, "
        f"{found['energy_joules']:.4g} J, done in {found['completion_seconds']:.4g} s; "
        f"{found['decision_milliseconds']:.2f} ms"
    )


@main.group()
def quality() -> None:
    """Where expected quality comes from, and how good it is."""


@quality.command("evaluate")
@click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    required=True,
    help="Folder of an outcome table, such as mmlu-pro-outcomes.",
)
@click.option(
    "--embeddings-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A .npy file to keep the embeddings in, since making them takes minutes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def evaluate_quality(data: Path, embeddings_file: Path | None, as_json: bool) -> None:
    """Profile a part of a published outcome table and judge the estimates for the rest."""
    from controller.bench.outcomes import DataMissingError
    from controller.bench.quality import evaluate, evaluation_as_json
    from controller.predictors.embedding import EmbeddingUnavailableError, OnnxEmbedding
    from controller.render import print_quality

    try:
        found = evaluate(
            data,
            OnnxEmbedding(),
            embeddings_file=embeddings_file,
            say=lambda line: click.echo(line, err=True),
        )
    except (DataMissingError, EmbeddingUnavailableError) as error:
        raise CommandFailedError(str(error)) from error
    if as_json:
        click.echo(json.dumps(evaluation_as_json(found)))
    else:
        print_quality(found)


@main.group()
def bench() -> None:
    """Measure parts of the controller."""


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--size", "sizes", multiple=True, help="RxD such as 30x88; all nine by default.")
@click.option("--policy", "policies", multiple=True, help="Only this policy; may be given again.")
@click.option("--seeds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option(
    "--reference-seconds",
    type=click.FloatRange(min=0.1),
    default=10.0,
    show_default=True,
    help="For the exact or best known solution of each problem.",
)
def routing(
    as_json: bool,
    sizes: tuple[str, ...],
    policies: tuple[str, ...],
    seeds: int,
    reference_seconds: float,
) -> None:
    """Measure every policy's J, distance to the best known and the bound, and time."""
    from controller.bench.routing import SIZES, bench_routing, rows_as_json
    from controller.render import print_bench_rows
    from controller.routing.policies import UnknownPolicy

    known = {size.name: size for size in SIZES}
    unknown = [name for name in sizes if name not in known]
    if unknown:
        raise Wrong(f"no size {', '.join(unknown)}; there are: {', '.join(known)}")
    try:
        rows = bench_routing(
            sizes=[known[name] for name in sizes] or SIZES,
            policies=policies or None,
            seeds=seeds,
            reference_seconds=reference_seconds,
            progress=lambda line: click.echo(line, err=True),
        )
    except UnknownPolicy as error:
        raise Wrong(str(error)) from error
    if as_json:
        click.echo(json.dumps({"rows": rows_as_json(rows)}))
    else:
        print_bench_rows(rows)


@bench.command("embedding")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench_embedding_command(as_json: bool) -> None:
    """Measure how fast prompts are embedded, and how well 8 bits serve."""
    from controller.bench.embedding import bench_embedding, report_as_json
    from controller.predictors.embedding import EmbeddingUnavailableError

    try:
        report = bench_embedding(say=lambda line: click.echo(line, err=True))
    except EmbeddingUnavailableError as error:
        raise CommandFailedError(str(error)) from error
    _print_figures([report_as_json(report)], as_json)


@bench.command("store")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--prompts",
    "sizes",
    type=click.IntRange(min=100),
    multiple=True,
    help="Prompts in the store; may be given again. 36,497 and a million by default.",
)
def bench_store_command(as_json: bool, sizes: tuple[int, ...]) -> None:
    """Measure look-ups in the quality store and what of the true neighbours they find."""
    from controller.bench.store import SIZES, bench_store, rows_as_json

    rows = bench_store(sizes or SIZES, say=lambda line: click.echo(line, err=True))
    _print_figures(rows_as_json(rows), as_json)


def _print_figures(rows: list[dict[str, Any]], as_json: bool) -> None:
    """One JSON object, or a line for each figure."""
    if as_json:
        click.echo(json.dumps(rows[0] if len(rows) == 1 else {"rows": rows}))
        return
    for row in rows:
        for key, value in row.items():
            click.echo(f"{key}: {value:.4g}" if isinstance(value, float) else f"{key}: {value}")


# -- demo -----------------------------------------------------------------------------------------


@main.command()
@click.option("--stay", is_flag=True, help="Keep the controller and the agents until Ctrl-C.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the figures to this file.",
)
@click.option("--policy", "policies", multiple=True, help="Only this policy; may be given again.")
@click.option(
    "--cache",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("~/.cache/pointsman"),
    show_default=True,
    envvar="POINTSMAN_CACHE",
    help="Where model files and measured speeds are kept.",
)
def demo(stay: bool, json_file: Path | None, policies: tuple[str, ...], cache: Path) -> None:
    """Route a batch of questions over three agents with real models on this machine."""
    from rich.console import Console

    from controller.demo.errors import DemoError
    from controller.demo.run import DEFAULT_POLICIES, DemoOptions, run_demo

    options = DemoOptions(
        cache.expanduser().absolute(), policies or DEFAULT_POLICIES, stay, json_file
    )
    console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
    try:
        asyncio.run(run_demo(options, console))
    except (DemoError, ConnectError) as error:
        raise CommandFailedError(str(error)) from error
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise click.Abort from None


if __name__ == "__main__":
    main()
