"""Commands that measure the engine for, fit and time DRLM's predictors."""

import asyncio
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from controller.commands.target import CommandFailedError
from controller.lab.bench.drlm import bench_drlm
from controller.lab.bench.engine_measurements import (
    LIMITS,
    MODELS,
    EngineMeasurementsError,
    MeasurementDesign,
    measure_engine,
)
from controller.lab.offline.measurements import MeasurementsError, read_measurements
from controller.lab.simulator.inputs import InputsError, save_inputs
from controller.lab.simulator.scenario_file import ScenarioError, read_scenario
from controller.predictors.fitted import save_predictors
from controller.quality.embedding import CachedEmbedding, EmbeddingUnavailableError, OnnxEmbedding
from controller.storage.artifacts import ArtifactError
from controller.storage.digests import file_digest


@click.command()
@click.option(
    "--measurements",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    help="File or folder written by `edge-controller lab profile` (repeatable).",
)
@click.option(
    "--paper-setting",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of public question sets, outcomes and device speeds. Fits on DRLM's setting, "
    "synthesised from them.",
)
@click.option(
    "--device-by",
    type=click.Choice(["hardware", "node"]),
    default="hardware",
    show_default=True,
    help="Property that puts machines into one class of devices.",
)
@click.option(
    "--out",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the predictors.",
)
@click.option(
    "--simulation-inputs",
    type=click.Path(file_okay=False, path_type=Path),
    help="With --paper-setting: folder for the inputs of `edge-controller lab experiment`.",
)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True)
@click.option(
    "--splits",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of seeds to fit with, each with other queries held out. The first one's "
    "predictors are written.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def fit(
    measurements: tuple[Path, ...],
    paper_setting: Path | None,
    device_by: str,
    out: Path,
    simulation_inputs: Path | None,
    seed: int,
    splits: int,
    as_json: bool,
) -> None:
    """Fit classifier, quality, latency and answer length. Holds a fifth of the queries out."""
    if bool(measurements) == (paper_setting is not None):
        raise click.UsageError("give either --measurements or --paper-setting")
    if simulation_inputs is not None and paper_setting is None:
        raise click.UsageError("--simulation-inputs needs --paper-setting")
    try:
        from controller.lab.training.fit_predictors import fit_splits
        from controller.lab.training.measurement_table import FitError, table_of
        from controller.lab.training.paper_setting import PaperDataError, paper_setting_from
        from controller.lab.training.simulation_inputs import simulation_inputs as inputs_of
    except ImportError as error:
        raise CommandFailedError(
            f"fitting needs {error.name}; install the extra `train`"
        ) from error

    def say(line: str) -> None:
        click.echo(line, err=True)

    try:
        setting = None
        embed = CachedEmbedding(OnnxEmbedding()).embed
        if paper_setting is None:
            rows = [row for path in measurements for row in read_measurements(path)]
            table, sources = table_of(rows, device_by=device_by), _files(measurements)
        else:
            say("synthesising the paper's measurements")
            setting = paper_setting_from(paper_setting, seed=seed)
            table, sources = setting.table, list(setting.sources)
        fitted, figures = fit_splits(table, embed, seed=seed, splits=splits, say=say)
        save_predictors(
            out,
            fitted,
            provenance={
                "command": " ".join(["edge-controller", *sys.argv[1:]]),
                "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                "sources": _digests(sources),
                "rows": figures["measurements"],
                "is_synthetic": paper_setting is not None,
                "figures": figures,
            },
        )
        if simulation_inputs is not None and setting is not None:
            say(f"writing {simulation_inputs}")
            inputs = inputs_of(setting, fitted, embed, read_scenario("drlm"), seed=seed)
            save_inputs(inputs, simulation_inputs)
    except (
        MeasurementsError, FitError, PaperDataError, ArtifactError, EmbeddingUnavailableError,
        InputsError, ScenarioError,
    ) as error:  # fmt: skip
        raise CommandFailedError(str(error)) from error
    except OSError as error:
        raise CommandFailedError(f"{error.filename or out}: {error.strerror}") from error
    except ModuleNotFoundError as error:
        raise CommandFailedError(
            f"fitting needs {error.name}; install the extra `train`"
        ) from error
    if as_json:
        click.echo(json.dumps({"folder": str(out), **figures}))
    else:
        _print_figures(figures, out)


