"""One model of an engine: what the simulator and the training keep by other means is it too."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.lab.simulator.engine import Cluster
from controller.lab.training.vector_environment import Traffic, VectorEnvironment, World
from controller.routing.engine_model import EngineModel, EngineTask, answered, slots_alone
from controller.routing.ppo.observation import Layout


def ends_of(slots: int, arrivals: list[float], seconds: list[float]) -> list[float]:
    """When each request ends at an engine whose slots do not slow each other."""
    engine, now, found = slots_alone(slots), 0.0, [math.nan] * len(arrivals)
    for request, (moment, service) in enumerate(zip(arrivals, seconds, strict=True)):
        now = step_until(engine, now, moment, found)
        engine.waiting.append(EngineTask(request, 0.0, service))
        engine.admit(now)
    step_until(engine, now, math.inf, found)
    return found


def step_until(engine: EngineModel, now: float, until: float, found: list[float]) -> float:
    """Step over events up to `until`, filling `found`; returns `until`."""
    while engine.is_busy and now + engine.next_event() <= until:
        seconds = engine.next_event()
        now += seconds
        for task in engine.advance(seconds, now):
            found[task.request] = now
    if engine.is_busy:
        engine.advance(until - now, until)
    return until


GAPS = st.lists(st.floats(0.01, 5.0), min_size=1, max_size=12)


@given(st.integers(1, 4), GAPS, st.data())
def test_node_of_the_simulator_is_the_engine_whose_slots_are_alone(
    slots: int, gaps: list[float], data: st.DataObject
) -> None:
    arrivals = np.cumsum(gaps).tolist()
    seconds = data.draw(
        st.lists(st.floats(0.01, 9.0), min_size=len(gaps), max_size=len(gaps)), label="seconds"
    )
    cluster, found = Cluster(np.array([slots])), {}
    for request, (moment, service) in enumerate(zip(arrivals, seconds, strict=True)):
        found |= {one.request: one.finished for one in cluster.advance(moment)}
        cluster.send(request, 0, service, service)
        ahead = {one.request: one.finished for one in cluster.running()}
    found |= {one.request: one.finished for one in cluster.advance(1e4)}
    expected = ends_of(slots, arrivals, seconds)
    assert [found[request] for request in range(len(gaps))] == pytest.approx(expected, abs=1e-6)
    assert all(found[request] == end for request, end in ahead.items())


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(0, 999))
def test_queue_of_the_training_is_the_engine_whose_slots_are_alone(slots: int, seed: int) -> None:
    one = np.zeros(1, dtype=np.int64)
    layout = Layout(one, one, one, one, one, np.ones((1, 1), dtype=np.bool_))
    rng, queries = np.random.default_rng(seed), 20
    ones = np.ones((queries, 1))
    world = World(
        layout, ones, ones, rng.uniform(0.1, 4.0, (queries, 1, 1)), np.array([slots]), np.ones(1),
        np.ones(1), 0.0, np.ones(1),
    )  # fmt: skip
    environment = VectorEnvironment(world, 1, rng, Traffic(rates=(1.0, 1.0)))
    arrivals, seconds, ends = [], [], []
    for _ in range(30):
        arrivals.append(float(environment.now[0]))
        result = environment.step(one, one, np.zeros(1))
        seconds.append(float(result.seconds[0]))
        ends.append(arrivals[-1] + float(result.waiting[0]) + seconds[-1])
    assert ends == pytest.approx(ends_of(slots, arrivals, seconds), abs=1e-6)


def test_engines_of_a_node_that_want_more_than_its_processor_slow_down_alike() -> None:
    """Each alone would end after 3 s; together they want 1.5 of the processor."""
    engines = [EngineModel(100.0, 1.0, 0.0, 1, 0.75) for _ in range(2)]
    for request, engine in enumerate(engines):
        engine.waiting.append(EngineTask(request, 0.0, 3.0))
    assert [(now, task.request) for now, task in answered(engines)] == [
        (pytest.approx(4.5), 0),
        (pytest.approx(4.5), 1),
    ]
