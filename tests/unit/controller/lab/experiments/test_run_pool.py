"""Runs that are kept one by one, and gone on with."""

from dataclasses import replace
from pathlib import Path

import pytest

from controller.lab.experiments import run_pool as module
from controller.lab.experiments.comparison_setting import Setting
from controller.lab.experiments.contenders import PAPER, Contender
from controller.lab.experiments.run_pool import RunPart, run_parts
from controller.lab.experiments.runs import Circumstances, RunFigures, SimulatedLoad
from controller.lab.simulator.inputs import save_inputs, synthetic_inputs
from controller.lab.simulator.scenario_file import read_scenario

RANDOM, BEST = (
    RunPart(Contender(name, name), SimulatedLoad(6, 1.0), Circumstances())
    for name in ("random", "high-accuracy")
)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = tmp_path_factory.mktemp("inputs")
    save_inputs(synthetic_inputs(read_scenario("drlm"), 0, 90), folder / "inputs")
    return Setting("drlm", folder / "inputs", None)


class Ran:
    """How many runs were kept, and which were done, the last time."""

    def __init__(self, setting: Setting, kept: Path) -> None:
        self.setting, self.kept_in = setting, kept

    def __call__(self, *parts: RunPart, seeds: range = range(2), jobs: int = 1) -> int:
        self.said: list[tuple[int, int, str]] = []
        self.found: list[list[RunFigures]] = run_parts(
            self.setting, parts, seeds, self.kept_in, jobs, lambda *said: self.said.append(said)
        )
        return len(self.said) - 1  # the first tells what was kept


@pytest.fixture
def ran(setting: Setting, tmp_path: Path) -> Ran:
    return Ran(setting, tmp_path)


def test_only_what_is_missing_runs(ran: Ran) -> None:
    assert ran(RANDOM) == 2
    first = ran.found[0]
    assert ran(RANDOM, BEST, seeds=range(3)) == 1 + 3
    assert ran.said[0] == (2, 6, "2 kept")
    assert ran.said[-1] == (6, 6, "high-accuracy, 6 at 1/s")
    assert ran.found[0][:2] == first  # decision times and all
    assert [run.seed for run in ran.found[1]] == [0, 1, 2]


def test_a_kill_at_any_byte_costs_the_run_that_was_being_written_at_most(ran: Ran) -> None:
    ran(RANDOM)
    whole = ran.found
    (file,) = ran.kept_in.iterdir()
    text = file.read_text()
    for cut in (0, 1, len(text) // 4, len(text) // 2, len(text) - 1):
        file.write_text(text[:cut])
        # The newline that ends a line is no part of what it says.
        complete = text[: cut + 1].count("}\n")
        assert ran(RANDOM) == 2 - complete
        again = [replace(run, decision_milliseconds=0.0) for run in ran.found[0]]
        assert again == [replace(run, decision_milliseconds=0.0) for run in whole[0]]
        assert ran(RANDOM) == 0


def test_what_matters_has_changed_and_runs_again(
    ran: Ran, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran(RANDOM)
    assert ran(replace(RANDOM, contender=Contender("by chance", "random"))) == 0
    for other in (
        replace(RANDOM, load=SimulatedLoad(7, 1.0)),
        replace(RANDOM, load=SimulatedLoad(6, 2.0)),
        replace(RANDOM, load=SimulatedLoad(6, 1.0, "bursts")),
        replace(RANDOM, circumstances=Circumstances((0.5, 0.0, 0.5, 0.0))),
        replace(RANDOM, contender=Contender("random", "random", is_spread=True)),
    ):
        assert ran(other) == 2
    monkeypatch.setattr(module, "_code_digest", lambda: "of other code")
    assert ran(RANDOM) == 2


def test_another_trace_at_the_same_path_runs_again(ran: Ran, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:{at // 60:02}:{at % 60:02},{at},7" for at in range(0, 900, 3)]
    part = replace(RANDOM, load=SimulatedLoad(6, 1.0, str(trace)))
    ran.kept_in = tmp_path / "parts"
    for lines in (rows, rows[::2]):
        trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
        assert ran(part) == 2
    assert ran(part) == 0


def test_several_processes_keep_the_same(ran: Ran) -> None:
    parts = [replace(RANDOM, contender=each, load=SimulatedLoad(4, 1.0)) for each in PAPER[:3]]
    assert ran(*parts, jobs=2) == 6
    together = ran.found
    assert ran(*parts) == 0
    assert ran.found == together
