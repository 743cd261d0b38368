"""Commands of a client: route, infer, explain, feedback."""

import json
import sys
from typing import Any

import click
from google.protobuf.json_format import ParseDict, ParseError

from controller.client import Client
from controller.commands.target import (
    CommandFailedError,
    Target,
    WrongUsage,
    asks_controller,
    call_controller,
    parse_weights,
    print_json,
    text,
    to_json,
)
from pointsman.v1 import router_pb2, types_pb2


@click.command()
@click.argument("prompts", nargs=-1, type=text)
@click.option(
    "--file",
    "source",
    type=click.File("rb"),
    help='File with one request per line, text or JSON such as {"prompt": ..., "model": ...}. '
    "-: standard input.",
)
@click.option("--model", type=text, help="Route to this model only.")
@click.option("--max-tokens", type=int, default=256, show_default=True)
@click.option(
    "--policy", type=text, default="", help="Policy for this decision. Default: the one in force."
)
@click.option(
    "--weights",
    help="Weights of quality,cost,energy,time for this decision. Default: those in force.",
)
@asks_controller
def route(
    prompts: tuple[str, ...],
    source: Any,
    model: str | None,
    max_tokens: int,
    policy: str,
    weights: str | None,
    target: Target,
) -> None:
    """Decide where a batch would go. Sends nothing."""
    from controller import render

    requests = [_request(prompt, model, max_tokens) for prompt in prompts]
    requests += _requests_from_file(source, model, max_tokens) if source else []
    if not requests:
        raise click.UsageError("give at least one prompt, or --file")
    message = router_pb2.RouteRequest(
        requests=requests,
        policy=policy,
        weights=parse_weights(weights) if weights is not None else None,
    )

    async def call(client: Client) -> router_pb2.RouteResponse:
        return await client.router.Route(message, timeout=30)

    response = call_controller(target, call)
    if target.as_json:
        print_json(response)
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
        raise WrongUsage(str(error)) from error


def _requests_from_file(
    source: Any, model: str | None, max_tokens: int
) -> list[types_pb2.InferenceRequest]:
    requests = []
    for number, raw in enumerate(source, 1):
        try:
            line = raw.decode().strip()
        except UnicodeDecodeError as error:
            raise WrongUsage(f"line {number}: not valid UTF-8 ({error.reason})") from error
        if not line:
            continue
        if not line.startswith("{"):
            requests.append(_request(line, model, max_tokens))
            continue
        try:
            message = ParseDict(json.loads(line), types_pb2.InferenceRequest())
        except (json.JSONDecodeError, ParseError) as error:
            raise WrongUsage(f"line {number}: {error}") from error
        if model and not message.model:
            message.model = model
        requests.append(message)
    return requests


@click.command()
@click.argument("prompt", type=text)
@click.option(
    "--model", type=text, help="Route to this model only. Default: the controller chooses."
)
@click.option("--system", type=text, help="System message.")
@click.option("--raw", is_flag=True, help="Send the prompt without a chat template.")
@click.option("--max-tokens", type=int, default=256, show_default=True)
@click.option("--temperature", type=float)
@click.option("--top-p", type=float)
@click.option("--top-k", type=int)
@click.option("--seed", type=int)
@click.option(
    "--stop", type=text, multiple=True, help="End the answer before this text (repeatable)."
)
@click.option("--request-id", type=text, default="", help="Your id of the request, for `explain`.")
@click.option("--min-quality", type=float, help="Minimum predicted quality, 0 to 1.")
@click.option("--deadline-seconds", type=float, help="Maximum predicted time to the finish.")
@click.option("--max-price-usd", type=float)
@click.option("--edge-only", is_flag=True, help="Keep the prompt on edge nodes.")
@click.option(
    "--timeout", type=float, default=900.0, show_default=True, help="Maximum seconds to wait."
)
@asks_controller
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
    target: Target,
) -> None:
    """Answer one prompt. Text goes to standard output, the account to standard error."""
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
        text, account = call_controller(target, call)
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


@click.command()
@click.argument("request_id", type=text)
@asks_controller
def explain(request_id: str, target: Target) -> None:
    """Explain why a request went where it went."""
    from controller import render

    async def call(client: Client) -> router_pb2.ExplainResponse:
        return await client.router.Explain(
            router_pb2.ExplainRequest(request_id=request_id), timeout=10
        )

    response = call_controller(target, call)
    if target.as_json:
        print_json(response)
    else:
        render.print_explanation(request_id, response)


@click.command()
@click.argument("request_id")
@click.argument("score", type=click.FloatRange(0, 1))
@asks_controller
def feedback(request_id: str, score: float, target: Target) -> None:
    """Score a finished answer, from 0 (wrong) to 1 (right).

    Similar prompts are routed by it.
    """

    async def call(client: Client) -> router_pb2.FeedbackResponse:
        message = router_pb2.FeedbackRequest(request_id=request_id, score_ratio=score)
        return await client.router.Feedback(message, timeout=10)

    response = call_controller(target, call)
    if target.as_json:
        print_json(response)
