import json
from typing import Any

import pytest

from controller.lab.bench import routing
from controller.lab.bench.routing import SIZES, Size, bench_routing, rows_as_json
from controller.lab.bench.sample import QueueModel

SMALL = Size(6, 3, 2)


@pytest.fixture(scope="module")
def rows() -> list[routing.BenchRow]:
    return bench_routing(
        [SMALL],
        policies=("memetic", "round-robin"),
        peers=(),
        seeds=2,
        reference_seconds=0.3,
    )


def test_sizes_are_those_that_are_promised() -> None:
    assert [size.name for size in SIZES] == [
        "10x6", "30x11", "30x22", "30x44", "30x88", "50x11", "128x11", "128x88", "128x320",
    ]  # fmt: skip


def test_every_policy_is_measured_on_both_queues(rows: list[routing.BenchRow]) -> None:
    assert [(row.size, row.queue, row.policy) for row in rows] == [
        ("6x6", queue, policy)
        for queue in ("serial", "batched")
        for policy in ("memetic", "round-robin")
    ]


def test_gaps_and_times_are_consistent(rows: list[routing.BenchRow]) -> None:
    for row in rows:
        assert row.seeds == 2
        assert 0.0 <= row.gap_percent <= row.worst_gap_percent
        assert row.bound_gap_percent >= row.gap_percent - 1e-6
        assert 0.0 < row.decision_milliseconds_p50 <= row.decision_milliseconds_p95
    ours = [row for row in rows if row.policy == "memetic"]
    assert all(row.own_bound_gap_percent is not None for row in ours)
    assert all(row.gap_percent < 0.1 for row in ours)
    others = [row for row in rows if row.policy == "round-robin"]
    assert all(row.own_bound_gap_percent is None and row.gap_percent > 1.0 for row in others)


def test_rows_are_plain_values(rows: list[routing.BenchRow]) -> None:
    read: list[dict[str, Any]] = json.loads(json.dumps(rows_as_json(rows)))
    assert read[0]["policy"] == "memetic"
    assert set(read[0]) >= {"objective", "gap_percent", "decision_milliseconds_p95"}


def test_peer_that_is_not_installed_is_named_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "peer_named", lambda name: None)
    lines: list[str] = []
    rows = bench_routing(
        [Size(2, 2, 1)],
        (QueueModel.SERIAL,),
        policies=("round-robin",),
        peers=("deap-ga",),
        seeds=1,
        reference_seconds=0.05,
        progress=lines.append,
    )
    assert [row.policy for row in rows] == ["round-robin"]
    assert "deap-ga" in lines[0]
    assert "deap is not installed" in lines[0]
