"""What no policy can beat: the best quality for a mean time of service, with a fleet to itself."""

from dataclasses import dataclass

import numpy as np

from controller.lab.simulator.scenario import Scenario
from controller.routing.problem import FloatArray


@dataclass(frozen=True, slots=True)
class Bound:
    """The best mean quality within a mean time.

    Attributes:
        seconds: what it takes; the limit, or less where the best takes less.
        quality: predicted, the greatest there is within it; NaN if nothing is that fast.
        score: what the answers of that choice score really.
    """

    seconds: float
    quality: float
    score: float


def quality_bounds(scenario: Scenario, limits: list[float]) -> list[Bound]:
    """For each limit on the mean of inference over the scenario's queries.

    Every query gets the fastest node of whatever model it goes to, as if nobody else were there,
    and may be shared out between two models: this linear program's value bounds from above what a
    policy that knows the predicted qualities can expect, whatever it knows of times and queues. Its
    solution takes the steps of the queries' concave fronts by falling slope.
    """
    true = scenario.seconds if scenario.true_seconds is None else scenario.true_seconds
    seconds = true.min(axis=2)  # [Q, M]
    steps, start = [], np.zeros(3)
    for query in range(seconds.shape[0]):
        front = _concave_front(seconds[query], scenario.quality[query])
        points = np.stack(
            [seconds[query, front], scenario.quality[query, front], scenario.correct[query, front]]
        )  # [3, front]
        start += points[:, 0]
        steps.append(np.diff(points))
    rises = np.concatenate(steps, axis=1)  # [3, steps]
    order = np.argsort(-rises[1] / rises[0], kind="stable")
    path = np.cumsum(np.column_stack([start, rises[:, order]]), axis=1) / seconds.shape[0]
    return [
        Bound(
            min(limit, float(path[0, -1])),
            float(np.interp(limit, path[0], path[1], left=np.nan)),
            float(np.interp(limit, path[0], path[2], left=np.nan)),
        )
        for limit in limits
    ]


def _concave_front(seconds: FloatArray, quality: FloatArray) -> list[int]:
    """Indices of the upper concave hull, from the fastest to the best, by rising seconds."""
    hull: list[int] = []
    for at in np.lexsort((-quality, seconds)).tolist():
        if hull and quality[at] <= quality[hull[-1]]:
            continue
        while len(hull) > 1 and not _is_above(hull[-2], hull[-1], at, seconds, quality):
            hull.pop()
        hull.append(at)
    return hull


def _is_above(a: int, b: int, c: int, seconds: FloatArray, quality: FloatArray) -> bool:
    """Whether b lies above the line from a to c."""
    rise = (quality[b] - quality[a]) * (seconds[c] - seconds[a])
    return bool(rise > (quality[c] - quality[a]) * (seconds[b] - seconds[a]))
