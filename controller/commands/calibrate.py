"""`edge-controller calibrate`: have nodes measure the speed of their models again."""

import json

import click

from controller.client import Client
from controller.commands.target import (
    CommandFailedError,
    Target,
    asks_controller,
    call_controller,
    text,
    to_json,
)
from pointsman.v1 import admin_pb2, fleet_pb2

_CALIBRATE_SECONDS = 24 * 3600.0
"""The controller's own deadlines come earlier; this one is for a controller that hangs."""


@click.command()
@click.argument("node_id", type=text, required=False)
@click.option("--model", type=text, default="", help="Only this model.")
@asks_controller
def calibrate(node_id: str | None, model: str, target: Target) -> None:
    """Measure the speed of a node's models again, or of every node's.

    Nodes measure at the same time, each one model after the other, between requests. What was
    learnt from completions since the last measurement is forgotten.
    """
    from controller import render

    async def call(client: Client) -> dict[str, admin_pb2.CalibrateResponse]:
        request = admin_pb2.CalibrateRequest(node_id=node_id or "", model=model)
        last: dict[str, admin_pb2.CalibrateResponse] = {}
        with render.OrderProgress() as progress:
            async for response in client.admin.Calibrate(request, timeout=_CALIBRATE_SECONDS):
                last[response.node_id] = response
                progress.show(response.node_id, response.update)
        return last

    last = call_controller(target, call)
    responses = [last[name] for name in sorted(last)]
    if target.as_json:
        click.echo(
            json.dumps({"nodes": [to_json(one) for one in responses]}, indent=2, ensure_ascii=False)
        )
    else:
        render.print_calibrations(responses)
    failed = [one for one in responses if one.update.phase != fleet_pb2.ORDER_PHASE_DONE]
    if failed:
        raise CommandFailedError(
            "; ".join(f"{one.node_id}: {one.update.message or 'not measured'}" for one in failed)
        )
