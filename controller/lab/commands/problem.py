"""`edge-controller lab problem`, `solve` and `quality`: decisions from files, estimates tried."""

import json
from pathlib import Path

import click

from controller.commands.target import CommandFailedError, WrongUsage, library_output_to_stderr
from controller.lab.bench.outcomes import DataMissingError
from controller.lab.bench.quality import evaluate, evaluation_as_json
from controller.lab.bench.sample import QueueModel, sample_problem
from controller.lab.bench.solve import solve as solve_problem
from controller.lab.tables import print_quality
from controller.quality.embedding import EmbeddingUnavailableError, OnnxEmbedding
from controller.routing.exact import SolverMissing
from controller.routing.policies import BrokenPolicy, UnknownPolicy
from controller.routing.problem import load_problem, save_problem


@click.group()
def problem() -> None:
    """Make files of one routing decision (docs/problem-format.md)."""


@problem.command()
@click.option("--requests", type=int, required=True, help="Number of requests of the batch (R).")
@click.option("--nodes", type=int, required=True, help="Number of nodes of the fleet (N).")
@click.option("--models-per-node", type=int, default=1, show_default=True)
@click.option(
    "--queue", type=click.Choice(["serial", "batched"]), default="batched", show_default=True
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help=".npz file to write.",
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
    """Write a synthetic problem with the statistics of real fleets and workloads."""
    try:
        made = sample_problem(requests, nodes, models_per_node, QueueModel(queue), seed).problem
        save_problem(made, out)
    except ValueError as error:
        raise WrongUsage(str(error)) from error
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
@click.option("--budget-ms", type=float, help="Time limit of the policy.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def solve(file: Path, policy_name: str, budget_ms: float | None, seed: int, as_json: bool) -> None:
    """Decide the problem in FILE."""
    try:
        budget = None if budget_ms is None else budget_ms / 1000.0
        with library_output_to_stderr():
            report = solve_problem(load_problem(file), policy_name, budget, seed)
    except (UnknownPolicy, ValueError) as error:
        raise WrongUsage(str(error)) from error
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
    """Judge the quality estimates."""


@quality.command("evaluate")
@click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    required=True,
    help="Folder with an outcome table, such as mmlu-pro-outcomes.",
)
@click.option(
    "--embeddings-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help=".npz file that keeps the embeddings for the next time.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def evaluate_quality(data: Path, embeddings_file: Path | None, as_json: bool) -> None:
    """Profile a part of an outcome table and judge the estimates for the rest."""
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
