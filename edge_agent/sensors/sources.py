"""Every source of readings that the agent knows; a new one gets a file and a line here."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from edge_agent.sensors.base import Sensor
from edge_agent.sensors.board import BoardSensor
from edge_agent.sensors.host import HostSensor
from edge_agent.sensors.jetson import JetsonSensor, JtopSensor
from edge_agent.sensors.nvml import NvmlSensor
from edge_agent.sensors.rapl import RaplSensor
from edge_agent.sensors.raspberry_pi import (
    PMIC_OFFSET_WATTS,
    PMIC_SCALE,
    PmicSensor,
    RunCommand,
    vcgencmd,
)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What sensors reach for; tests give a captured tree and answers of their own.

    Attributes:
        root: of the file system that is read.
        run: asks a Raspberry Pi's firmware.
        load: imports an optional module by name; raises ImportError where it is not installed.
        pmic_scale, pmic_offset_watts: of the settings.
    """

    root: Path = Path("/")
    run: RunCommand = vcgencmd
    load: Callable[[str], Any] = importlib.import_module
    pmic_scale: float = PMIC_SCALE
    pmic_offset_watts: float = PMIC_OFFSET_WATTS


@dataclass(frozen=True, slots=True)
class KnownSensor:
    """A sensor of power, and its row in `docs/sensors.md`.

    Attributes:
        make: builds the sensor without touching the hardware.
        boards: where it works.
        read_by: what is read.
        accuracy: coverage and error that are known beforehand.
        needs: permissions and software, with the fix.
    """

    make: Callable[[Surroundings], Sensor]
    boards: str
    read_by: str
    accuracy: str
    needs: str


POWER_SENSORS: Final = (
    # Best first: what stands for the whole board before what stands for parts of the machine.
    KnownSensor(
        lambda place: JetsonSensor(place.root),
        "Jetson",
        "hwmon; on JetPack 4 iio",
        "board, 5 %, with an input rail (VDD_IN, POM_5V_IN, VIN); "
        "partial, 15 %, by a rail table on AGX Orin and AGX Xavier",
        "Nothing. In a container: mount the host's `/sys` read-only.",
    ),
    KnownSensor(
        lambda place: PmicSensor(place.root, place.pmic_scale, place.pmic_offset_watts, place.run),
        "Raspberry Pi 5 family",
        "`vcgencmd pmic_read_adc`",
        "partial, 15 %",
        "`/dev/vcio`: `usermod -aG video AGENT_USER`. In a container: pass the device.",
    ),
    KnownSensor(
        lambda place: RaplSensor(place.root),
        "x86 with a powercap tree",
        "`energy_uj` of the packages",
        "package, 10 %",
        "Read access, root only since Linux 5.10: a group of its own by tmpfiles.d, as "
        "`edge-agent doctor` prints it. Never for all users (CVE-2020-8694).",
    ),
    KnownSensor(
        lambda place: NvmlSensor(lambda: place.load("pynvml"), place.root),
        "NVIDIA cards",
        "energy counter; without one, power",
        "gpu, 5 %",
        "`nvidia-ml-py` in the agent's environment, and the driver.",
    ),
    KnownSensor(
        lambda place: JtopSensor(lambda: place.load("jtop").jtop(1.0)),
        "Jetson whose rails cannot be read",
        "the service of `jetson-stats`",
        "as `ina3221`",
        "`jetson-stats` of the same version on both sides, and `/run/jtop.sock`: "
        "`usermod -aG jtop AGENT_USER`. In a container: mount the socket and add the group.",
    ),
)


def surroundings(pmic_scale: float | None, pmic_offset_watts: float | None) -> Surroundings:
    """Real ones, with what the settings say of a Pi's power controller; None: the usual."""
    return Surroundings(
        pmic_scale=PMIC_SCALE if pmic_scale is None else pmic_scale,
        pmic_offset_watts=PMIC_OFFSET_WATTS if pmic_offset_watts is None else pmic_offset_watts,
    )


def power_sensors(place: Surroundings) -> list[Sensor]:
    """Every sensor of power, best first; the sampler finds out which ones are real."""
    return [source.make(place) for source in POWER_SENSORS]


def state_sensors(place: Surroundings) -> list[Sensor]:
    """What is read on every node; the board's own word comes before the operating system's."""
    return [BoardSensor(place.root, place.run), HostSensor()]
