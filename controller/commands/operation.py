"""Commands of an operator: nodes and the policy in force."""

import click

from controller.client import Client
from controller.commands.target import (
    Target,
    asks_controller,
    call_controller,
    parse_weights,
    print_json,
    text,
)
from pointsman.v1 import admin_pb2


@click.group(invoke_without_command=True)
@asks_controller
@click.pass_context
def nodes(context: click.Context, target: Target) -> None:
    """List the nodes; drain, undrain or forget one."""
    from controller import render

    if context.invoked_subcommand is not None:
        return

    async def call(client: Client) -> admin_pb2.ListNodesResponse:
        return await client.admin.ListNodes(admin_pb2.ListNodesRequest(), timeout=10)

    response = call_controller(target, call)
    if target.as_json:
        print_json(response)
    else:
        render.print_nodes(response)


@nodes.command()
@click.argument("node_id", type=text)
@asks_controller
def drain(
    node_id: str,
    target: Target,
) -> None:
    """Send a node no new requests. Running ones finish."""
    _set_draining(target, node_id, True)


@nodes.command()
@click.argument("node_id", type=text)
@asks_controller
def undrain(
    node_id: str,
    target: Target,
) -> None:
    """Send requests to a drained node again."""
    _set_draining(target, node_id, False)


def _set_draining(target: Target, node_id: str, is_draining: bool) -> None:
    async def call(client: Client) -> admin_pb2.DrainNodeResponse:
        request = admin_pb2.DrainNodeRequest(node_id=node_id, is_draining=is_draining)
        return await client.admin.DrainNode(request, timeout=10)

    response = call_controller(target, call)
    if target.as_json:
        print_json(response)
    else:
        click.echo(f"{node_id} is {response.node.state}")


@nodes.command()
@click.argument("node_id", type=text)
@asks_controller
def forget(
    node_id: str,
    target: Target,
) -> None:
    """Remove an offline node from the list."""

    async def call(client: Client) -> admin_pb2.ForgetNodeResponse:
        return await client.admin.ForgetNode(
            admin_pb2.ForgetNodeRequest(node_id=node_id), timeout=10
        )

    response = call_controller(target, call)
    if target.as_json:
        print_json(response)
    else:
        click.echo(f"{node_id} is forgotten")


@click.group(invoke_without_command=True)
@asks_controller
@click.pass_context
def policy(context: click.Context, target: Target) -> None:
    """Show the policy in force; `policy set` changes it."""
    from controller import render

    if context.invoked_subcommand is not None:
        return

    async def call(client: Client) -> admin_pb2.GetPolicyResponse:
        return await client.admin.GetPolicy(admin_pb2.GetPolicyRequest(), timeout=10)

    response = call_controller(target, call)
    if target.as_json:
        print_json(response)
    else:
        render.print_policy(response)


@policy.command("set")
@click.argument("name", type=text, required=False, default="")
@click.option("--weights", help="Weights of quality,cost,energy,time, such as 0.4,0,0.2,0.4.")
@click.option(
    "--normalisation", type=text, default="", help="Scaling of the terms: payoff, minmax or random."
)
@asks_controller
def set_policy(
    name: str,
    weights: str | None,
    normalisation: str,
    target: Target,
) -> None:
    """Change the policy, weights or normalisation, from the next batch on."""
    if not (name or weights is not None or normalisation):
        raise click.UsageError("give a policy's name, --weights or --normalisation")
    request = admin_pb2.SetPolicyRequest(
        policy=name,
        weights=parse_weights(weights) if weights is not None else None,
        normalisation=normalisation,
    )

    async def call(client: Client) -> admin_pb2.SetPolicyResponse:
        return await client.admin.SetPolicy(request, timeout=10)

    response = call_controller(target, call)
    if target.as_json:
        print_json(response)
    else:
        values = response.weights
        click.echo(
            f"{response.policy}, weights quality {values.quality:g}, cost {values.cost:g}, "
            f"energy {values.energy:g}, time {values.time:g}, {response.normalisation}"
        )
