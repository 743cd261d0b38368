"""Learned policies against the others, over runs with the same arrivals, queries and luck."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from controller.lab.experiments.contenders import GREEDY, SUBJECTS, Contender
from controller.lab.experiments.runs import RunFigures, SimulatedLoad
from controller.lab.experiments.statistics import Difference, paired_difference

COMPARED: Final = (
    "reward",
    "unloaded_reward",
    "slowest_seconds",
    "quality",
    "inference_seconds",
    "waiting_seconds",
    "end_to_end_seconds",
    "end_to_end_p95_seconds",
    "decision_milliseconds",
)
"""That pairs of policies are compared by."""

Runs: TypeAlias = Mapping[tuple[str, int, float], Sequence[RunFigures]]
"""Figures by label, requests and rate."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A learned policy against another, in one quantity under one load."""

    policy: str
    against: str
    requests: int
    rate: float
    metric: str
    difference: Difference


def compared(
    runs: Runs, contenders: Sequence[Contender], loads: Sequence[SimulatedLoad]
) -> list[Comparison]:
    """Each learned contender against every other, under every load, in every compared quantity.

    A further training is compared with `greedy-reward` and with the policies of the same training
    alone.
    """
    found = []
    for load in loads:
        for ours, theirs in _pairs(contenders):
            sides = [runs[each.label, load.requests, load.rate] for each in (ours, theirs)]
            for metric in COMPARED:
                values = [np.array([getattr(run, metric) for run in side]) for side in sides]
                difference = paired_difference(values[0], values[1])
                found.append(
                    Comparison(
                        ours.label, theirs.label, load.requests, load.rate, metric, difference
                    )
                )
    return found


def _pairs(contenders: Sequence[Contender]) -> Iterator[tuple[Contender, Contender]]:
    for ours in contenders:
        for theirs in contenders:
            if ours.policy not in SUBJECTS or theirs.label == ours.label:
                continue
            is_same_training = ours.training_seed == theirs.training_seed
            if is_same_training or theirs == GREEDY:
                yield ours, theirs
