"""How model commands look to people."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from edge_agent.models.catalog import load_catalog
from edge_agent.models.commands import (
    CheckedModel,
    ModelList,
    PulledModel,
    RemovedModel,
    Verification,
    list_models,
)
from edge_agent.models.progress import PullProgress, PullStage
from edge_agent.models.store import ModelStore
from edge_agent.models.tables import (
    render_list,
    render_pulled,
    render_removed,
    render_verification,
    shown_progress,
)


def console_of(width: int = 80, *, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def listed(tmp_path) -> ModelList:
    catalog = load_catalog()
    store = ModelStore(tmp_path)
    entry = catalog.get("smollm2-135m-instruct-q4_1")
    assert entry.size_bytes is not None
    with store.unfinished_path(entry, "part").open("wb") as half:
        half.truncate(entry.size_bytes // 2)
    return list_models(catalog, store)


def test_the_list_shows_every_model_whole_on_a_small_terminal(listed):
    console = console_of(80)
    render_list(listed, console)
    lines = text_of(console).splitlines()
    assert lines[0].split() == ["MODEL", "PARAMS", "QUANT", "CONTEXT", "SIZE", "STATE"]
    for model in listed.models:
        assert any(line.startswith(model.name + " ") for line in lines)
    assert "partial 50%" in lines[1]
    assert "made here" in text_of(console)
    assert all(len(line.rstrip()) <= 80 for line in lines[:-1])


def test_a_wide_terminal_shows_the_licences(listed):
    console = console_of(120)
    render_list(listed, console)
    assert "Gemma Terms of Use" in text_of(console)


def test_results_are_printed_as_they_are_said():
    console = console_of(200)
    pulled = PulledModel("a", Path("/m/[a].gguf"), 98_362_432, "ab" * 32, "url x", False, 4.96)
    render_pulled(pulled, console)
    render_verification(Verification(()), console)
    render_verification(
        Verification(
            (
                CheckedModel("a", Path("/m/a"), "ab" * 32, None),
                CheckedModel("b", Path("/m/b"), None, "it has [no] bytes"),
            )
        ),
        console,
    )
    render_removed(RemovedModel("a", 98_362_432), console)
    render_removed(RemovedModel("b", 0), console)
    assert text_of(console).splitlines() == [
        "a: /m/[a].gguf (98.4 MB, took 5.0 s)",
        "  source  url x",
        f"  sha256  {'ab' * 32}",
        "No model is installed. Run `edge-agent models pull NAME`.",
        f"a: ok  {'ab' * 32}",
        "b: wrong: it has [no] bytes",
        "a: freed 98.4 MB",
        "b: was not there",
    ]


REPORTS = [
    PullProgress("a", PullStage.DOWNLOADING, "url x", 0, 1_000_000),
    PullProgress("a", PullStage.DOWNLOADING, "url x", 500_000, 1_000_000),
    PullProgress("a", PullStage.RETRYING, "url x: no byte within 30 s; trying again"),
    PullProgress("a", PullStage.DOWNLOADING, "url x", 600_000, 1_000_000),
    PullProgress("a", PullStage.SOURCE_FAILED, "url x: [gone]"),
    PullProgress("a", PullStage.DONE, "installed"),
]


def test_a_log_gets_a_line_a_stage_and_no_more():
    console = console_of(60)
    with shown_progress(console) as on_progress:
        for report in REPORTS:
            on_progress(report)
    assert text_of(console).splitlines() == [
        "a: downloading url x (0% of 1.0 MB)",
        "a: retrying url x: no byte within 30 s; trying again",
        "a: downloading url x (60% of 1.0 MB)",
        "a: source failed url x: [gone]",
        "a: done installed",
    ]


def test_a_terminal_gets_a_bar_and_keeps_what_went_wrong():
    console = console_of(120, terminal=True)
    with shown_progress(console) as on_progress:
        for report in REPORTS:
            on_progress(report)
    assert "a: source failed url x: [gone]" in text_of(console)
    assert "a: retrying" in text_of(console)


def test_listing_models_brings_in_nothing_heavy():
    """The agent starts fast and its parent process stays small."""
    program = (
        "import sys, edge_agent.models.commands, edge_agent.models.pull\n"
        "print([m for m in ('httpx', 'yaml', 'rich', 'numpy', 'llama_cpp', 'grpc', 'controller')"
        " if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
