from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from edge_agent.sensors.host import HostSensor


def test_this_host_is_read() -> None:
    sample = HostSensor().read()
    assert 0.0 <= sample.cpu_utilisation_ratio <= 1.0
    assert sample.memory_available_bytes > 0
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
    assert HostSensor().read().temperature_celsius == expected


@pytest.mark.parametrize("failure", [OSError("gone"), ValueError("odd"), RuntimeError("odd")])
def test_sensor_that_fails_is_unknown_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    """Case D7."""

    def fail() -> None:
        raise failure

    monkeypatch.setattr(psutil, "sensors_temperatures", fail)
    assert HostSensor().read().temperature_celsius is None
