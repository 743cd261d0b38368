"""`edge-controller lab demo`."""

import asyncio
import sys
from pathlib import Path

import click
from rich.console import Console

from controller.client import ConnectError
from controller.commands.target import (
    CommandFailedError,
)
from controller.lab.demo.errors import DemoError
from controller.lab.demo.run import DEFAULT_POLICIES, DemoOptions, run_demo


@click.command()
@click.option(
    "--stay", is_flag=True, help="Keep the controller and the agents running until Ctrl-C."
)
@click.option(
    "--learn",
    "learns",
    is_flag=True,
    help="Start with an empty quality store and learn from every answer. Needs "
    "`edge-controller embedding export`.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File for the figures as JSON.",
)
@click.option(
    "--policy", "policies", multiple=True, help="Run only this policy (repeatable). Default: all."
)
@click.option(
    "--cache",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("~/.cache/pointsman"),
    show_default=True,
    envvar="POINTSMAN_CACHE",
    help="Folder for model files and measured speeds.",
)
def demo(
    stay: bool, learns: bool, json_file: Path | None, policies: tuple[str, ...], cache: Path
) -> None:
    """Route a batch of questions over three agents with real models on this machine."""
    options = DemoOptions(
        cache.expanduser().absolute(),
        policies or DEFAULT_POLICIES,
        stay,
        json_file,
        learns=learns,
    )
    console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
    try:
        asyncio.run(run_demo(options, console))
    except (DemoError, ConnectError) as error:
        raise CommandFailedError(str(error)) from error
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise click.Abort from None
