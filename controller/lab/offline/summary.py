"""What a folder of profiling data holds, destination by destination."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from controller.lab.offline.journal import Entry, Failure, JournalError, read_journal
from controller.lab.offline.measurements import Measurement

ROUTED: Final = "routed"
"""The subfolder of batches that a policy routed; each run of them has its own folder there."""


@dataclass(frozen=True, slots=True)
class TargetSummary:
    """One destination's part of a run.

    Attributes:
        answered: measurements.
        failed: questions that it never answered.
        graded: answers with a score.
        mean_score_ratio: of those; None without.
        median_seconds: from admission to the end; None without answers.
        median_decode_tokens_per_second: of answers of at least two tokens.
        mean_energy_joules: of answers whose energy is known; None without.
    """

    node_id: str
    model: str
    answered: int
    failed: int
    graded: int
    mean_score_ratio: float | None
    median_seconds: float | None
    median_decode_tokens_per_second: float | None
    mean_energy_joules: float | None


def summarised(entries: Iterable[Entry]) -> list[TargetSummary]:
    """A summary of each destination, in order of name; a failure that was mended does not count."""
    rows: dict[tuple[str, str], dict[tuple[str, str], Entry]] = defaultdict(dict)
    for entry in entries:
        key = (entry.workload, entry.question_id)
        known = rows[entry.node_id, entry.model]
        if not (isinstance(entry, Failure) and isinstance(known.get(key), Measurement)):
            known[key] = entry
    return [
        _summary(node_id, model, found.values()) for (node_id, model), found in sorted(rows.items())
    ]


def _summary(node_id: str, model: str, entries: Iterable[Entry]) -> TargetSummary:
    measured: list[Measurement] = []
    failed = 0
    for entry in entries:
        if isinstance(entry, Measurement):
            measured.append(entry)
        else:
            failed += 1
    scores = [row.score_ratio for row in measured if row.score_ratio is not None]
    rates = [
        row.completion_tokens / row.decode_seconds
        for row in measured
        if row.completion_tokens > 1 and row.decode_seconds > 0
    ]
    joules = [row.energy_joules for row in measured if row.energy_joules is not None]
    return TargetSummary(
        node_id,
        model,
        len(measured),
        failed,
        len(scores),
        statistics.fmean(scores) if scores else None,
        statistics.median(row.total_seconds for row in measured) if measured else None,
        statistics.median(rates) if rates else None,
        statistics.fmean(joules) if joules else None,
    )


def run_folders(folder: Path) -> list[Path]:
    """The runs that a folder holds: the profiling run first, then those of routed batches.

    Raises:
        JournalError: it holds none.
    """
    routed = folder / ROUTED
    found = [folder] if (folder / "run.json").exists() else []
    if routed.is_dir():
        found += sorted(path for path in routed.iterdir() if (path / "run.json").exists())
    if not found:
        raise JournalError(f"{folder}: no profiling run; make one with `profile --out {folder}`")
    return found


def all_entries(folder: Path) -> Iterator[Entry]:
    """Everything that all runs of a folder hold.

    Raises:
        JournalError: it holds no run, or one is damaged.
    """
    for run in run_folders(folder):
        yield from read_journal(run)
