"""What is remembered between decisions changes their time and nothing else."""

from dataclasses import replace

import numpy as np
import pytest

from controller.domain.answer_length import AnswerLengthCurve
from controller.domain.cluster import ClusterSnapshot
from controller.routing.decision_memory import DecisionMemory
from controller.routing.formulation import formulate
from tests.unit.controller.routing.clusters import destination, fleet, node, request

CURVE = AnswerLengthCurve((0.0, 40.0), (1.0, 0.3))


def snapshot(version: int | None, **changes: object) -> ClusterSnapshot:
    destinations = [destination("a", answer_lengths=CURVE), destination("b", **changes)]
    return replace(fleet([node("a"), node("b")], destinations), fleet_version=version)


def test_tables_of_one_version_are_the_same_objects() -> None:
    memory = DecisionMemory()
    columns, lengths = memory.columns(snapshot(3)), memory.answer_lengths(snapshot(3))
    claimed = snapshot(3, free_slots=1, next_slot_seconds=2.0)
    assert memory.columns(claimed) is columns
    assert memory.answer_lengths(claimed) is lengths


def test_another_version_is_read_whether_greater_or_less() -> None:
    memory = DecisionMemory()
    memory.columns(snapshot(3))
    assert memory.columns(snapshot(4, context_tokens=77)).context_tokens[1] == 77
    assert memory.columns(snapshot(3)).context_tokens[1] != 77


def test_snapshot_that_nobody_counts_is_read_in_full_and_not_kept() -> None:
    memory = DecisionMemory()
    kept = memory.columns(snapshot(1))
    assert memory.columns(snapshot(None, context_tokens=77)).context_tokens[1] == 77
    assert memory.columns(snapshot(1)) is kept


def test_two_memories_share_nothing() -> None:
    one, other = DecisionMemory(), DecisionMemory()
    one.columns(snapshot(1, context_tokens=77))
    assert other.columns(snapshot(1)).context_tokens[1] != 77


def test_problem_with_a_memory_is_the_problem_without() -> None:
    memory = DecisionMemory()
    for version, changes in enumerate(({}, {"slots": 9}, {"slots": 9}, {"answer_lengths": CURVE})):
        seen = snapshot(version, **changes)
        with_memory = formulate([request()], seen, memory=memory)
        without = formulate([request()], seen)
        for name in ("quality", "cost_usd", "energy_joules", "work_seconds", "latency_seconds",
                     "network_seconds", "feasible"):  # fmt: skip
            np.testing.assert_array_equal(
                getattr(with_memory.problem, name), getattr(without.problem, name)
            )


def test_what_others_keep_is_made_again_when_its_key_changes() -> None:
    memory, made = DecisionMemory(), []
    for key in ("x", "x", "y", "x"):
        memory.kept("thing", key, lambda: made.append(1))
    assert len(made) == 3


def test_longer_pause_is_remembered_at_once_and_forgotten_slowly() -> None:
    memory = DecisionMemory()
    memory.paused(4.0)
    assert memory.pause_seconds == 4.0
    memory.paused(0.1)
    assert memory.pause_seconds == pytest.approx(0.9 * 4.0)
    memory.paused(5.0)
    assert memory.pause_seconds == 5.0
