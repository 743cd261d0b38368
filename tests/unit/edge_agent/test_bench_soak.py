import asyncio
from pathlib import Path

import pytest

from edge_agent.bench_soak import course_of, run_soak
from edge_agent.engine.base import EngineSettings
from edge_agent.errors import UsageError


def test_a_course_begins_when_the_process_has_settled() -> None:
    course = course_of([50, 90, 100, *[100] * 50, *[104] * 20])
    assert course.start_bytes == 100
    assert course.end_bytes == 104
    assert course.peak_bytes == 104
    assert course.growth_ratio == pytest.approx(0.04)


def test_a_single_peak_is_no_growth() -> None:
    course = course_of([100] * 30 + [500] + [100] * 30)
    assert (course.peak_bytes, course.growth_ratio) == (500, 0.0)


def test_few_samples_are_enough_for_a_course() -> None:
    assert course_of([7]).growth_ratio == 0.0
    assert course_of([100, 200]).start_bytes == 200


@pytest.mark.parametrize(("cycles", "requests"), [(1, 100), (5, 3)])
def test_too_little_work_is_refused(cycles: int, requests: int) -> None:
    with pytest.raises(UsageError):
        asyncio.run(run_soak(EngineSettings(Path("m.gguf")), cycles=cycles, requests=requests))
