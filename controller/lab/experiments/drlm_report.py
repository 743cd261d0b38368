"""Files of an experiment: JSON, CSV, Markdown tables."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from controller.lab.experiments.claims import ClaimTarget
from controller.lab.experiments.comparisons import COMPARED, Comparison
from controller.lab.experiments.drlm import Results, Row
from controller.lab.experiments.runs import METRICS
from controller.lab.experiments.statistics import Difference
from controller.lab.experiments.text_files import without_nan, write_texts
from controller.lab.experiments.training_spread import Spread

_UNITS = {
    "reward": "reward",
    "unloaded_reward": "reward, idle scale",
    "slowest_seconds": "slowest candidate s",
    "quality": "quality",
    "inference_seconds": "inference s",
    "waiting_seconds": "waiting s",
    "end_to_end_seconds": "end to end s",
    "end_to_end_p95_seconds": "end to end p95 s",
    "decision_milliseconds": "decision ms",
}

_REWARDS = ("reward", "unloaded_reward")


def write_report(results: Results, folder: Path) -> list[Path]:
    """Write results.json, tables as CSV and Markdown; the files written.

    Args:
        results: with at least one row.
        folder: made if absent; files there of the same names are replaced.

    Raises:
        OSError: the folder cannot be written.
    """
    whole = {
        **results.made_with,
        "rows": [asdict(row) for row in results.rows],
        "targets": [asdict(target) for target in results.targets],
        "comparisons": [asdict(comparison) for comparison in results.comparisons],
        "trainings": [asdict(spread) for spread in results.trainings],
        "runs": [
            {"policy": label, "requests": requests, "rate": rate, **asdict(run)}
            for (label, requests, rate), runs in results.runs.items()
            for run in runs
        ],
    }
    texts = {
        # NaN is no JSON: what was not served has no figures.
        "results.json": json.dumps(without_nan(whole), indent=1, allow_nan=False) + "\n",
        "table.csv": rows_csv(results.rows),
        "comparisons.csv": comparisons_csv(results.comparisons),
        "tables.md": tables(results),
    }
    return write_texts(folder, texts)


def tables(results: Results) -> str:
    """Markdown: all loads at a glance, a table for each, claims, differences, trainings."""
    made = results.made_with
    setting, design = made["setting"], made["design"]
    lines = [
        f"Scenario {setting['scenario']}: {setting['nodes']} nodes, "
        f"{setting['configurations']} configurations, {setting['destinations']} destinations. "
        f"Inputs: {setting['inputs']}; {setting['held_out_queries']} held-out queries. "
        f"{design['runs']} runs, {design['arrivals']} arrivals, seeds from {design['seed']}. "
        f"Mean ± standard deviation over the runs.",
        "",
        overview(results.rows),
        loads(results.rows),
    ]
    if results.targets:
        lines += ["## Claims", "", claims(results.targets), ""]
    heaviest = max(((row.rate, row.requests) for row in results.rows), default=(0.0, 0))
    differences = [each for each in results.comparisons if (each.rate, each.requests) == heaviest]
    if differences:
        lines += [
            "## Differences over paired runs, {1} requests at {0:g} a second".format(*heaviest),
            "",
            "Change of the mean, with the 95 % interval by resampling the runs; a difference for "
            "the reward.",
            "",
            _differences(differences),
        ]
    if results.trainings:
        lines += ["## Trainings", "", trainings(results.trainings)]
    return "\n".join(lines)


_AT_A_GLANCE = {
    "quality": "{:.3f}",
    "inference_seconds": "{:.2f}",
    "waiting_seconds": "{:.2f}",
    "reward": "{:.4f}",
}


def overview(rows: Sequence[Row]) -> str:
    """A table for each of the main quantities, a load a column; none of a single load."""
    at = {(row.policy, row.requests, row.rate): row for row in rows}
    columns = list(dict.fromkeys((row.requests, row.rate) for row in rows))
    lines = []
    for metric, form in _AT_A_GLANCE.items() if len(columns) > 1 else ():
        lines += [
            f"## All loads: {_UNITS[metric]}",
            "",
            "| policy | " + " | ".join(f"{n}, {rate:g}/s" for n, rate in columns) + " |",
            "| --- |" + " ---: |" * len(columns),
        ]
        for policy in dict.fromkeys(row.policy for row in rows):
            row_of = [at[policy, n, rate] for n, rate in columns]
            cells = [form.format(row.means[metric]) for row in row_of]
            lines.append(f"| {policy} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def trainings(spreads: Sequence[Spread]) -> str:
    """A table of what each training gained, and whether all did for certain."""
    lines = [
        "Difference of the reward, change of seconds: mean, least and greatest over the trainings. "
        "Certain: of how many trainings the whole 95 % interval over paired runs is better.",
        "",
        "| policy | against | load | quantity | mean | least | greatest | certain |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | --- |",
    ]
    for each in spreads:
        is_reward = each.metric in _REWARDS
        values = [d.mean if is_reward else d.change for d in each.differences]
        said = [
            f"{value:+.5f}" if is_reward else f"{100 * value:+.1f} %"
            for value in (sum(values) / len(values), min(values), max(values))
        ]
        certain = sum(_is_better_for_certain(d, is_reward) for d in each.differences)
        lines.append(
            f"| {each.policy} | {each.against} | {each.requests}, {each.rate:g}/s "
            f"| {_UNITS[each.metric]} | {' | '.join(said)} | {certain} of {len(values)} |"
        )
    return "\n".join(lines) + "\n"


def _is_better_for_certain(found: Difference, is_reward: bool) -> bool:
    """More reward, or fewer seconds, in the whole interval."""
    return found.low > 0.0 if is_reward else found.change_high < 0.0


def loads(rows: Sequence[Row]) -> str:
    """A table for each load, policies in the order of the rows."""
    lines = []
    for rate, requests in dict.fromkeys((row.rate, row.requests) for row in rows):
        chosen = [row for row in rows if (row.rate, row.requests) == (rate, requests)]
        lines += [
            f"## {requests} requests, {rate:g} a second, {chosen[0].runs} runs",
            "",
            "| policy | reward | idle scale | slowest s | quality | inference s | waiting s "
            "| end to end s | p95 s | over 100 s | decision ms | energy J | most used |",
            "| --- |" + " ---: |" * 11 + " --- |",
        ]
        for row in chosen:
            most = sorted(row.model_shares.items(), key=lambda item: -item[1])[:2]
            used = ", ".join(f"{name} {100 * share:.0f} %" for name, share in most)
            m, d = row.means, row.deviations
            lines.append(
                f"| {row.policy} | {m['reward']:.4f} ± {d['reward']:.4f} "
                f"| {m['unloaded_reward']:.4f} | {m['slowest_seconds']:.0f} "
                f"| {m['quality']:.3f} ± {d['quality']:.3f} "
                f"| {m['inference_seconds']:.2f} ± {d['inference_seconds']:.2f} "
                f"| {m['waiting_seconds']:.2f} ± {d['waiting_seconds']:.2f} "
                f"| {m['end_to_end_seconds']:.2f} ± {d['end_to_end_seconds']:.2f} "
                f"| {m['end_to_end_p95_seconds']:.1f} | {100 * m['long_wait_ratio']:.0f} % "
                f"| {m['decision_milliseconds']:.2f} | {m['energy_joules']:.0f} | {used} |"
            )
        lines.append("")
    return "\n".join(lines)


def claims(targets: Sequence[ClaimTarget]) -> str:
    """A table of what was to be shown and what was found."""
    lines = [
        "| policy | against | rate | claim | found | 95 % interval | met |",
        "| --- | --- | ---: | --- | ---: | --- | --- |",
    ]
    for each in targets:
        found, low, high = (
            (f"{100 * value:+.1f} %" if each.is_change else f"{value:+.5f}")
            for value in (each.found, each.low, each.high)
        )
        met = "yes" if each.is_certain else "on average" if each.is_met else "no"
        lines.append(
            f"| {each.policy} | {each.against} | {each.rate:g} | {each.claim} | {found} "
            f"| {low} to {high} | {met} |"
        )
    return "\n".join(lines)


def _differences(comparisons: Sequence[Comparison]) -> str:
    lines = [
        "| policy | against | " + " | ".join(_UNITS[name] for name in COMPARED) + " |",
        "| --- | --- |" + " ---: |" * len(COMPARED),
    ]
    for pair in dict.fromkeys((each.policy, each.against) for each in comparisons):
        cells = []
        for name in COMPARED:
            (d,) = (
                each.difference
                for each in comparisons
                if (each.policy, each.against, each.metric) == (*pair, name)
            )
            if name in _REWARDS:
                cells.append(f"{d.mean:+.5f} ({d.low:+.5f} to {d.high:+.5f})")
            else:
                cells.append(
                    f"{100 * d.change:+.0f} % ({100 * d.change_low:+.0f} to "
                    f"{100 * d.change_high:+.0f})"
                )
        lines.append(f"| {pair[0]} | {pair[1]} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def rows_csv(rows: Sequence[Row]) -> str:
    """A line for each row: means, deviations (`_sd`), shares as JSON."""
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    shares = ("model_shares", "group_shares", "class_shares")
    columns = [name for metric in METRICS for name in (metric, f"{metric}_sd")]
    writer.writerow(["policy", "requests", "rate", "runs", *columns, "failed", *shares])
    for row in rows:
        values = [v for metric in METRICS for v in (row.means[metric], row.deviations[metric])]
        said = [json.dumps(getattr(row, name)) for name in shares]
        writer.writerow([row.policy, row.requests, row.rate, row.runs, *values, row.failed, *said])
    return target.getvalue()


def comparisons_csv(comparisons: Sequence[Comparison]) -> str:
    """A line for each pair of policies, load and quantity."""
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    parts = ("mean", "low", "high", "change", "change_low", "change_high")
    writer.writerow(["policy", "against", "requests", "rate", "metric", *parts])
    for each in comparisons:
        values = [getattr(each.difference, name) for name in parts]
        writer.writerow([each.policy, each.against, each.requests, each.rate, each.metric, *values])
    return target.getvalue()
