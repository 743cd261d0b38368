"""Files of an experiment: JSON, CSV, a Markdown table, figures."""

import csv
import io
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

from controller.experiments.drlm import Row

_SHARES: Final = ("model_shares", "kind_shares")
_PANELS: Final = (
    ("quality", "quality"),
    ("inference_seconds", "inference, s"),
    ("waiting_seconds", "waiting, s"),
    ("end_to_end_seconds", "end to end, s"),
    ("reward", "reward"),
    ("decision_milliseconds", "decision, ms"),
)


class FiguresMissing(RuntimeError):
    """Figures cannot be drawn; the text says what to install."""


def write_report(rows: Sequence[Row], made_with: dict[str, Any], folder: Path) -> list[Path]:
    """Write results.json, table.csv, table.md and figures; the files written.

    Args:
        rows: at least one.
        made_with: what `provenance` gives.
        folder: made if absent; files there of the same names are replaced.

    Raises:
        FiguresMissing: Matplotlib is not installed; the other files are written.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = {**made_with, "rows": [asdict(row) for row in rows]}
    texts = {
        "results.json": json.dumps(results, indent=1) + "\n",
        "table.csv": _csv(rows),
        "table.md": markdown(rows),
    }
    written = []
    for name, text in texts.items():
        partial = folder / f"{name}.partial"
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, folder / name)
        written.append(folder / name)
    return [*written, *_figures(rows, folder)]


def markdown(rows: Sequence[Row]) -> str:
    """A table for each load, policies in the order of the rows."""
    lines = []
    for rate, requests in dict.fromkeys((row.rate, row.requests) for row in rows):
        chosen = [row for row in rows if (row.rate, row.requests) == (rate, requests)]
        lines += [
            f"## {requests} requests, {rate:g} a second, {chosen[0].runs} runs",
            "",
            "| policy | reward | quality | inference s | waiting s | end to end s | p95 s "
            "| decision ms | energy J | most used |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for row in chosen:
            most = sorted(row.model_shares.items(), key=lambda item: -item[1])[:2]
            used = ", ".join(f"{name} {100 * share:.0f} %" for name, share in most)
            lines.append(
                f"| {row.policy} | {row.reward:.3f} ± {row.reward_std:.3f} "
                f"| {row.quality:.3f} ± {row.quality_std:.3f} "
                f"| {row.inference_seconds:.2f} ± {row.inference_seconds_std:.2f} "
                f"| {row.waiting_seconds:.2f} ± {row.waiting_seconds_std:.2f} "
                f"| {row.end_to_end_seconds:.2f} ± {row.end_to_end_seconds_std:.2f} "
                f"| {row.end_to_end_p95_seconds:.2f} | {row.decision_milliseconds:.2f} "
                f"| {row.energy_joules:.0f} | {used} |"
            )
        lines.append("")
    return "\n".join(lines)


def _csv(rows: Sequence[Row]) -> str:
    target = io.StringIO()
    names = [part.name for part in fields(Row)]
    writer = csv.DictWriter(target, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        values = asdict(row)
        for name in _SHARES:
            values[name] = json.dumps(values[name])
        writer.writerow(values)
    return target.getvalue()


def _figures(rows: Sequence[Row], folder: Path) -> list[Path]:
    try:
        from matplotlib import colormaps
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FiguresMissing(
            "figures need Matplotlib; install the extra `train` and run again"
        ) from error
    labels = list(dict.fromkeys(row.policy for row in rows))
    written = []
    for rate in dict.fromkeys(row.rate for row in rows):
        figure = Figure(figsize=(11.0, 6.0), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(2, 3).ravel()
        for axis, (name, title) in zip(axes, _PANELS, strict=True):
            for label in labels:
                line = [row for row in rows if row.rate == rate and row.policy == label]
                axis.plot(
                    [row.requests for row in line],
                    [getattr(row, name) for row in line],
                    marker="o",
                    label=label,
                )
            axis.set_title(title)
            axis.set_xlabel("requests")
            if name == "decision_milliseconds":
                axis.set_yscale("log")
        figure.suptitle(f"{rate:g} arrivals a second")
        handles, names = axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=6)
        path = folder / f"load-{rate:g}.png"
        figure.savefig(path, dpi=110)
        written.append(path)
    heaviest = [row for row in rows if (row.rate, row.requests) == _heaviest(rows)]
    figure = Figure(figsize=(9.0, 5.0), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    below = [0.0] * len(heaviest)
    used = list(dict.fromkeys(name for row in heaviest for name in row.model_shares))
    # More models than the usual colours; neighbours far apart on the scale.
    colours = colormaps["turbo"].resampled(len(used) + 1)
    for index, name in enumerate(used):
        shares = [row.model_shares.get(name, 0.0) for row in heaviest]
        axis.barh(
            [row.policy for row in heaviest],
            shares,
            left=below,
            label=name,
            color=colours(index * 7 % (len(used) + 1)),
        )
        below = [left + share for left, share in zip(below, shares, strict=True)]
    axis.invert_yaxis()
    axis.set_xlabel("share of requests")
    axis.set_title("models, {1} requests at {0:g} a second".format(*_heaviest(rows)))
    figure.legend(loc="outside right upper", fontsize="small")
    path = folder / "assignment-shares.png"
    figure.savefig(path, dpi=110)
    return [*written, path]


def _heaviest(rows: Sequence[Row]) -> tuple[float, int]:
    return max((row.rate, row.requests) for row in rows)
