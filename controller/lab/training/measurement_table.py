"""Measurements by column, as the predictors are grown on them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from controller.domain.hardware import (
    DeviceClass,
    ModelConfiguration,
    configuration_of,
    device_class,
)
from controller.lab.offline.measurements import Measurement
from controller.predictors.fitted import UNLIMITED, MeasuredLimits

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_MOST_CLASSES: Final = 64
_LEAST_QUERIES: Final = 10
"""A subject with fewer queries counts as its workload."""


class FitError(Exception):
    """The measurements do not suffice; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class TrainingTable:
    """Measurements by column: n rows over Q queries, M models and D device classes.

    Attributes:
        prompts: text of each query.
        classes: names of the C classes.
        class_index: int64[Q], the true class of each query.
        model_names: M names under which quality and length are kept.
        models: M configurations.
        devices: D device classes.
        query: int64[n].
        model: int64[n].
        device: int64[n].
        seconds: float64[n], of inference without waiting, above 0.
        completion_tokens: float64[n]; NaN is unknown.
        score_ratio: float64[n]; NaN was not graded.
        limits: of the answers.
        prefill_seconds: float64[n]; the part of `seconds` that read the prompt; None: not told.
    """

    prompts: tuple[str, ...]
    classes: tuple[str, ...]
    class_index: IntArray
    model_names: tuple[str, ...]
    models: tuple[ModelConfiguration, ...]
    devices: tuple[DeviceClass, ...]
    query: IntArray
    model: IntArray
    device: IntArray
    seconds: FloatArray
    completion_tokens: FloatArray
    score_ratio: FloatArray
    limits: MeasuredLimits = UNLIMITED
    prefill_seconds: FloatArray | None = None

    def __post_init__(self) -> None:
        if self.query.shape[0] == 0:
            raise FitError("there are no measurements to fit on")
        if not (np.isfinite(self.seconds).all() and (self.seconds > 0).all()):
            raise FitError("a measurement's inference time is not above 0")


def query_class(row: Measurement) -> str:
    """MMLU's subject; of other workloads, whose topics are many and small, their own name."""
    return row.question_class if row.workload.startswith("mmlu") else row.workload


def table_of(rows: Sequence[Measurement], *, device_by: str = "hardware") -> TrainingTable:
    """Measurements as columns; rows without tokens, decode time or scale are left out.

    Args:
        rows: of `read_measurements`.
        device_by: "hardware" takes machines of one hardware name, cores and memory as one class;
            "node" tells every node apart.

    Raises:
        FitError: no row is usable, or there are too many classes.
    """
    prompts: dict[str, int] = {}
    texts: list[str] = []
    labels: list[str] = []
    workloads: list[str] = []
    models: dict[str, int] = {}
    configurations: list[ModelConfiguration] = []
    devices: dict[DeviceClass, int] = {}
    columns: list[tuple[int, int, int, float, float, float, float]] = []
    longest, cut = 0, 0
    for row in rows:
        seconds = row.prefill_seconds + row.decode_seconds
        configuration = configuration_of(
            row.model_family, row.model_parameters_billions, row.model_quantisation
        )
        if seconds <= 0 or row.completion_tokens <= 0 or configuration is None:
            continue
        if row.prompt_digest not in prompts:
            prompts[row.prompt_digest] = len(texts)
            texts.append(row.prompt)
            labels.append(query_class(row))
            workloads.append(row.workload)
        if row.model not in models:
            models[row.model] = len(configurations)
            configurations.append(configuration)
        longest = max(longest, row.max_tokens)
        cut += row.finish_reason == "length"
        device = device_class(
            row.node_id if device_by == "node" else row.hardware,
            row.cpu_cores,
            row.memory_bytes,
            row.has_gpu,
        )
        columns.append(
            (
                prompts[row.prompt_digest],
                models[row.model],
                devices.setdefault(device, len(devices)),
                seconds,
                float(row.completion_tokens),
                float("nan") if row.score_ratio is None else row.score_ratio,
                row.prefill_seconds,
            )
        )
    if not columns:
        raise FitError(
            "no measurement has prefill and decode seconds, tokens, and the model's scale and "
            "quantisation; measure with `edge-controller lab profile run`"
        )
    labels = _without_small_classes(labels, workloads)
    classes = sorted(set(labels))
    if len(classes) > _MOST_CLASSES:
        raise FitError(f"{len(classes)} query classes; choose at most {_MOST_CLASSES} of them")
    table = np.array(columns, dtype=np.float64)
    return TrainingTable(
        prompts=tuple(texts),
        classes=tuple(classes),
        class_index=np.array([classes.index(label) for label in labels], dtype=np.int64),
        model_names=tuple(models),
        models=tuple(configurations),
        devices=tuple(devices),
        query=table[:, 0].astype(np.int64),
        model=table[:, 1].astype(np.int64),
        device=table[:, 2].astype(np.int64),
        seconds=table[:, 3],
        completion_tokens=table[:, 4],
        score_ratio=table[:, 5],
        limits=MeasuredLimits(longest, cut / len(columns)),
        prefill_seconds=table[:, 6],
    )


def _without_small_classes(labels: Sequence[str], workloads: Sequence[str]) -> list[str]:
    counts = Counter(labels)
    return [
        label if counts[label] >= _LEAST_QUERIES else workload
        for label, workload in zip(labels, workloads, strict=True)
    ]
