"""Figures of an experiment, like those of DRLM's paper, as PNG and SVG."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from controller.lab.experiments.drlm import Results, Row
from controller.lab.experiments.runs import QUANTILES


class FiguresMissing(RuntimeError):
    """Figures cannot be drawn; the text says what to install."""


def draw_figures(results: Results, folder: Path, curves: Path | None = None) -> list[Path]:
    """Draw everything; the files written.

    Args:
        results: with at least one row.
        folder: made if absent.
        curves: folder of `curve-NAME.csv`, or of `curve.csv`, of trainings; None: no such figure.

    Raises:
        FiguresMissing: Matplotlib is not installed.
        OSError: the folder cannot be written.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FiguresMissing(
            "figures need Matplotlib; install the extra `train` and run again"
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    rows = results.rows
    heaviest = max((row.rate, row.requests) for row in rows)
    at_most = [row for row in rows if (row.rate, row.requests) == heaviest]
    drawn: dict[str, Any] = {
        "decision-time": _decision_time(Figure, at_most),
        "waiting-cdf": _waiting_cdf(Figure, at_most),
        "assignment-shares": _shares(Figure, at_most),
        "quality-by-load": _by_load(Figure, rows),
        "latency-by-load": _latency_by_load(Figure, rows),
    }
    learned = _curves(curves)
    if learned:
        drawn["training"] = _training(Figure, learned)
    written = []
    # Equal results give equal files: no date, and names of parts that do not depend on chance.
    with mpl.rc_context({"svg.hashsalt": "pointsman", "svg.fonttype": "none"}):
        for name, figure in drawn.items():
            for suffix, said in (("png", {"Software": None}), ("svg", {"Date": None})):
                path = folder / f"{name}.{suffix}"
                figure.savefig(path, dpi=110, metadata=said)
                written.append(path)
    return written


def _decision_time(new: Any, rows: Sequence[Row]) -> Any:
    """The paper's Fig. 6a."""
    figure = new(figsize=(7.5, 4.0), layout="constrained")
    axis = figure.subplots()
    axis.bar(
        [row.policy for row in rows],
        [row.means["decision_milliseconds"] for row in rows],
        yerr=[row.deviations["decision_milliseconds"] for row in rows],
    )
    axis.set_yscale("log")
    axis.set_ylabel("decision, ms a request (median)")
    axis.tick_params(axis="x", rotation=60)
    return figure


def _waiting_cdf(new: Any, rows: Sequence[Row]) -> Any:
    """The paper's Fig. 6b."""
    figure = new(figsize=(7.5, 4.5), layout="constrained")
    axis = figure.subplots()
    for at, row in enumerate(rows):
        waits = [max(seconds, 0.01) for seconds in row.waiting_quantiles]
        style = ("-", "--", ":")[at // 7 % 3]
        axis.plot(waits, QUANTILES, label=row.policy, linestyle=style)
    axis.set_xscale("log")
    axis.set_xlabel("waiting, s")
    axis.set_ylabel("share of requests")
    figure.legend(loc="outside right upper", fontsize="small")
    return figure


def _shares(new: Any, rows: Sequence[Row]) -> Any:
    """The paper's Fig. 7a: models above, device classes below."""
    from matplotlib import colormaps

    figure = new(figsize=(10.0, 8.0), layout="constrained")
    for axis, title, shares in zip(
        figure.subplots(2, 1),
        ("configurations", "device classes"),
        ([row.model_shares for row in rows], [row.class_shares for row in rows]),
        strict=True,
    ):
        used = list(dict.fromkeys(name for each in shares for name in each))
        colours = colormaps["turbo"].resampled(len(used) + 1)
        below = [0.0] * len(rows)
        for index, name in enumerate(used):
            part = [each.get(name, 0.0) for each in shares]
            # Neighbours far apart on the scale of colours.
            colour = colours(index * 7 % (len(used) + 1))
            axis.barh([row.policy for row in rows], part, left=below, label=name, color=colour)
            below = [left + share for left, share in zip(below, part, strict=True)]
        axis.invert_yaxis()
        axis.set_xlim(0.0, 1.0)
        axis.set_xlabel(f"share of requests by {title}")
        axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize="x-small")
    return figure


def _by_load(new: Any, rows: Sequence[Row]) -> Any:
    """The paper's Fig. 7b."""
    figure = new(figsize=(11.0, 4.5), layout="constrained")
    axis = figure.subplots()
    _bars(axis, rows, "quality")
    axis.set_ylabel("response quality")
    figure.legend(loc="outside right upper", fontsize="small")
    return figure


def _latency_by_load(new: Any, rows: Sequence[Row]) -> Any:
    """The paper's Fig. 7c: waiting, inference and their sum, on logarithmic scales."""
    figure = new(figsize=(11.0, 9.0), layout="constrained")
    axes = figure.subplots(3, 1, sharex=True)
    for axis, name in zip(
        axes, ("inference_seconds", "waiting_seconds", "end_to_end_seconds"), strict=True
    ):
        _bars(axis, rows, name)
        axis.set_yscale("log")
        axis.set_ylabel(name.removesuffix("_seconds").replace("_", " ") + ", s")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", fontsize="small")
    return figure


def _bars(axis: Any, rows: Sequence[Row], metric: str) -> None:
    from matplotlib import colormaps

    loads = list(dict.fromkeys((row.rate, row.requests) for row in rows))
    labels = list(dict.fromkeys(row.policy for row in rows))
    width = 0.85 / len(labels)
    colours = colormaps["tab20"]  # more policies than the usual cycle has colours
    for index, label in enumerate(labels):
        chosen = [row for row in rows if row.policy == label]
        at = [loads.index((row.rate, row.requests)) + index * width for row in chosen]
        axis.bar(
            at,
            [row.means[metric] for row in chosen],
            width,
            yerr=[row.deviations[metric] for row in chosen],
            label=label,
            color=colours(index % 20),
            error_kw={"linewidth": 0.6},
        )
    axis.set_xticks(
        [at + 0.4 for at in range(len(loads))],
        [f"{requests}\n{rate:g}/s" for rate, requests in loads],
    )


def _curves(folder: Path | None) -> dict[str, list[dict[str, str]]]:
    if folder is None:
        return {}
    found = {}
    for path in (*sorted(folder.glob("curve-*.csv")), folder / "curve.csv"):
        if path.is_file():
            with path.open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
            if rows and {"episodes", "reward", "value_loss"} <= rows[0].keys():
                found[path.stem.removeprefix("curve-")] = rows
    return found


def _training(new: Any, curves: dict[str, list[dict[str, str]]]) -> Any:
    """The paper's Fig. 5b, a pair of axes for each training."""
    across = min(len(curves), 2)
    down = -(-len(curves) // across)
    figure = new(figsize=(6.0 * across, 3.5 * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).ravel()
    for axis in axes[len(curves) :]:
        axis.set_axis_off()
    for axis, (name, rows) in zip(axes, curves.items(), strict=False):
        episodes = [float(row["episodes"]) for row in rows]
        axis.plot(episodes, [float(row["reward"]) for row in rows], label="reward")
        axis.set_title(name)
        axis.set_xlabel("episode")
        axis.set_ylabel("mean reward")
        right = axis.twinx()
        right.plot(episodes, [float(row["value_loss"]) for row in rows], "C1", label="critic loss")
        right.set_ylabel("critic loss")
        right.legend([axis.lines[0], right.lines[0]], ["reward", "critic loss"], loc="center right")
    return figure