def _files(paths: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        inside = [path / "measurements.parquet", path / "measurements.csv"]
        found.append(next((file for file in inside if file.exists()), path))
    return found


def _digests(paths: Sequence[Path]) -> list[dict[str, str]]:
    return [
        {"file": path.name, "folder": path.parent.name, "sha256": file_digest(path)}
        for path in paths
    ]


def _print_figures(figures: dict[str, Any], out: Path) -> None:
    latency, classes = figures["latency"], figures["classifier"]
    quality, length = figures["quality"], figures["output_length"]
    click.echo(
        f"{figures['measurements']} measurements of {figures['queries']} queries; held out: "
        f"{figures['held_out_measurements']} of {figures['held_out_queries']}"
    )
    click.echo(
        f"Latency: R2 {latency['r2_log']:.3f} on the log scale, residual sigma "
        f"{latency['residual_sigma_log']:.3f}, half of the times within "
        f"{latency['median_ratio_error']:.0%}"
    )
    by_model = latency["r2_log_by_model"]
    click.echo("  R2 of each model: " + ", ".join(f"{k} {v:.3f}" for k, v in by_model.items()))
    if "splits" in figures:
        splits = figures["splits"]
        click.echo(
            f"  R2 over {len(splits['r2_log'])} splits: mean {splits['r2_log_mean']:.3f}, "
            f"{splits['r2_log_lowest']:.3f} to {splits['r2_log_highest']:.3f}"
        )
        mean = splits["r2_log_mean_by_model"]
        click.echo("  mean of each model: " + ", ".join(f"{k} {v:.3f}" for k, v in mean.items()))
    shares = latency["feature_importance"]["groups"]
    click.echo("  importance: " + ", ".join(f"{k} {v:.1%}" for k, v in shares.items()))
    click.echo(
        f"Classes: accuracy {classes['accuracy']:.3f}, {classes['unclear_ratio']:.1%} unclear "
        f"and counted as {classes['default_class']}; rows are the truth:"
    )
    width = max(len(name) for name in classes["classes"])
    for name, row in zip(classes["classes"], classes["confusion"], strict=True):
        click.echo(f"  {name:{width}} " + " ".join(f"{count:4d}" for count in row))
    if quality["log_loss"] is None:
        click.echo("Quality: no held-out answer was graded")
    else:
        click.echo(
            f"Quality: log loss {quality['log_loss']:.4f} "
            f"({quality['log_loss_without_classes']:.4f} without classes) on "
            f"{quality['graded_answers']} answers"
        )
    if length["mean_tokens"] is not None:
        click.echo(
            f"Answer length: off by {length['mean_absolute_error_tokens']:.1f} tokens on average, "
            f"of {length['mean_tokens']:.1f}"
        )
    click.echo(f"Written to {out}")


@click.command("engine")
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    required=True,
    metavar="[FORMAT=]FILE",
    help="File with questions, as for `edge-controller lab profile run` (repeatable).",
)
@click.option("--sample", type=click.IntRange(min=1), default=10, show_default=True)
@click.option("--max-tokens", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True)
@click.option("--model", "models", multiple=True, help="Model of the catalogue (repeatable).")
@click.option(
    "--catalog",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Catalogue file of your own, as the agent's catalog_file.",
)
@click.option(
    "--limits-each",
    type=click.IntRange(min=1),
    help="Number of limits under which a model is asked each question, in turn. Default: all.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    help="Stop after this time. The same command continues.",
)
@click.option(
    "--models-folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path.home() / ".cache" / "pointsman" / "models",
    show_default="~/.cache/pointsman/models",
)
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path))
def bench_engine_command(
    workloads: tuple[str, ...],
    sample: int,
    max_tokens: int,
    seed: int,
    models: tuple[str, ...],
    catalog: Path | None,
    limits_each: int | None,
    seconds: float | None,
    models_folder: Path,
    out: Path,
) -> None:
    """Measure models under several thread limits, for `edge-controller lab fit`."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        design = MeasurementDesign(
            workloads,
            models or MODELS,
            sample=sample,
            max_tokens=max_tokens,
            seed=seed,
            limits_each=limits_each or len(LIMITS),
        )
        progress = asyncio.run(
            measure_engine(
                out.resolve(),
                models_folder.resolve(),
                design,
                catalog=catalog.resolve() if catalog else None,
                seconds=seconds,
                say=lambda line: click.echo(line, err=True),
            )
        )
    except EngineMeasurementsError as error:
        raise CommandFailedError(str(error)) from error
    if not progress.is_complete:
        raise CommandFailedError(
            f"stopped after {seconds:g} s with {len(progress.folders)} of {progress.total} parts "
            "whole; give the same command again to go on"
        )
    click.echo(
        "edge-controller lab fit " + " ".join(f"--measurements {path}" for path in progress.folders)
    )


@click.command("drlm")
@click.option(
    "--predictors",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of fitted predictors. Default: trees of the paper's size on synthetic times.",
)
@click.option(
    "--policies",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder written by `edge-controller lab train ppo --scenario drlm`. With predictors "
    "of `edge-controller lab fit --paper-setting`, the whole decision is timed.",
)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench_drlm_command(
    predictors: Path | None, policies: Path | None, seed: int, as_json: bool
) -> None:
    """Measure the time of DRLM's decision on one query, by section, on one core."""
    if policies is not None and predictors is None:
        raise click.UsageError("--policies needs --predictors")
    try:
        report = bench_drlm(predictors, policies, np.random.default_rng(seed))
    except (ArtifactError, EmbeddingUnavailableError) as error:
        raise CommandFailedError(str(error)) from error
    if as_json:
        click.echo(json.dumps(report))
        return
    for section, figures in report.items():
        click.echo(section)
        for name, value in figures.items():
            click.echo(f"  {name}: {value}")
