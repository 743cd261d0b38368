"""`edge-controller models`: what nodes have, and orders to load, unload, pin and unpin."""

from typing import Any

import click

from controller.client import Client
from controller.commands.target import (
    CommandFailedError,
    Target,
    asks_controller,
    call_controller,
    print_json,
    text,
)
from pointsman.v1 import admin_pb2, fleet_pb2

_ORDER_SECONDS = 24 * 3600.0
"""The controller's own deadlines come earlier; this one is for a controller that hangs."""


@click.group(invoke_without_command=True)
@click.option("--node", "node_id", type=text, help="List only this node's models.")
@asks_controller
@click.pass_context
def models(context: click.Context, node_id: str | None, target: Target) -> None:
    """List the models of every node; load, unload, pin or unpin one."""
    from controller import render

    if context.invoked_subcommand is not None:
        return

    async def call(client: Client) -> admin_pb2.ListNodesResponse:
        return await client.admin.ListNodes(admin_pb2.ListNodesRequest(), timeout=10)

    response = call_controller(target, call)
    found = [node for node in response.nodes if node_id in (None, node.node_id)]
    if node_id is not None and not found:
        names = ", ".join(node.node_id for node in response.nodes) or "none"
        raise CommandFailedError(f"no node is called {node_id!r}; known: {names}")
    if target.as_json:
        print_json(admin_pb2.ListNodesResponse(nodes=found))
    else:
        render.print_models(found)


@models.command()
@click.argument("node_id", type=text)
@click.argument("model", type=text)
@click.option("--slots", type=click.IntRange(1), help="Number of sequences decoded at once.")
@click.option(
    "--context-tokens", type=click.IntRange(1), help="Maximum tokens of prompt plus answer."
)
@asks_controller
def load(
    node_id: str, model: str, slots: int | None, context_tokens: int | None, target: Target
) -> None:
    """Load a model and measure its speed. Fetches the file if it is missing."""
    request = admin_pb2.ManageModelRequest(
        node_id=node_id,
        action=fleet_pb2.MODEL_ACTION_LOAD,
        model=model,
        slots=slots,
        context_tokens=context_tokens,
    )
    _order(target, request, "is loaded")


@models.command()
@click.argument("node_id", type=text)
@click.argument("model", type=text)
@asks_controller
def unload(node_id: str, model: str, target: Target) -> None:
    """Unload a model after its running answers have ended."""
    _order(target, _request(node_id, model, fleet_pb2.MODEL_ACTION_UNLOAD), "is unloaded")


@models.command()
@click.argument("node_id", type=text)
@click.argument("model", type=text)
@asks_controller
def pin(node_id: str, model: str, target: Target) -> None:
    """Keep a model loaded, even when idle or when memory is short."""
    _order(target, _request(node_id, model, fleet_pb2.MODEL_ACTION_PIN), "is pinned")


@models.command()
@click.argument("node_id", type=text)
@click.argument("model", type=text)
@asks_controller
def unpin(node_id: str, model: str, target: Target) -> None:
    """Allow a pinned model to be unloaded."""
    _order(target, _request(node_id, model, fleet_pb2.MODEL_ACTION_UNPIN), "is not pinned")


def _request(node_id: str, model: str, action: Any) -> admin_pb2.ManageModelRequest:
    return admin_pb2.ManageModelRequest(node_id=node_id, action=action, model=model)


def _order(target: Target, request: admin_pb2.ManageModelRequest, outcome: str) -> None:
    from controller import render

    async def call(client: Client) -> admin_pb2.ManageModelResponse:
        last = admin_pb2.ManageModelResponse()
        with render.OrderProgress() as progress:
            async for last in client.admin.ManageModel(request, timeout=_ORDER_SECONDS):
                progress.show(request.node_id, last.update)
        return last

    response = call_controller(target, call)
    if target.as_json:
        print_json(response)
    if response.update.phase != fleet_pb2.ORDER_PHASE_DONE:
        why = response.update.message or "the order ended without saying how"
        raise CommandFailedError(f"{request.node_id}, {request.model}: {why}")
    if not target.as_json:
        click.echo(f"{request.model} {outcome} on {request.node_id}")
