"""Power of NVIDIA cards through NVML, where its Python binding is installed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from edge_agent.sensors.base import Coverage, NoData, PowerReading, Readings

NVML_FIX = "pip install nvidia-ml-py into the agent's environment, and check that nvidia-smi works"


class NvmlSensor:
    """All cards of this machine, added up; by their energy counters where every card has one.

    On a Jetson NVML starts and then answers "not supported" to every question, which
    is why only a real reading counts.

    Args:
        load: gives the `pynvml` module; raises ImportError where there is none.
        root: where the driver is looked for when NVML fails; without one there is nothing to mend.
    """

    name = "nvml"
    period_seconds = 0.1

    def __init__(self, load: Callable[[], Any], root: Path = Path("/")) -> None:
        self._load = load
        self._root = root
        self._nvml: Any = None
        self._cards: list[Any] = []
        self._baseline: float | None = None
        self._has_counters = True

    def read(self, now: float) -> Readings | NoData:
        """Read every card once."""
        try:
            if self._nvml is None:
                self._open()
            if not self._cards:
                return self._lost(NoData("NVML finds no NVIDIA card"))
            watts = sum(self._nvml.nvmlDeviceGetPowerUsage(card) for card in self._cards) / 1e3
        except ImportError:
            return NoData("no NVML: its Python binding is not installed")
        except Exception as error:  # NVMLError of a module that may not be there
            has_driver = (self._root / "proc/driver/nvidia").exists()
            reason = f"NVML: {error or type(error).__name__}"
            return self._lost(NoData(reason, NVML_FIX if has_driver else ""))
        power = PowerReading(
            Coverage.GPU,
            relative_error=0.05,
            power_watts=watts,
            energy_joules=self._counted_joules(),
            detail=f"{len(self._cards)} GPU",
        )
        return Readings(now, power, gpu_utilisation_ratio=self._busy_ratio())

    def close(self) -> None:
        """Let go of the driver."""
        if self._nvml is not None:
            self._lost(NoData("closed"))

    def _open(self) -> None:
        nvml = self._load()
        nvml.nvmlInit()
        self._nvml = nvml
        self._baseline, self._has_counters = None, True
        count = nvml.nvmlDeviceGetCount()
        self._cards = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]

    def _counted_joules(self) -> float | None:
        if not self._has_counters:
            return None
        try:
            total = sum(
                self._nvml.nvmlDeviceGetTotalEnergyConsumption(card) for card in self._cards
            )
        except Exception:  # cards before Volta have none; their power is integrated
            self._has_counters = False
            return None
        if self._baseline is None or total < self._baseline:
            self._baseline = total  # a driver that was reloaded counts from 0
        return float(total - self._baseline) / 1e3

    def _busy_ratio(self) -> float | None:
        """Mean over the cards, 0 to 1; None when they do not tell."""
        try:
            rates = [
                int(self._nvml.nvmlDeviceGetUtilizationRates(card).gpu) for card in self._cards
            ]
        except Exception:  # cards without it, and bindings that do not know it
            return None
        return min(1.0, sum(rates) / len(rates) / 100.0)

    def _lost(self, why: NoData) -> NoData:
        nvml, self._nvml, self._cards = self._nvml, None, []
        if nvml is not None:
            try:
                nvml.nvmlShutdown()
            except Exception:
                return why  # it has gone already
        return why
