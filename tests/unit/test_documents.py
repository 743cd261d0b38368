"""What the pages say of the tree is so, and people can skim what they read."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if path.name != "CHANGELOG.md"
)
SOURCES = sorted(
    path
    for folder in ("controller", "edge_agent", "deploy", "proto/pointsman", "tests")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".proto", ".yml", ".j2")
)

LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
CODE_PATH = re.compile(r"`((?:controller|edge_agent|proto|deploy|docs|models|tests)/[\w./-]*)`")
CASE = re.compile(r"\b[Cc]ases? [A-Z]\d{1,2}\b|\((?:[DGLMOPRS]\d{1,2})(?:, [DGLMOPRS]\d{1,2})*\)")
UNSKIMMABLE = re.compile(
    r"\banew\b|\belse[.:;)]?(?= *(?:\||$))|\bmay be given again\b|\btells? of\b", re.MULTILINE
)

TO_BE_MADE = {"controller/routing/baselines/cheapest.py", "edge_agent/sensors/meter.py"}
"""Files that the recipes have somebody make."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_and_every_path_of_a_page_leads_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link for link in LINK.findall(text) if "://" not in link]
    assert not [link for link in links if not (page.parent / link).exists()]
    paths = {*CODE_PATH.findall(text)} - TO_BE_MADE
    assert not [path for path in paths if not (ROOT / path).exists()]


@pytest.mark.parametrize("page", ["settings.md", "cli.md"])
def test_settings_and_help_can_be_skimmed(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert UNSKIMMABLE.findall(text) == []


def test_no_case_is_cited_that_the_repository_does_not_hold() -> None:
    cited = {
        name(path): found
        for path in SOURCES
        if path != Path(__file__) and (found := CASE.findall(path.read_text(encoding="utf-8")))
    }
    assert cited == {}
