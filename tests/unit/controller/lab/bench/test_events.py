from controller.lab.bench.events import bench_events, rows_as_json


def test_every_event_that_was_offered_is_taken_and_every_request_is_kept():
    (row,) = rows_as_json(bench_events(1.0, (200,)))
    assert row["events"] > 0
    assert row["lost"] == 0
    assert row["decide_milliseconds_p50"] > 0
