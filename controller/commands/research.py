"""Commands of a researcher: problem files, searches, benchmarks, the embedding model."""

import json
from pathlib import Path
from typing import Any

import click

from controller.commands.asking import CommandFailedError, Wrong, strangers_to_stderr, text


@click.group()
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


@click.group()
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


@click.command()
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
        with strangers_to_stderr():
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


@click.group()
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
    help="A .npz file to keep the embeddings in, since making them takes minutes.",
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


@click.group()
def bench() -> None:
    """Measure parts of the controller."""


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--size", "sizes", multiple=True, help="RxD such as 30x88; all nine by default.")
@click.option("--policy", "policies", multiple=True, help="Only this policy; may be given again.")
@click.option("--seeds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option(
    "--first-seed",
    type=click.IntRange(min=0),
    default=1000,
    show_default=True,
    help="Of the problems; those from 1000 on have tuned nothing.",
)
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
    first_seed: int,
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
        with strangers_to_stderr():
            rows = bench_routing(
                sizes=[known[name] for name in sizes] or SIZES,
                policies=policies or None,
                seeds=seeds,
                first_seed=first_seed,
                reference_seconds=reference_seconds,
                progress=lambda line: click.echo(line, err=True),
            )
    except UnknownPolicy as error:
        raise Wrong(str(error)) from error
    if as_json:
        click.echo(json.dumps({"rows": rows_as_json(rows)}))
    else:
        print_bench_rows(rows)


@bench.command("budget")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--decisions",
    type=click.IntRange(min=5),
    default=200,
    show_default=True,
    help="Of each size, queue and load.",
)
def bench_budget_command(as_json: bool, decisions: int) -> None:
    """Measure whether `memetic` keeps to its time budget on a busy machine."""
    from controller.bench.budget import bench_budget, rows_as_json
    from controller.render import print_figures_table

    rows = rows_as_json(
        bench_budget(decisions=decisions, progress=lambda line: click.echo(line, err=True))
    )
    if as_json:
        click.echo(json.dumps({"rows": rows}))
    else:
        print_figures_table(rows)


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


@bench.command("predictions")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--rounds", type=click.IntRange(min=1), default=12, show_default=True)
@click.option(
    "--warm-up-rounds",
    type=click.IntRange(min=0),
    default=6,
    show_default=True,
    help="Bursts before those that are judged.",
)
@click.option(
    "--workload",
    "workloads",
    type=text,
    multiple=True,
    metavar="[FORMAT=]FILE",
    help="Questions to ask, as `edge-controller profile` reads them; may be given again. A few "
    "built-in ones by default.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=96,
    show_default=True,
    help="Longest answer of a question of a file that gives no length itself.",
)
@click.option("--policy", type=text, default="memetic", show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--cache",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("~/.cache/pointsman"),
    show_default=True,
    envvar="POINTSMAN_CACHE",
    help="Where model files and measured speeds are kept.",
)
def bench_predictions_command(
    as_json: bool,
    rounds: int,
    warm_up_rounds: int,
    workloads: tuple[str, ...],
    max_tokens: int,
    policy: str,
    seed: int,
    cache: Path,
) -> None:
    """Measure predicted against real completion times on three agents with real models."""
    import asyncio

    from rich.console import Console

    from controller.bench.bursts import built_in_rounds, question_rounds
    from controller.bench.predictions import bench_predictions, report_as_json
    from controller.client import ConnectError
    from controller.demo.errors import DemoError
    from controller.offline.workloads import WorkloadError, named_workload, read_workload

    try:
        questions = [q for name in workloads for q in read_workload(*named_workload(name), seed)]
    except WorkloadError as error:
        raise CommandFailedError(str(error)) from error
    count = warm_up_rounds + rounds
    try:
        report, observations = asyncio.run(
            bench_predictions(
                cache.expanduser().absolute(),
                question_rounds(questions, count, seed, max_tokens)
                if questions
                else built_in_rounds(count, seed),
                warm_up_rounds,
                policy,
                Console(stderr=True, highlight=False),
                say=lambda line: click.echo(line, err=True),
            )
        )
    except (DemoError, ConnectError, ValueError) as error:
        raise CommandFailedError(str(error)) from error
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise click.Abort from None
    figures = report_as_json(report, observations)
    if not as_json:
        del figures["observations"]
    _print_figures([figures], as_json)


def _print_figures(rows: list[dict[str, Any]], as_json: bool) -> None:
    """One JSON object, or a line for each figure."""
    if as_json:
        click.echo(json.dumps(rows[0] if len(rows) == 1 else {"rows": rows}))
        return
    for row in rows:
        for key, value in row.items():
            click.echo(f"{key}: {value:.4g}" if isinstance(value, float) else f"{key}: {value}")
