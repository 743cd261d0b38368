"""Joules since midnight."""

import datetime
from pathlib import Path

import pytest

from edge_agent.sensors.energy_today import EnergyToday

MONDAY = datetime.date(2026, 11, 30)
TUESDAY = datetime.date(2026, 12, 1)


class Calendar:
    day = MONDAY

    def __call__(self) -> datetime.date:
        return self.day


def test_today_goes_on_over_a_restart(tmp_path: Path) -> None:
    path, calendar = tmp_path / "energy.json", Calendar()
    first = EnergyToday(path, calendar)
    assert first.add(100.0, 0.0) == 100.0
    assert first.add(150.0, 1.0) == 150.0
    first.keep()
    second = EnergyToday(path, calendar)  # whose total begins anew
    assert second.joules == 150.0
    assert second.add(30.0, 0.0) == 180.0


def test_midnight_begins_anew_and_the_total_does_not(tmp_path: Path) -> None:
    path, calendar = tmp_path / "energy.json", Calendar()
    energy = EnergyToday(path, calendar)
    energy.add(100.0, 0.0)
    calendar.day = TUESDAY
    assert energy.add(107.0, 1.0) == 7.0
    energy.keep()
    calendar.day = TUESDAY + datetime.timedelta(days=1)
    assert EnergyToday(path, calendar).add(5.0, 0.0) == 5.0


def test_clock_without_a_battery_starts_no_new_day(tmp_path: Path) -> None:
    """A board boots in 1970 and learns the time later."""
    path, calendar = tmp_path / "energy.json", Calendar()
    EnergyToday(path, calendar).add(100.0, 0.0)
    calendar.day = datetime.date(1970, 1, 1)
    energy = EnergyToday(path, calendar)
    assert energy.add(10.0, 0.0) == 110.0
    calendar.day = MONDAY
    assert energy.add(20.0, 1.0) == 120.0


@pytest.mark.parametrize(
    "damage", ["", "[]", '{"day": "x"}', '{"day": "2026-11-30", "joules": -1}', "{"]
)
def test_damaged_file_begins_the_day_anew(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "energy.json"
    path.write_text(damage)
    assert EnergyToday(path, Calendar()).add(3.0, 0.0) == 3.0


def test_disk_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    energy = EnergyToday(tmp_path / "no folder" / "energy.json", Calendar())
    assert energy.add(3.0, 0.0) == 3.0


def test_card_is_written_once_a_minute(tmp_path: Path) -> None:
    path = tmp_path / "energy.json"
    energy = EnergyToday(path, Calendar())
    energy.add(1.0, 0.0)
    first = path.read_text()
    for second in range(1, 60):
        energy.add(1.0 + second, float(second))
    assert path.read_text() == first
    energy.add(100.0, 60.0)
    assert path.read_text() != first
