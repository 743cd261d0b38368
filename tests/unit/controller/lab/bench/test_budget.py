from controller.lab.bench.budget import LOADS, Case, bench_budget, rows_as_json
from controller.lab.bench.sample import QueueModel


def test_every_load_is_measured_on_every_case():
    rows = rows_as_json(bench_budget((Case(6, 3, 2, QueueModel.SERIAL, 0.002),), decisions=5))
    assert [row["load"] for row in rows] == list(LOADS)
    assert all(row["size"] == "6x6" and row["decisions"] == 5 for row in rows)
    assert min(row["gap_percent"] for row in rows) >= 0.0
