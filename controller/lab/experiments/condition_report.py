"""Files of an experiment on conditions: JSON, CSV, Markdown tables."""

import csv
import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Final

import numpy as np

from controller.lab.experiments.claims import paper_claims
from controller.lab.experiments.conditions import ConditionResults, ConditionRow
from controller.lab.experiments.runs import METRICS
from controller.lab.experiments.text_files import without_nan, write_texts

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
    """Markdown: each quantity beside its changes and their 95 % intervals.

    A table a policy where only weights differ, else a table a condition.
    """
    plan = results.plan
    against = ", then ".join(plan.against) or f"its own under {plan.conditions[0].name}"
    lines = [
        f"{plan.load.requests} requests at {plan.load.rate:g} a second, "
        f"{len(results.made_with['seeds'])} runs. In brackets: change against {against}, with the "
        "95 % interval by resampling the runs.",
        "",
    ]
    if plan.bound_by:
        lines += [*_claims_kept(results), *_bounds(results)]
    table, line = ("policy", "condition") if plan.varies_weights else ("condition", "policy")
    for title in dict.fromkeys(getattr(row, table) for row in results.rows):
        names = [_HEADINGS.get(name, name.replace("_", " ")) for name in plan.columns]
        lines += [
            f"## {title}",
            "",
            f"| {line} | " + " | ".join(names) + " |",
            "| --- |" + " ---: |" * len(names),
        ]
        for row in results.rows:
            if getattr(row, table) == title:
                cells = [_cell(row, name) for name in plan.columns]
                lines.append(f"| {getattr(row, line)} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _cell(row: ConditionRow, name: str) -> str:
    value = row.means[name] * (1000.0 if name == "cost_usd" else 1.0)
    text = _FORMATS.get(name, "{:.2f}").format(value)
    changes = [
        f"{100 * found[name].change:+.1f} %, {100 * found[name].change_low:+.1f} to "
        f"{100 * found[name].change_high:+.1f}"
        for found in row.differences.values()
        if name in found and np.isfinite(found[name].change)
    ]
    return f"{text} ({'; '.join(changes)})" if changes else text


def _claims_kept(results: ConditionResults) -> list[str]:
    """A line a row, a column for each of the paper's claims."""
    claims = paper_claims()
    lines = [
        "## DRLM's claims, together",
        "",
        "| condition | policy | "
        + " | ".join(f"{each.claim} than {each.against}" for each in claims)
        + " | kept |",
        "| --- | --- |" + " ---: |" * (len(claims) + 1),
    ]
    for row in results.rows:
        cells, kept = [], 0
        for claim in claims:
            found = row.differences.get(claim.against, {}).get(claim.metric)
            if found is None:
                break
            is_kept = claim.is_kept_by(found.change)
            kept += is_kept
            cells.append(f"{100 * found.change:+.0f} % {'yes' if is_kept else 'no'}")
        else:
            cells.append(f"{kept} of {len(claims)}")
            lines.append(f"| {row.condition} | {row.policy} | {' | '.join(cells)} |")
    return [*lines, ""]


def _bounds(results: ConditionResults) -> list[str]:
    """What mean inference as short as claimed leaves of quality, whoever decides."""
    lines = [
        "## What shorter inference leaves of quality at best",
        "",
        "With the fleet to oneself, every request at the fastest node of its model "
        "(`controller.lab.experiments.frontier`).",
        "",
        "| mean inference s | which is | predicted quality | change against the best | scores |",
        "| ---: | --- | ---: | ---: | ---: |",
    ]
    best = max(bound.quality for _, bound in results.bounds)
    for said, bound in results.bounds:
        lines.append(
            f"| {bound.seconds:.2f} | {said} | {bound.quality:.3f} "
            f"| {100 * (bound.quality / best - 1):+.1f} % | {bound.score:.3f} |"
        )
    return [*lines, ""]


def write_condition_report(results: ConditionResults, folder: Path) -> list[Path]:
    """Write results.json, table.csv and tables.md; the files written.

    Raises:
        OSError: the folder cannot be written.
    """
    whole = {
        **results.made_with,
        "rows": [asdict(row) for row in results.rows],
        "bounds": [{"limit": said, **asdict(bound)} for said, bound in results.bounds],
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
