from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from edge_agent.sensors.host import HostSensor


def test_this_host_is_read() -> None:
    sample = HostSensor().read(0.0)
    assert sample.cpu_utilisation_ratio is not None
    assert 0.0 <= sample.cpu_utilisation_ratio <= 1.0
    assert sample.memory_available_bytes
    assert sample.memory_available_bytes > 0
    assert sample.uptime_seconds
    assert sample.uptime_seconds > 0.0
    assert sample.is_throttled is None


@pytest.mark.parametrize(
    ("zones", "expected"),
    [
        ({}, None),
        ({"nvme": [SimpleNamespace(current=40.0)]}, None),
        ({"cpu_thermal": [SimpleNamespace(current=51.5)]}, 51.5),
        ({"coretemp": [SimpleNamespace(current=None), SimpleNamespace(current=44.0)]}, 44.0),
        ({"cpu_thermal": [SimpleNamespace(current=-256.0)]}, None),
    ],
)
def test_temperature_is_the_processors_or_unknown(
    monkeypatch: pytest.MonkeyPatch, zones: dict[str, Any], expected: float | None
) -> None:
    """A zone that is off reads -256, which is not a temperature."""
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: zones)
    assert HostSensor().read(0.0).temperature_celsius == expected


def test_temperature_is_looked_for_every_five_seconds_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It costs as much as everything else together."""
    zones: list[dict[str, Any]] = [{"cpu_thermal": [SimpleNamespace(current=t)]} for t in (50, 60)]
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: zones.pop(0))
    sensor = HostSensor()
    assert [sensor.read(now).temperature_celsius for now in (0.0, 4.9, 5.0, 9.9)] == [
        50,
        50,
        60,
        60,
    ]


def test_utilisation_counts_since_the_reading_before_whoever_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """psutil's own figure would be 0 for each thread's first look."""

    class Times(tuple[float, ...]):
        idle, iowait = 0.0, 0.0

    def times(user: float, idle: float) -> Times:
        made = Times((user, idle))
        made.idle = idle
        return made

    looks = [times(10.0, 90.0), times(13.0, 97.0), times(13.0, 97.0)]
    monkeypatch.setattr(psutil, "cpu_times", lambda: looks.pop(0))
    sensor = HostSensor()
    with ThreadPoolExecutor(1) as other:
        first = other.submit(sensor.read, 0.0).result()
    assert first.cpu_utilisation_ratio == pytest.approx(0.3)
    assert sensor.read(0.001).cpu_utilisation_ratio == pytest.approx(0.3)  # no time has passed


@pytest.mark.parametrize("failure", [OSError("gone"), ValueError("odd"), RuntimeError("odd")])
def test_sensor_that_fails_is_unknown_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def fail() -> None:
        raise failure

    monkeypatch.setattr(psutil, "sensors_temperatures", fail)
    assert HostSensor().read(0.0).temperature_celsius is None
