"""The simulator's benchmark runs, and says what it ran."""

import json

from click.testing import CliRunner

from controller.cli import main


def test_every_figure_is_measured() -> None:
    found = CliRunner().invoke(main, ["lab", "bench", "simulator", "--json", "--queries", "64"])
    assert found.exit_code == 0, found.output
    figures = json.loads(found.output)
    assert figures["nodes"] == 64
    assert figures["destinations"] == 959
    rates = {name: value for name, value in figures.items() if name.endswith("per_second")}
    assert set(rates) >= {
        "engine_queries_per_second",
        "fastest_queries_per_second",
        "least-loaded_windows_queries_per_second",
    }
    assert min(rates.values()) > 0.0
    cheapest = figures["cheapest_policy"]
    best = figures["cheapest_policy_queries_per_second"]
    assert best == figures[f"{cheapest}_queries_per_second"]


def test_a_scenario_that_is_none_is_refused() -> None:
    found = CliRunner().invoke(main, ["lab", "bench", "simulator", "--scenario", "nowhere.toml"])
    assert found.exit_code == 2
    assert "nowhere.toml: cannot be read" in found.output
