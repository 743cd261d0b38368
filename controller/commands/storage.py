"""`edge-controller storage`: what the controller keeps, looked after while it is stopped."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

import click

from controller.commands.target import CommandFailedError
from controller.config import ServerSettings
from controller.storage.base import StorageError
from controller.storage.repair import check_storage, export_requests, repair_storage

_data_dir = click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=ServerSettings().data_dir,
    show_default=True,
    help="The controller's data folder.",
)


@click.group()
def storage() -> None:
    """Check, repair or export what the controller keeps."""


@storage.command()
@_data_dir
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check(data_dir: Path, as_json: bool) -> None:
    """Check the whole database. Exit code 1: it is damaged."""
    try:
        found = check_storage(data_dir.expanduser())
    except StorageError as error:
        raise CommandFailedError(str(error)) from error
    if as_json:
        click.echo(json.dumps({**asdict(found), "path": str(found.path)}))
    else:
        click.echo(
            f"{found.path}: {found.bytes} bytes, {found.nodes} nodes, {found.calibrations} "
            f"calibrations, {found.requests} finished requests"
        )
    if found.problems:
        raise CommandFailedError(
            f"damaged: {found.problems[0]}; run `edge-controller storage repair`"
        )


@storage.command()
@_data_dir
def repair(data_dir: Path) -> None:
    """Replace a damaged database by what can still be read of it."""
    try:
        done = repair_storage(data_dir.expanduser())
    except StorageError as error:
        raise CommandFailedError(str(error)) from error
    kept = ", ".join(f"{count} {name}" for name, count in done.rows.items())
    click.echo(f"Taken over: {kept}. The damaged file is {done.set_aside}.")


@storage.command()
@_data_dir
@click.option(
    "--out",
    type=click.File("w", encoding="utf-8"),
    default="-",
    help="CSV file to write. -: standard output.",
)
def export(data_dir: Path, out: TextIO) -> None:
    """Write all finished requests and their measurements as CSV."""
    try:
        count = export_requests(data_dir.expanduser(), out)
    except StorageError as error:
        raise CommandFailedError(str(error)) from error
    click.echo(f"{count} finished requests written.", err=True)
