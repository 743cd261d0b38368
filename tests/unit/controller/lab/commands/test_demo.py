from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from controller.cli import main
from controller.lab.demo.results import PolicyResult
from controller.lab.demo.run import DEFAULT_POLICIES, DemoOptions


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], DemoOptions(Path("/tmp/c"), DEFAULT_POLICIES)),
        (
            ["--learn", "--stay", "--policy", "greedy-reward", "--json", "f.json"],
            DemoOptions(
                Path("/tmp/c"),
                ("greedy-reward",),
                stay=True,
                json_file=Path("f.json"),
                learns=True,
            ),
        ),
    ],
)
def test_flags_are_what_the_demonstration_is_told(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], expected: DemoOptions
) -> None:
    told: list[DemoOptions] = []

    async def only_listens(options: DemoOptions, console: Console) -> list[PolicyResult]:
        told.append(options)
        return []

    monkeypatch.setattr("controller.lab.commands.demo.run_demo", only_listens)
    ended = CliRunner().invoke(main, ["lab", "demo", "--cache", "/tmp/c", *flags])
    assert ended.exit_code == 0, ended.output
    assert told == [expected]
