"""What a run shows: how well finishes and joules were predicted, and how good each model is."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from controller.lab.offline.measurements import Measurement

_Z: Final = 1.959963984540054
"""Of a two-sided interval of 95 %."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """One finished request: what was foreseen of it, and what came.

    Attributes:
        predicted_joules, measured_joules: of the node for this request; None where either is
            unknown.
    """

    node_id: str
    model: str
    batch_id: str
    predicted_seconds: float
    measured_seconds: float
    predicted_joules: float | None = None
    measured_joules: float | None = None


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How well one quantity was predicted, in seconds or joules.

    Attributes:
        requests: behind it.
        median_error_ratio: median of |predicted - measured| / measured.
        p90_error_ratio: its 90th percentile.
        bias_ratio: median of (predicted - measured) / measured; below 0 is too hopeful.
        spearman: rank correlation; None for fewer than 2 requests, or when all are equal.
        kendall: tau-b; the same.
        median_predicted: of what was foreseen.
        median_measured: of what came.
    """

    requests: int
    median_error_ratio: float
    p90_error_ratio: float
    bias_ratio: float
    spearman: float | None
    kendall: float | None
    median_predicted: float
    median_measured: float


@dataclass(frozen=True, slots=True)
class ClassQuality:
    """How good one model is at one class of questions.

    Attributes:
        graded: answers behind it.
        mean_score_ratio: 0 to 1.
        low, high: Wilson's interval of 95 %, with scores between 0 and 1 taken as shares.
    """

    question_class: str
    model: str
    graded: int
    mean_score_ratio: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class ProfilingReport:
    """Everything that `profile report` prints.

    Attributes:
        requests: accuracy of the finishes of all requests; None without any.
        destinations: "node/model" -> accuracy of its requests' finishes.
        makespans: accuracy of the last finish of each batch; None without batches.
        energy: accuracy of the joules of all requests that have both; None without any.
        destination_energy: "node/model" -> accuracy of its requests' joules.
        quality: in order of class and model.
    """

    requests: Accuracy | None
    destinations: dict[str, Accuracy]
    makespans: Accuracy | None
    energy: Accuracy | None
    destination_energy: dict[str, Accuracy]
    quality: tuple[ClassQuality, ...]


def prediction(row: Measurement) -> Prediction:
    """What a measurement says of its prediction."""
    return Prediction(
        row.node_id,
        row.model,
        row.batch_id,
        row.predicted_finish_seconds,
        row.measured_finish_seconds,
        row.predicted_energy_joules,
        row.energy_joules,
    )


def report(predictions: Sequence[Prediction], graded: Iterable[Measurement]) -> ProfilingReport:
    """The report.

    Args:
        predictions: of requests whose prediction is judged.
        graded: measurements whose scores are averaged; those without a score do not count.
    """
    by_destination = _grouped(predictions, lambda found: f"{found.node_id}/{found.model}")
    batches = _grouped(predictions, lambda found: found.batch_id).values()
    makespans = [
        (
            max(found.predicted_seconds for found in members),
            max(found.measured_seconds for found in members),
        )
        for members in batches
    ]
    return ProfilingReport(
        accuracy(_finishes(predictions)),
        _by_name(by_destination, _finishes),
        accuracy(makespans),
        accuracy(_joules(predictions)),
        _by_name(by_destination, _joules),
        class_table(graded),
    )


_Pairs = list[tuple[float, float]]


def _finishes(predictions: Iterable[Prediction]) -> _Pairs:
    return [(found.predicted_seconds, found.measured_seconds) for found in predictions]


def _joules(predictions: Iterable[Prediction]) -> _Pairs:
    return [
        (found.predicted_joules, found.measured_joules)
        for found in predictions
        if found.predicted_joules is not None and found.measured_joules is not None
    ]


def _by_name(
    groups: Mapping[str, Sequence[Prediction]], pairs: Callable[[Sequence[Prediction]], _Pairs]
) -> dict[str, Accuracy]:
    return {
        name: found
        for name, members in sorted(groups.items())
        if (found := accuracy(pairs(members))) is not None
    }


