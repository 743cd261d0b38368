"""`edge-controller embedding`: the model that embeds prompts."""

import json
from pathlib import Path

import click

from controller.commands.target import CommandFailedError
from controller.quality.embedding_export import ExportError, export_embedding_model


@click.group()
def embedding() -> None:
    """Export the model that embeds prompts."""


@embedding.command()
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder to write. Default: the cache folder.",
)
@click.option(
    "--weights-folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with model.safetensors, config.json and tokenizer.json. Default: they are "
    "fetched.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def export(folder: Path | None, weights_folder: Path | None, as_json: bool) -> None:
    """Write the ONNX files of all-MiniLM-L6-v2 in float and int8. Needs no torch."""
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
