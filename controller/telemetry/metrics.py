"""Metrics as Prometheus reads them: its text format, version 0.0.4."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Labels: TypeAlias = tuple[tuple[str, str], ...]
"""Names and values, in the order in which they are written."""


@dataclass(frozen=True, slots=True)
class CounterMetric:
    """A count that only ever rises.

    Attributes:
        name: with its unit; ends in `_total`.
        help: what is counted, in a sentence.
        samples: by labels; none while nothing was counted.
    """

    name: str
    help: str
    samples: Mapping[Labels, float]


def exposition(metrics: Sequence[CounterMetric]) -> str:
    """All metrics as one text, labels escaped."""
    lines = []
    for metric in metrics:
        lines.append(f"# HELP {metric.name} {_escaped(metric.help)}")
        lines.append(f"# TYPE {metric.name} counter")
        for labels, value in sorted(metric.samples.items()):
            said = ",".join(f'{name}="{_quoted(text)}"' for name, text in labels)
            lines.append(f"{metric.name}{{{said}}} {value}" if said else f"{metric.name} {value}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', '\\"')
