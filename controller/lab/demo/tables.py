"""The demonstration's tables."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from controller.lab.demo.results import Answer, PolicyResult


def print_answers(results: Sequence[PolicyResult], console: Console) -> None:
    """Who answered what: a row a question, a column a policy."""
    table = Table(title="Who answered what", show_lines=False)
    # Equal shares of the width; rich would give the longest answers all of it.
    width = max(12, console.width // (len(results) + 1) - 3)
    for name in ("question", *(result.policy for result in results)):
        table.add_column(name, width=width, overflow="ellipsis", no_wrap=True)
    for row in zip(*(result.answers for result in results), strict=True):
        table.add_row(row[0].question.text, *(_cell(answer) for answer in row))
    console.print(table)


def _cell(answer: Answer) -> str:
    if answer.error:
        return f"[red]failed:[/red] {answer.error}"
    mark = "[green]+[/green]" if answer.is_right else "[red]-[/red]"
    text = " ".join(answer.text.split()).replace("[", "(")
    return f"{mark} [bold]{answer.node_id}[/bold] {text}"


def print_summary(results: Sequence[PolicyResult], console: Console) -> None:
    """The policies side by side."""
    table = Table(title="Policies")
    table.add_column("policy")
    names = (
        "answered",
        "quality",
        "energy J (est.)" if any(r.is_energy_estimated for r in results) else "energy J",
        "makespan predicted s",
        "makespan measured s",
        "J",
        "decided in ms",
    )
    for name in names:
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(
            result.policy,
            f"{result.requests - result.failed}/{result.requests}",
            f"{result.quality:.2f}",
            f"{result.energy_joules:.1f}",
            f"{result.makespan_predicted_seconds:.2f}",
            f"{result.makespan_measured_seconds:.2f}",
            f"{result.objective:.3f}",
            f"{result.decision_milliseconds:.1f}",
        )
    console.print(table)
    for result in results:
        for batch in result.batches:
            if batch.fallback_reason:
                console.print(f"{result.policy} fell back: {batch.fallback_reason}")
    if any(result.is_energy_estimated for result in results):
        console.print(
            "Energy is estimated from each engine's busy time and the stand-in board's power; "
            "no sensor was read.",
            style="dim",
        )
