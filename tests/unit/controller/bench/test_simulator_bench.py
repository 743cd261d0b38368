"""The simulator's benchmark runs, and says what it ran."""

import json

from click.testing import CliRunner

from controller.cli import main


def test_every_figure_is_measured() -> None:
    found = CliRunner().invoke(main, ["bench", "simulator", "--json", "--queries", "64"])
    assert found.exit_code == 0, found.output
    figures = json.loads(found.output)
    assert figures["nodes"] == 64
    assert figures["destinations"] == 1040
    rates = [value for name, value in figures.items() if name.endswith("per_second")]
    assert len(rates) == 5
    assert min(rates) > 0.0