def report_as_json(found: ProfilingReport) -> dict[str, Any]:
    """The report as plain values; ratios are shares, not percent."""
    return asdict(found)


def _grouped(
    predictions: Iterable[Prediction], key: Callable[[Prediction], str]
) -> dict[str, list[Prediction]]:
    groups: dict[str, list[Prediction]] = defaultdict(list)
    for found in predictions:
        groups[key(found)].append(found)
    return dict(groups)


def accuracy(pairs: Iterable[tuple[float, float]]) -> Accuracy | None:
    """How well these were predicted: (predicted, measured); None without any measured above 0."""
    kept = [pair for pair in pairs if pair[1] > 0]
    if not kept:
        return None
    predicted, measured = np.array(kept).T
    errors = (predicted - measured) / measured
    return Accuracy(
        len(kept),
        float(np.median(np.abs(errors))),
        float(np.quantile(np.abs(errors), 0.9)),
        float(np.median(errors)),
        spearman(predicted, measured),
        kendall(predicted, measured),
        float(np.median(predicted)),
        float(np.median(measured)),
    )


def spearman(first: NDArray[np.float64], second: NDArray[np.float64]) -> float | None:
    """Spearman's rank correlation, ties at their mean rank; None when it has no meaning."""
    if len(first) < 2:
        return None
    ranks = [_mean_ranks(values) for values in (first, second)]
    spread = [float(np.std(values)) for values in ranks]
    if not all(spread):
        return None
    products = np.prod([values - values.mean() for values in ranks], axis=0)
    return float(np.mean(products) / (spread[0] * spread[1]))


def _mean_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    found: NDArray[np.float64] = (last - (counts - 1) / 2)[inverse]
    return found


def kendall(first: NDArray[np.float64], second: NDArray[np.float64]) -> float | None:
    """Kendall's tau-b in O(n log n); None when it has no meaning.

    Source: Knight, "A computer method for calculating Kendall's tau with ungrouped data", 1966.
    """
    count = len(first)
    pairs = count * (count - 1) // 2
    order = np.lexsort((second, first))
    tied_first = _tied_pairs(first)
    tied_second = _tied_pairs(second)
    tied_both = _tied_pairs(first + 1j * second)
    if pairs in (tied_first, tied_second):
        return None
    discordant = _inversions(np.unique(second[order], return_inverse=True)[1].tolist())
    difference = pairs - tied_first - tied_second + tied_both - 2 * discordant
    return float(difference / math.sqrt((pairs - tied_first) * (pairs - tied_second)))


def _tied_pairs(values: NDArray[Any]) -> int:
    counts = np.unique(values, return_counts=True)[1].astype(np.int64)
    return int((counts * (counts - 1) // 2).sum())


def _inversions(ranks: Sequence[int]) -> int:
    """Pairs in which the earlier value is the larger one; a Fenwick tree counts them."""
    size = max(ranks, default=0) + 1
    tree = [0] * (size + 1)
    found = 0
    for seen, rank in enumerate(ranks):
        position, not_larger = rank + 1, 0
        while position:
            not_larger += tree[position]
            position -= position & -position
        found += seen - not_larger
        position = rank + 1
        while position <= size:
            tree[position] += 1
            position += position & -position
    return found


def class_table(rows: Iterable[Measurement]) -> tuple[ClassQuality, ...]:
    """Mean score of each model on each class, with how sure it is."""
    scores: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        if row.score_ratio is not None:
            scores[row.question_class, row.model].append(row.score_ratio)
    found = []
    for (question_class, model), values in sorted(scores.items()):
        mean = math.fsum(values) / len(values)
        low, high = wilson(mean, len(values))
        found.append(ClassQuality(question_class, model, len(values), mean, low, high))
    return tuple(found)


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's score interval of 95 % of a share.

    Raises:
        ValueError: nothing was counted.
    """
    if count < 1:
        raise ValueError("nothing was counted")
    centre = share + _Z**2 / (2 * count)
    margin = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    scale = 1 + _Z**2 / count
    return max(0.0, (centre - margin) / scale), min(1.0, (centre + margin) / scale)
