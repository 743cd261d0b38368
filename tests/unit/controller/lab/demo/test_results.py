"""Figures of one policy's run."""

import pytest

from controller.lab.demo.questions import DemoQuestion
from controller.lab.demo.results import Answer, BatchFigures, PolicyResult, to_json

QUESTION = DemoQuestion("geography", "What is the capital of France?", ("Paris",))


def result() -> PolicyResult:
    return PolicyResult(
        "memetic",
        (
            Answer(QUESTION, "Paris.", "pi", "m", "b1", 2.0, True, 3.0),
            Answer(QUESTION, "Lyon.", "vm", "m", "b2", 4.0, False, 5.0),
            Answer(QUESTION, error="UNAVAILABLE: gone"),
        ),
        (
            BatchFigures(1, 0.2, 2.5, 1.0, "memetic", ""),
            BatchFigures(3, 0.6, 4.5, 2.0, "memetic", ""),
        ),
    )


def test_failed_answers_count_as_wrong_and_cost_nothing() -> None:
    assert result().quality == pytest.approx(1 / 3)
    assert result().failed == 1
    assert result().energy_joules == 6.0


def test_objective_of_several_windows_is_weighted_by_their_requests() -> None:
    assert result().objective == pytest.approx(0.5)
    assert result().decision_milliseconds == 3.0


def test_makespans_are_the_latest() -> None:
    assert result().makespan_predicted_seconds == 4.5
    assert result().makespan_measured_seconds == 5.0


def test_json_has_the_promised_names() -> None:
    figures = to_json([result()])["policies"]["memetic"]
    assert {
        "requests",
        "failed",
        "quality",
        "energy_joules",
        "makespan_predicted_seconds",
        "makespan_measured_seconds",
        "objective",
        "decision_milliseconds",
    } <= set(figures)
    assert figures["energy_is_estimate"] is True
