"""Prints what a run came to, and what it shows."""

from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.table import Column, Table

from controller.lab.offline.report import Accuracy, ProfilingReport
from controller.lab.offline.summary import TargetSummary


def print_summary(rows: Iterable[TargetSummary], console: Console) -> None:
    """A line for each destination."""
    table = Table(Column("destination", overflow="fold", min_width=12), title="Profiled")
    for name in ("n", "failed", "graded", "score", "s", "tok/s", "J"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row.node_id}/{row.model}",
            str(row.answered),
            str(row.failed),
            str(row.graded),
            _number(row.mean_score_ratio, 3),
            _number(row.median_seconds, 2),
            _number(row.median_decode_tokens_per_second, 1),
            _number(row.mean_energy_joules, 2),
        )
    console.print(table)


def print_report(found: ProfilingReport, console: Console) -> None:
    """Predictions of finishes and of joules, then the table of classes."""
    if found.requests is not None:
        rows = {"all requests": found.requests, **found.destinations}
        if found.makespans is not None:
            rows["whole batches"] = found.makespans
        console.print(_predictions("Predicted against measured finish", "s", rows))
    if found.energy is not None:
        rows = {"all requests": found.energy, **found.destination_energy}
        console.print(_predictions("Predicted against measured energy", "J", rows))
    if found.quality:
        table = Table(
            Column("class", overflow="fold"),
            Column("model", overflow="fold"),
            title="Quality, with Wilson's interval of 95 %",
        )
        for name in ("n", "score", "from", "to"):
            table.add_column(name, justify="right")
        for row in found.quality:
            table.add_row(
                row.question_class,
                row.model,
                str(row.graded),
                f"{row.mean_score_ratio:.3f}",
                f"{row.low:.3f}",
                f"{row.high:.3f}",
            )
        console.print(table)


def _predictions(title: str, unit: str, rows: Mapping[str, Accuracy]) -> Table:
    table = Table(Column("of", overflow="fold", min_width=12), title=title)
    for name in ("n", "error", "p90", "bias", "rho", "tau", f"pred {unit}", f"came {unit}"):
        table.add_column(name, justify="right")
    for name, row in rows.items():
        table.add_row(name, *_accuracy(row))
    return table


def _accuracy(found: Accuracy) -> list[str]:
    return [
        str(found.requests),
        f"{found.median_error_ratio:.1%}",
        f"{found.p90_error_ratio:.1%}",
        f"{found.bias_ratio:+.1%}",
        _number(found.spearman, 3),
        _number(found.kendall, 3),
        f"{found.median_predicted:.2f}",
        f"{found.median_measured:.2f}",
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
