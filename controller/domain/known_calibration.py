"""Measured speeds as they are remembered from one start to the next."""

from dataclasses import dataclass

from controller.domain.cluster import Calibration


@dataclass(frozen=True, slots=True)
class CalibrationKey:
    """What a measured speed holds for; `power_mode` is empty where the board has none."""

    hardware: str
    digest: str
    engine_version: str
    power_mode: str


@dataclass(frozen=True, slots=True)
class KnownCalibration:
    """A calibration as it is remembered; `completions` is what it rests on beside measurement."""

    key: CalibrationKey
    calibration: Calibration
    completions: int
