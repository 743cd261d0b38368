"""Runs the sensors on their periods and keeps the node's energy."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from edge_agent.sensors.base import (
    ESTIMATE,
    Coverage,
    NoData,
    PowerReading,
    Readings,
    Sensor,
    SensorStatus,
)
from edge_agent.sensors.energy import Charge, EnergyLedger, EnergyTotals, PowerSample, Work
from edge_agent.sensors.merge import SourcedPower, added, chosen_sources, is_whole, merged
from edge_agent.sensors.power_model import PowerModel

log = structlog.get_logger()

_MODEL_SECONDS: Final = 1.0
_UNASKED_SECONDS: Final = 5.0
"""How often the node's state is read while nobody asks for it, such as without a controller."""

_EARLY_SECONDS: Final = 0.05
"""A step may come a little early; what is due is not left to the next one."""

_FIRST_PROBE_SECONDS: Final = 1.0
_LAST_PROBE_SECONDS: Final = 60.0
_MAX_FAILURES: Final = 3
"""Readings in a row that may fail before another source is looked for."""

_SMOOTHED_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class PowerState:
    """The node's power now.

    Attributes:
        power_watts: mean of about the last second; None when there is neither sensor nor model.
        source: the sensor's name, or ESTIMATE; None with it.
        coverage, relative_error: of the source; None with it.
        sample_hertz: how often the source is read; None with it.
        age_seconds: since the last reading, or since the utilisation that an estimate goes by;
            None with it.
    """

    power_watts: float | None
    source: str | None
    coverage: Coverage | None
    relative_error: float | None
    sample_hertz: float | None
    age_seconds: float | None
    detail: str


def probe(sensors: Sequence[Sensor], now: float) -> tuple[list[Sensor], dict[str, NoData]]:
    """Choose the best of the power sensors that give a real reading; see `chosen_sources`.

    Sensors after one that stands for the whole board are not read.

    Returns:
        the chosen ones, none when none works; and why each other one says nothing.
    """
    said: dict[str, PowerReading] = {}
    refused: dict[str, NoData] = {}
    for sensor in sensors:
        answer = guarded_read(sensor, now)
        if isinstance(answer, NoData):
            refused[sensor.name] = answer
        elif answer.power is None:
            refused[sensor.name] = NoData("it measures no power")
        else:
            said[sensor.name] = answer.power
            if is_whole(answer.power):
                break
    names = chosen_sources(said)
    return [sensor for sensor in sensors if sensor.name in names], refused


def guarded_read(sensor: Sensor, now: float) -> Readings | NoData:
    """What the sensor says; an exception becomes `NoData` and stops nothing."""
    try:
        return sensor.read(now)
    except Exception as error:
        log.warning("sensor.failed", sensor=sensor.name, error=f"{type(error).__name__}: {error}")
        return NoData(f"{type(error).__name__}: {error}")


