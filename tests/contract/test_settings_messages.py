"""Both programs read their settings by the same rules and complain in the same words."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import controller.config
import edge_agent.config
from edge_agent.errors import UsageError

GOLDEN = Path(__file__).parents[1] / "golden" / "settings_errors.json"
_LISTED = re.compile("there are: .*")
"""Settings are added; that they are all listed is another test's."""
CASES: list[dict[str, Any]] = json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_everything_wrong_is_told_at_once_in_these_words(
    tmp_path: Path, case: dict[str, Any]
) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("\n".join(case["toml"]), encoding="utf-8")
    if case["program"] == "controller":
        with pytest.raises(controller.config.SettingsError) as failure:
            controller.config.load_settings(path, case["environment"])
        told = str(failure.value)
    else:
        with pytest.raises(UsageError) as refusal:
            edge_agent.config.load_settings(path, case["environment"])
        told = str(refusal.value)
    assert _LISTED.sub("there are: ...", told).splitlines() == case["problems"]


def test_misspelt_section_is_told_the_nearest_one(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("[contoller]\naddress = 'host:1'\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"^\[contoller\]: no such section; .* 'controller'\?$"):
        edge_agent.config.load_settings(path, {})
