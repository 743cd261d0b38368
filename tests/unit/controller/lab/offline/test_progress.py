"""How a run is shown on a terminal and in a log."""

import io

import pytest
from rich.console import Console

from controller.lab.offline.fleet_view import ProfiledTarget
from controller.lab.offline.journal import Failure
from controller.lab.offline.progress import RunProgress
from tests.unit.controller.lab.offline.rows import measurement

PI = ProfiledTarget("pi", "small")
FAILURE = Failure("profiled", "gsm8k", "test/[1]", "pi", "small", 3, "UNAVAILABLE: [gone]", 1.5)


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("target", [PI, None])
def test_counts_scores_and_failures_are_shown(
    is_terminal: bool, target: ProfiledTarget | None
) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=120)
    with RunProgress(console) as progress:
        progress.started(target, 4, 1)
        progress.finished(target, measurement(score_ratio=1.0))
        progress.finished(target, measurement(score_ratio=0.0))
        progress.finished(target, FAILURE)
        progress.gone(PI, 1)
    told = out.getvalue()
    assert "test/[1]" in told
    assert "UNAVAILABLE: [gone]" in told
    assert "1 questions are left" in told
    if is_terminal:
        assert "4/4" in told
        assert "score 0.50" in told
