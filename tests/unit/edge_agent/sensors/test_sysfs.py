from pathlib import Path

import pytest

from edge_agent.sensors.sysfs import in_order
from tests.fakes.vanishing import remove_when_listed


def test_matches_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("zone10", "zone9", "other"):
        (tmp_path / name).mkdir()
    assert [path.name for path in in_order(tmp_path, "zone*")] == ["zone9", "zone10"]
    assert in_order(tmp_path / "never", "zone*") == []


def test_a_device_that_is_unplugged_meanwhile_hides_none_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("1-0040", "1-0041"):
        (tmp_path / name / "iio:device0").mkdir(parents=True)
    remove_when_listed(monkeypatch, tmp_path / "1-0040")
    found = in_order(tmp_path, "*/iio:device*")
    assert found == [tmp_path / "1-0041" / "iio:device0"]
