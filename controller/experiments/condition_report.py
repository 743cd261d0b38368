"""Files of an experiment on conditions: JSON, CSV, Markdown tables."""

import csv
import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Final

import numpy as np

from controller.experiments.conditions import ConditionResults, ConditionRow
from controller.experiments.contenders import GREEDY
from controller.experiments.runs import METRICS
from controller.experiments.text_files import without_nan, write_texts

_HEADINGS: Final = {
    "served_ratio": "served",
    "requeued": "routed again",
    "energy_joules": "energy J",
    "cost_usd": "USD / 1000",
    "fallback_ratio": "fell back",
}
_FORMATS: Final = {
    "served_ratio": "{:.2%}",
    "fallback_ratio": "{:.1%}",
    "reward": "{:.4f}",
    "quality": "{:.3f}",
    "cost_usd": "{:.4f}",
}


def condition_tables(results: ConditionResults) -> str:
    """Markdown: a table a condition, each quantity beside its change and 95 % interval."""
    plan = results.plan
    against = f"its own under {plan.conditions[0].name}" if plan.is_against_base else GREEDY.label
    lines = [
        f"{plan.load.requests} requests at {plan.load.rate:g} a second, "
        f"{len(results.made_with['seeds'])} runs. In brackets: change against {against}, with the "
        "95 % interval by resampling the runs.",
        "",
    ]
    for condition in plan.conditions:
        names = [_HEADINGS.get(name, name.replace("_", " ")) for name in plan.columns]
        lines += [
            f"## {condition.name}",
            "",
            "| policy | " + " | ".join(names) + " |",
            "| --- |" + " ---: |" * len(names),
        ]
        for row in results.rows:
            if row.condition == condition.name:
                cells = [_cell(row, name) for name in plan.columns]
                lines.append(f"| {row.policy} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _cell(row: ConditionRow, name: str) -> str:
    value = row.means[name] * (1000.0 if name == "cost_usd" else 1.0)
    text = _FORMATS.get(name, "{:.2f}").format(value)
    found = row.differences.get(name)
    if found is None or not np.isfinite(found.change):
        return text
    return (
        f"{text} ({100 * found.change:+.1f} %, {100 * found.change_low:+.1f} to "
        f"{100 * found.change_high:+.1f})"
    )


def write_condition_report(results: ConditionResults, folder: Path) -> list[Path]:
    """Write results.json, table.csv and tables.md; the files written.

    Raises:
        OSError: the folder cannot be written.
    """
    whole = {
        **results.made_with,
        "rows": [asdict(row) for row in results.rows],
        "runs": [
            {"condition": condition, "policy": policy, **asdict(run)}
            for (condition, policy), runs in results.runs.items()
            for run in runs
        ],
    }
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    names = [*METRICS, "failed", "requeued"]
    writer.writerow(["condition", "policy", *names])
    for row in results.rows:
        writer.writerow([row.condition, row.policy, *(row.means[name] for name in names)])
    texts = {
        "results.json": json.dumps(without_nan(whole), indent=1, allow_nan=False) + "\n",
        "table.csv": table.getvalue(),
        "tables.md": condition_tables(results),
    }
    return write_texts(folder, texts)
