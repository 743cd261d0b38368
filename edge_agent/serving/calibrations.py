"""Speeds and joules that were measured on this node, kept over restarts."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import structlog

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Speeds:
    """Measured on this node, tokens per second; see bench.calibrate.

    Attributes:
        prefill_tokens_per_second: read of a prompt.
        decode_tokens_per_second: of one sequence alone.
        saturated_decode_tokens_per_second: of `measured_slots` sequences together.
        measured_slots: sequences that were decoded at once; 0 is not known.
        engine_version: what it holds for beside hardware and file; empty is not known.
        power_mode: the board's mode while it was measured; empty where it has none.
        load_watts: of the whole node while all slots decoded; None without a sensor.
        prefill_joules_per_token: above idle; None without a sensor.
        decode_joules_per_token: above idle, with all slots busy; None without a sensor.
        utilisation_ratio: busy share of the node's processors while it was measured; None when
            nobody looked.
    """

    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    saturated_decode_tokens_per_second: float
    measured_slots: int = 0
    engine_version: str = ""
    power_mode: str = ""
    load_watts: float | None = None
    prefill_joules_per_token: float | None = None
    decode_joules_per_token: float | None = None
    utilisation_ratio: float | None = None


_EARLIER_NAMES: Final = {
    "prefill_rate": "prefill_tokens_per_second",
    "decode_rate": "decode_tokens_per_second",
    "saturated_decode_rate": "saturated_decode_tokens_per_second",
}
"""Of what an earlier version kept."""


class KeptCalibrations:
    """The file of measurements, by all that they depend on.

    A damaged file is measured anew, since nothing else is lost with it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def find(self, key: str) -> Speeds | None:
        """What was measured under these conditions; None when nothing was."""
        return self._read().get(key)

    def keep(self, key: str, speeds: Speeds) -> None:
        """Keep a measurement; a disk that cannot be written only costs the next one."""
        kept = {**self._read(), key: speeds}
        partial = self._path.with_suffix(".partial")
        try:
            partial.write_text(
                json.dumps({name: asdict(found) for name, found in kept.items()}, indent=1)
            )
            partial.replace(self._path)
        except OSError as error:
            log.warning("calibration.not_kept", path=str(self._path), error=error.strerror)

    def _read(self) -> Mapping[str, Speeds]:
        try:
            found = json.loads(self._path.read_text())
            return {
                key: Speeds(
                    **{_EARLIER_NAMES.get(name, name): kept for name, kept in value.items()}
                )
                for key, value in found.items()
            }
        except (OSError, ValueError, TypeError, AttributeError):
            return {}