class SensorSampler:
    """The node's sensors, read in a thread of its own.

    Everything is by the monotonic clock. Where no sensor works, the power model fills
    in: fully busy while an engine has a request, else by the processor's utilisation.

    Args:
        power: sensors of power, best first; see `probe`.
        model: the fall-back; None leaves the node's energy unknown without a sensor.
        state: sensors that are read whatever the power comes from; what an earlier one says
            counts before what a later one says.
    """

    def __init__(
        self,
        power: Sequence[Sensor],
        model: PowerModel | None,
        state: Sequence[Sensor] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._power_sensors = power
        self._model = model
        self._state_sensors = state
        self._clock = clock
        self._lock = threading.Lock()
        self._ledger = EnergyLedger()
        self._chosen: list[Sensor] = []
        self._refused: dict[str, NoData] = {}
        self._failures = 0
        self._probe_seconds = _FIRST_PROBE_SECONDS
        self._probe_at = 0.0
        self._better_at = float("inf")
        self._read_at: dict[str, float] = {}
        self._asked_at = clock()
        # All three are replaced and never changed, so that other threads may look at them.
        self._said: Mapping[str, Readings] = {}
        self._state = Readings(clock())
        self._statuses: Mapping[str, SensorStatus] = {}
        self._engines: dict[str, int] = {}
        self._latest: SourcedPower | None = None
        self._smoothed_watts: float | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # -- the thread's side ---------------------------------------------------------------------

    def start(self) -> None:
        """Read from now on, until `close`; the node's state is read once before this returns.

        That may take a while on a board whose firmware is asked, so it is not for the event loop.
        """
        self._read_state(self._clock())
        self._thread = threading.Thread(target=self._run, name="sensors", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop reading; waits for a reading that is under way, at most three seconds."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(3.0)
        for sensor in (*self._power_sensors, *self._state_sensors):
            try:
                sensor.close()
            except Exception as error:
                log.warning("sensor.not_closed", sensor=sensor.name, error=str(error))

    def _run(self) -> None:
        due = self._clock()
        while not self._stop.is_set():
            try:
                period = self.step()
            except Exception:
                log.exception("sensor.step_failed")  # telemetry must not end by one bad step
                period = 1.0
            now = self._clock()
            # Kept to its period, so that reading does not stretch it; what was missed is skipped.
            due = max(due + period, now)
            self._stop.wait(due - now)

    def step(self) -> float:
        """One round: probe when due, read, account. Returns the seconds until the next."""
        now = self._clock()
        self._read_state(now)
        if now >= (self._better_at if self._chosen else self._probe_at):
            self._probe(now)
            if self._chosen:
                return self._period  # this reading may have been a counter's baseline
        if not self._chosen:
            self._account_model(now)
            return _MODEL_SECONDS
        answers = [self._read(sensor) for sensor in self._chosen]
        named = zip(self._chosen, answers, strict=True)
        said = [(sensor.name, found) for sensor, found in named if isinstance(found, Readings)]
        power = added(said) if len(said) == len(answers) else None
        if power is not None:
            self._failures = 0
            self._probe_seconds = _FIRST_PROBE_SECONDS
            self._account(power)
        else:
            self._failed(answers, now)
        return self._period

    def _read_state(self, now: float) -> None:
        is_new, is_asked = False, now - self._asked_at < _UNASKED_SECONDS
        for sensor in self._state_sensors:
            period = sensor.period_seconds if is_asked else _UNASKED_SECONDS
            if now - self._read_at.get(sensor.name, float("-inf")) >= period - _EARLY_SECONDS:
                self._read_at[sensor.name] = now
                self._read(sensor)
                is_new = True
        if is_new:
            self._state = self._merged(self._state_sensors) or Readings(now)

    def _merged(self, sensors: Sequence[Sensor]) -> Readings | None:
        said = self._said
        return merged(said[sensor.name] for sensor in sensors if sensor.name in said)

    def _read(self, sensor: Sensor) -> Readings | NoData:
        """Read a sensor that is used, and keep what it says and how long it took."""
        started = self._clock()
        answer = guarded_read(sensor, started)
        seconds = self._clock() - started
        if isinstance(answer, NoData):
            said = dict(self._said)
            said.pop(sensor.name, None)
            self._said = said
            status = SensorStatus(sensor.name, False, True, seconds, answer.reason, answer.fix)
        else:
            self._said = {**self._said, sensor.name: answer}
            status = SensorStatus(sensor.name, True, True, seconds)
        self._statuses = {**self._statuses, sensor.name: status}
        return answer

    @property
    def _period(self) -> float:
        return max((sensor.period_seconds for sensor in self._chosen), default=_MODEL_SECONDS)

    def _probe(self, now: float) -> None:
        before = self._chosen
        self._chosen, self._refused = probe(self._power_sensors, now)
        self._failures = 0
        # What an operator may mend meanwhile, such as a second source, is tried once in a while.
        is_mendable = any(answer.fix for answer in self._refused.values())
        self._better_at = now + _LAST_PROBE_SECONDS if is_mendable else float("inf")
        self._probe_at = now + self._probe_seconds
        self._probe_seconds = min(2.0 * self._probe_seconds, _LAST_PROBE_SECONDS)
        if self._chosen and self._chosen != before:
            log.info("sensor.chosen", sensors=[sensor.name for sensor in self._chosen])

    def _failed(self, answers: list[Readings | NoData], now: float) -> None:
        self._failures += 1
        if self._failures < _MAX_FAILURES:
            return  # the next reading bridges a short gap
        for sensor, answer in zip(self._chosen, answers, strict=True):
            if isinstance(answer, NoData):
                self._refused = {**self._refused, sensor.name: answer}
                log.warning("sensor.lost", sensor=sensor.name, reason=answer.reason)
        self._chosen = []
        self._probe_at = now + self._probe_seconds
        self._account_model(now)

    def _account(self, latest: SourcedPower) -> None:
        previous, power = self._latest, latest.power
        with self._lock:
            self._latest = latest
            self._smoothed_watts = _smoothed(previous, self._smoothed_watts, latest)
            self._ledger.add(
                PowerSample(
                    latest.measured_at, latest.source, power.power_watts, power.energy_joules
                )
            )

    def _account_model(self, now: float) -> None:
        with self._lock:
            self._latest, self._smoothed_watts = None, None
            watts = self._model_watts()
            if watts is not None:
                self._ledger.add(PowerSample(now, ESTIMATE, watts))

    def _model_watts(self) -> float | None:
        if self._model is None:
            return None
        return self._model.watts(1.0 if self._engines else self._utilisation)

    @property
    def _utilisation(self) -> float:
        return self._state.cpu_utilisation_ratio or 0.0

    # -- everyone else's side; none of these waits for a sensor ----------------------------------

    @property
    def readings(self) -> Readings:
        """What the node's sensors said last, merged; all unknown before the first word."""
        self._asked_at = self._clock()
        power = self._merged(self._chosen)
        return self._state if power is None else merged((self._state, power)) or power

    @property
    def sensors(self) -> list[SensorStatus]:
        """Each sensor that is used, and each that an operator could mend."""
        used = (*self._state_sensors, *self._chosen)
        statuses = self._statuses
        return [
            *(statuses[sensor.name] for sensor in used if sensor.name in statuses),
            *(
                SensorStatus(name, False, False, 0.0, answer.reason, answer.fix)
                for name, answer in self._refused.items()
                if answer.fix
            ),
        ]

    @property
    def refused(self) -> Mapping[str, NoData]:
        """Why sensors say nothing, by name."""
        return self._refused

    @property
    def unreadable(self) -> list[str]:
        """Sensors that an operator can mend: "rapl: ...; fix: ..."; none where one works."""
        if self._chosen:
            return []
        return [
            f"{name}: {answer.reason}; fix: {answer.fix}"
            for name, answer in self._refused.items()
            if answer.fix
        ]

    def engines_busy(self, requests: Mapping[str, int]) -> None:
        """From now on these engines have this many requests each; idle ones may be left out."""
        now = self._clock()
        with self._lock:
            self._engines = {name: count for name, count in requests.items() if count}
            self._ledger.set_active(self._engines, now)
            watts = self._model_watts()
            if self._latest is None and not self._chosen and watts is not None:
                self._ledger.add(PowerSample(now, ESTIMATE, watts))

    def charge(self, engine: str, work: Work) -> Charge | None:
        """The energy of a request that has just ended; None when it is not known.

        Args:
            engine: as in `engines_busy`.
        """
        now = self._clock()
        with self._lock:
            return self._ledger.charge(engine, now, work)

    def use_model(self, model: PowerModel | None) -> None:
        """From now on this model fills in where no sensor works."""
        with self._lock:
            self._model = model

    @property
    def has_sensor(self) -> bool:
        """Whether a sensor works now."""
        return self._latest is not None

    def power(self) -> PowerState:
        """The power now, measured where a sensor works."""
        now = self._clock()
        with self._lock:
            latest, watts = self._latest, self._smoothed_watts
            if latest is None or watts is None:  # a counter's first reading shows no power yet
                return self._estimate(now)
            period = max((sensor.period_seconds for sensor in self._chosen), default=None)
        return PowerState(
            power_watts=watts,
            source=latest.source,
            coverage=latest.power.coverage,
            relative_error=latest.power.relative_error,
            sample_hertz=None if not period else 1.0 / period,
            age_seconds=now - latest.measured_at,
            detail=latest.power.detail,
        )

    def _estimate(self, now: float) -> PowerState:
        model = self._model
        if model is None:
            return PowerState(None, None, None, None, None, None, "")
        return PowerState(
            model.watts(self._utilisation),
            ESTIMATE,
            model.coverage,
            model.relative_error,
            1.0 / _MODEL_SECONDS,
            now - self._state.measured_at,
            f"{model.idle_watts:g} W idle to {model.max_watts:g} W busy, by utilisation",
        )

    def totals(self) -> EnergyTotals:
        """The node's energy since the start."""
        now = self._clock()
        with self._lock:
            return self._ledger.totals(now)


def _smoothed(
    previous: SourcedPower | None, smoothed: float | None, now: SourcedPower
) -> float | None:
    """A moving mean over about a second, for people and for the routing."""
    watts = now.power.power_watts
    if watts is None:
        return smoothed
    if smoothed is None or previous is None or previous.source != now.source:
        return watts
    seconds = now.measured_at - previous.measured_at
    weight = min(1.0, seconds / _SMOOTHED_SECONDS)
    return smoothed + weight * (watts - smoothed)
