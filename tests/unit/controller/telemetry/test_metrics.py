"""Prometheus' text format."""

from controller.telemetry.metrics import CounterMetric, exposition


def test_counters_are_written_with_help_type_and_sorted_samples() -> None:
    found = exposition(
        [
            CounterMetric(
                "pointsman_things_total",
                "Things that happened.",
                {(("node", "b"), ("cause", "y")): 2, (("node", "a"), ("cause", "x")): 12345678},
            ),
            CounterMetric("pointsman_others_total", "Never happened.", {}),
            CounterMetric("pointsman_plain_total", "Without labels.", {(): 3}),
        ]
    )
    assert found == (
        "# HELP pointsman_things_total Things that happened.\n"
        "# TYPE pointsman_things_total counter\n"
        'pointsman_things_total{node="a",cause="x"} 12345678\n'
        'pointsman_things_total{node="b",cause="y"} 2\n'
        "# HELP pointsman_others_total Never happened.\n"
        "# TYPE pointsman_others_total counter\n"
        "# HELP pointsman_plain_total Without labels.\n"
        "# TYPE pointsman_plain_total counter\n"
        "pointsman_plain_total 3\n"
    )


def test_what_would_end_a_label_or_a_line_is_escaped() -> None:
    labels = (("name", 'a"b\\c\nd'),)
    found = exposition([CounterMetric("n_total", "One\ntwo\\.", {labels: 1})])
    assert 'n_total{name="a\\"b\\\\c\\nd"} 1\n' in found
    assert "# HELP n_total One\\ntwo\\\\.\n" in found
