from controller.lab.bench.budget import LOADS, Case, bench_budget, rows_as_json
from controller.lab.bench.sample import QueueModel
from controller.routing.memetic.algorithm import FORGET, Pauses


def test_a_longer_pause_is_remembered_at_once_and_forgotten_slowly():
    pauses = Pauses()
    pauses.met(4_000_000)
    assert pauses.longest_nanoseconds == 4_000_000
    pauses.met(100)
    assert pauses.longest_nanoseconds == int(FORGET * 4_000_000)
    pauses.met(5_000_000)
    assert pauses.longest_nanoseconds == 5_000_000


def test_every_load_is_measured_on_every_case():
    rows = rows_as_json(bench_budget((Case(6, 3, 2, QueueModel.SERIAL, 0.002),), decisions=5))
    assert [row["load"] for row in rows] == list(LOADS)
    assert all(row["size"] == "6x6" and row["decisions"] == 5 for row in rows)
    assert min(row["gap_percent"] for row in rows) >= 0.0
