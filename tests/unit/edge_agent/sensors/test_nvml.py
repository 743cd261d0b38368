"""NVML, by a stand-in for its binding."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from edge_agent.sensors.base import Coverage, NoData, Readings
from edge_agent.sensors.nvml import NvmlSensor
from tests.fakes.sensors import power_of


class NotSupported(Exception):
    """What NVML raises for a question it cannot answer."""


class Nvml:
    """Two cards."""

    def __init__(self, has_counters: bool = True, has_power: bool = True) -> None:
        self.millijoules = 5_000_000
        self.is_open = False
        self._has_counters, self._has_power = has_counters, has_power

    def nvmlInit(self) -> None:  # noqa: N802
        self.is_open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetPowerUsage(self, card: int) -> int:  # noqa: N802
        if not self._has_power:
            raise NotSupported("Not Supported")
        return 100_000

    def nvmlDeviceGetUtilizationRates(self, card: int) -> SimpleNamespace:  # noqa: N802
        if not self._has_power:
            raise NotSupported("Not Supported")
        return SimpleNamespace(gpu=50 + 20 * card)

    def nvmlDeviceGetTotalEnergyConsumption(self, card: int) -> int:  # noqa: N802
        if not self._has_counters:
            raise NotSupported("Not Supported")
        return self.millijoules


def test_cards_are_added_and_their_counters_start_at_the_first_reading() -> None:
    nvml = Nvml()
    sensor = NvmlSensor(lambda: nvml)
    first = power_of(sensor.read(0.0))
    nvml.millijoules += 100_000
    second = power_of(sensor.read(1.0))
    assert first.energy_joules == 0.0
    assert second.energy_joules == pytest.approx(200.0)
    assert (second.power_watts, second.coverage) == (200.0, Coverage.GPU)


def test_load_is_the_mean_over_the_cards() -> None:
    readings = NvmlSensor(Nvml).read(0.0)
    assert isinstance(readings, Readings)
    assert readings.gpu_utilisation_ratio == pytest.approx(0.6)


def test_cards_without_a_counter_still_give_power() -> None:
    sensor = NvmlSensor(lambda: Nvml(has_counters=False))
    for now in (0.0, 1.0):
        reading = power_of(sensor.read(now))
        assert reading.energy_joules is None
        assert reading.power_watts == 200.0


def test_nvml_that_starts_and_supports_nothing_is_no_data() -> None:
    """A Jetson."""
    nvml = Nvml(has_power=False)
    answer = NvmlSensor(lambda: nvml).read(0.0)
    assert isinstance(answer, NoData)
    assert "Not Supported" in answer.reason
    assert not nvml.is_open


def missing() -> Nvml:
    raise ImportError


def broken() -> Nvml:
    raise OSError("libnvidia-ml.so.1: cannot open shared object file")


@pytest.mark.parametrize(
    ("load", "has_driver", "has_fix"),
    [(missing, True, False), (broken, False, False), (broken, True, True)],
)
def test_binding_that_cannot_be_used_is_no_data(
    load: Callable[[], Nvml], has_driver: bool, has_fix: bool, tmp_path: Path
) -> None:
    """And it is something to mend only where there is a driver."""
    if has_driver:
        (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    answer = NvmlSensor(load, tmp_path).read(0.0)
    assert isinstance(answer, NoData)
    assert bool(answer.fix) is has_fix
