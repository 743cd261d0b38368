"""The recipes of CONTRIBUTING.md, followed to the letter in a copy of the tree."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COPIED = ("controller", "edge_agent", "proto", "tests", "models", "pyproject.toml")


def steps(heading: str) -> list[tuple[str, str]]:
    """Each numbered step of a recipe: the file that it names first, and its code."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    _, _, after = page.partition(f"## {heading}\n")
    section = after.split("\n## ")[0]
    found = re.findall(r"^\d\. `([\w./-]+)`.*?```\w+\n(.*?)```", section, re.DOTALL | re.MULTILINE)
    return [(file, textwrap.dedent(code)) for file, code in found]


def with_line(file: Path, line: str) -> None:
    """Put a line into the table that the file holds, before the first row of its kind."""
    text = file.read_text(encoding="utf-8")
    first = re.search(r"^    \"[\w-]+\": \(", text, re.MULTILINE)
    assert first is not None
    file.write_text(text[: first.start()] + textwrap.indent(line, "    ") + text[first.start() :])


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name)
        else:
            shutil.copy(source, tmp_path / name)
    return tmp_path


def passes(tree: Path, *arguments: str) -> str:
    """What pytest prints in the copy, which must pass."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), str(tree / "proto" / "gen")])},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_a_policy_of_the_recipe_keeps_the_contract(tree: Path) -> None:
    (made, code), (table, line) = steps("A routing policy: 2 files")
    (tree / made).write_text(code, encoding="utf-8")
    with_line(tree / table, line)
    shown = passes(tree, "tests/contract/test_policy_contract.py", "-k", "cheapest")
    assert int(re.search(r"(\d+) passed", shown).group(1)) >= 5


@pytest.mark.slow
def test_a_sensor_of_the_recipe_keeps_the_contract(tree: Path) -> None:
    (made, code), (table, row), (fixture, board) = steps("A sensor: 2 files and a fixture")
    (tree / made).write_text(code, encoding="utf-8")
    sources = (tree / table).read_text(encoding="utf-8")
    start = "POWER_SENSORS: Final = (\n"
    assert start in sources
    (tree / table).write_text(
        "from edge_agent.sensors.meter import MeterSensor\n"
        + sources.replace(start, start + textwrap.indent(row, "    "))
    )
    (tree / fixture).write_text((tree / fixture).read_text(encoding="utf-8") + "\n" + board)
    shown = passes(tree, "tests/contract/test_sensor_contract.py", "-k", "usb-meter or metered")
    assert int(re.search(r"(\d+) passed", shown).group(1)) >= 40
