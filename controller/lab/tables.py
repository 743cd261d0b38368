"""Tables of the lab."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from controller.render import console

if TYPE_CHECKING:  # it brings the compiler, which not every table needs
    from controller.lab.bench.quality import QualityEvaluation
    from controller.lab.bench.routing import BenchRow


def print_bench_rows(rows: "Sequence[BenchRow]") -> None:
    """The routing benchmark."""
    table = Table()
    columns = "size,queue,policy,J,% above best,worst %,% above bound,own bound %,p50 ms,p95 ms"
    for name in columns.split(","):
        table.add_column(name, overflow="fold")
    for row in rows:
        own = row.own_bound_gap_percent
        table.add_row(
            row.size,
            row.queue,
            row.policy,
            f"{row.objective:.4f}",
            f"{row.gap_percent:.3f}",
            f"{row.worst_gap_percent:.3f}",
            f"{row.bound_gap_percent:.3f}",
            "-" if own is None else f"{own:.3f}",
            f"{row.decision_milliseconds_p50:.2f}",
            f"{row.decision_milliseconds_p95:.2f}",
        )
    console().print(table)


def print_figures_table(rows: "Sequence[Mapping[str, object]]") -> None:
    """Rows of the same figures, a column for each."""
    table = Table()
    for name in rows[0] if rows else ():
        table.add_column(name.replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
    console().print(table)


def print_quality(evaluation: "QualityEvaluation") -> None:
    """How good the quality estimates are."""
    out = console()
    out.print(
        f"{evaluation.data}: {evaluation.models} models, {evaluation.profiled_prompts} prompts "
        f"profiled, {evaluation.held_out_prompts} held out, embedded by {evaluation.embedding}"
    )
    table = Table()
    for name in (
        "form",
        "Brier",
        "log loss",
        "argmax accuracy",
        "best single",
        "calibration error",
    ):
        table.add_column(name, overflow="fold")
    for row in evaluation.rows:
        table.add_row(
            row.form,
            f"{row.brier:.4f}",
            f"{row.log_loss:.4f}",
            f"{row.argmax_accuracy:.4f}",
            f"{row.best_single_accuracy:.4f}",
            f"{row.calibration_error:.4f}",
        )
    out.print(table)


def print_figures(rows: list[dict[str, Any]], as_json: bool) -> None:
    """One JSON object, or a line for each figure."""
    if as_json:
        click.echo(json.dumps(rows[0] if len(rows) == 1 else {"rows": rows}))
        return
    for row in rows:
        for key, value in row.items():
            click.echo(f"{key}: {value:.4g}" if isinstance(value, float) else f"{key}: {value}")
