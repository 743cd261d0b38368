"""What is right and wrong with this host's sensors, with the exact fix."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edge_agent.sensors.base import NoData, Sensor
from edge_agent.sensors.board import read_temperature
from edge_agent.sensors.power_model import PowerModel
from edge_agent.sensors.raspberry_pi import (
    RunCommand,
    is_raspberry_pi,
    read_throttling,
    vcgencmd,
)
from edge_agent.sensors.sampler import guarded_read, probe

_SERVICE_SECONDS: Final = 3.0
_POLL_SECONDS: Final = 0.1
_COUNTER_SECONDS: Final = 0.3
"""Between two readings of a counter, so that it shows a power."""

_LIMIT_FIXES: Final = {
    "under_voltage": "use the board's own power supply and a short, thick cable",
    "frequency_capped": "cool the board, or feed it better",
    "throttled": "cool the board: heat sink, fan, free air",
    "soft_temperature_limit": "cool the board: heat sink, fan, free air",
}


@dataclass(frozen=True, slots=True)
class SensorFinding:
    """One finding: `level` is "ok" or "warning"; `fix` is what to do about the latter."""

    level: str
    text: str
    fix: str = ""


def examine_sensors(
    sensors: Sequence[Sensor],
    model: PowerModel,
    user: str,
    root: Path = Path("/"),
    run: RunCommand = vcgencmd,
    wait: Callable[[float], None] = time.sleep,
) -> list[SensorFinding]:
    """Try every sensor as the agent does; takes up to a few seconds.

    Args:
        sensors: best first; they are closed afterwards.
        model: what stands in when none works.
        user: who runs the agent, for the fixes.
    """
    try:
        return [*_power(sensors, model, user, wait), *_board(root, run)]
    finally:
        for sensor in sensors:
            sensor.close()


def _power(
    sensors: Sequence[Sensor], model: PowerModel, user: str, wait: Callable[[float], None]
) -> list[SensorFinding]:
    chosen, refused = probe(sensors, time.monotonic())
    tries = round(_SERVICE_SECONDS / _POLL_SECONDS)
    while not chosen and tries and any(answer.is_pending for answer in refused.values()):
        tries -= 1
        wait(_POLL_SECONDS)
        chosen, refused = probe(sensors, time.monotonic())
    found = []
    if chosen:
        wait(_COUNTER_SECONDS)
        found += [_working(sensor) for sensor in chosen]
    else:
        found.append(
            SensorFinding(
                "ok",
                f"no power sensor; power is estimated between {model.idle_watts:g} W idle and "
                f"{model.max_watts:g} W busy (set [power] idle_watts and max_watts from a meter)",
            )
        )
    for name, answer in refused.items():
        if answer.fix:  # hardware that is not there is nothing to mend
            fix = answer.fix.replace("AGENT_USER", user)
            found.append(SensorFinding("warning", f"{name}: {answer.reason}", fix))
    return found


def _working(sensor: Sensor) -> SensorFinding:
    started = time.monotonic()
    answer = guarded_read(sensor, started)
    seconds = time.monotonic() - started
    name = sensor.name
    if isinstance(answer, NoData):
        return SensorFinding(
            "warning", f"{name}: {answer.reason}", answer.fix or "run edge-agent doctor again"
        )
    power = answer.power
    if power is None:  # `probe` chooses none of these
        return SensorFinding("ok", f"{name}: it measures no power")
    watts = "a counter" if power.power_watts is None else f"{power.power_watts:.1f} W"
    return SensorFinding(
        "ok",
        f"{name}: {watts}, {power.coverage.value} ({power.detail}), "
        f"±{100 * power.relative_error:.0f} %; a reading takes {1000 * seconds:.1f} ms and comes "
        f"every {sensor.period_seconds:g} s",
    )


def _board(root: Path, run: RunCommand) -> list[SensorFinding]:
    found = []
    temperature = read_temperature(root)
    if temperature is not None:
        found.append(SensorFinding("ok", f"the processor has {temperature:.0f} °C"))
    throttling = read_throttling(root, run) if is_raspberry_pi(root) else None
    if throttling is None:
        return found
    for when, names in (("now", throttling.now), ("since boot", throttling.since_boot)):
        for name in names:
            if when == "now" or name not in throttling.now:
                text = f"the board is slowed down ({when}): {name}"
                found.append(SensorFinding("warning", text, _LIMIT_FIXES[name]))
    if not throttling.now and not throttling.since_boot:
        found.append(SensorFinding("ok", "the board has not been throttled since boot"))
    return found
