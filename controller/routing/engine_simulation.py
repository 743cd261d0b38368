"""When each request of a batch will be answered, by stepping every node's engines.

Pure. The objective's bound is made for searching; this is made to be right, for deadlines, for the
client and for judging the model against reality. It begins with what is in flight: those requests
hold their slots and need what they still need.

Answers take up slots for their mean length; each one's own finish is that of its median length,
since lengths are very uneven. `controller.routing.engine_model` has the engine.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from controller.domain.cluster import Destination, InFlightWork
from controller.routing.engine_model import EngineModel, EngineTask, answered, engine_of
from controller.routing.formulation import FormulatedBatch
from controller.routing.policy import UNASSIGNED
from controller.routing.problem import FloatArray, IntArray

_BEFORE: Final = -1
"""Stands for a request of an earlier batch, whose finish nobody asks for."""


def predicted_finish_seconds(batch: FormulatedBatch, assignment: IntArray) -> FloatArray:
    """When each request's answer is complete.

    Args:
        batch: the problem with its snapshot, whose requests in flight come first.
        assignment: int64[R]; destination index, or -1 for a request sent nowhere.

    Returns:
        float64[R], seconds after the snapshot; NaN for a request sent nowhere.

    Raises:
        ValueError: another shape, or an index that is no destination.
    """
    chosen = np.asarray(assignment)
    if chosen.shape != (batch.problem.n_requests,) or chosen.dtype.kind not in "iu":
        raise ValueError(f"assignment must be integers of shape ({batch.problem.n_requests},)")
    if chosen.min() < UNASSIGNED or chosen.max() >= batch.problem.n_destinations:
        raise ValueError(f"assignment outside [-1, {batch.problem.n_destinations})")
    finish = np.full(batch.problem.n_requests, np.nan)
    used = {int(batch.problem.node_of[d]) for d in chosen if d != UNASSIGNED}
    columns: dict[int, list[int]] = {node: [] for node in used}
    for d, node in enumerate(batch.problem.node_of.tolist()):
        if node in columns:
            columns[node].append(d)
    for node, own in columns.items():
        destinations = batch.snapshot.destinations
        engines = {d: engine_of(destinations[d]) for d in own}
        _fill_in_flight(batch.snapshot.nodes[node].in_flight, engines, destinations)
        for r in range(batch.problem.n_requests):
            d = int(chosen[r])
            if d in engines:
                engines[d].waiting.append(
                    EngineTask(
                        r,
                        float(batch.read_tokens[r, d]),
                        float(batch.output_tokens[r, d]),
                        float(batch.median_tokens[r, d] - batch.output_tokens[r, d]),
                    )
                )
        for now, task in answered(list(engines.values())):
            if task.request != _BEFORE:
                finish[task.request] = now + _extra_seconds(task, now)
    rows = np.flatnonzero(chosen != UNASSIGNED)
    finish[rows] += batch.problem.network_seconds[rows, chosen[rows]]
    return finish


def _fill_in_flight(
    works: Sequence[InFlightWork],
    engines: dict[int, EngineModel],
    destinations: Sequence[Destination],
) -> None:
    of_model = {destinations[d].model: engine for d, engine in engines.items()}
    for work in works:
        engine = of_model.get(work.model)
        if engine is not None:  # a model that is gone takes its requests with it
            engine.waiting.append(EngineTask(_BEFORE, work.prompt_tokens, work.output_tokens))


def _extra_seconds(task: EngineTask, now: float) -> float:
    """From an answer's mean length, by which the others have to wait for it, to its median."""
    steps = max(task.output_tokens - 1.0, 1.0)
    return max(task.extra_tokens / steps, -1.0) * (now - task.writes_from)
