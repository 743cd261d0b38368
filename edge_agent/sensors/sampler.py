"""Runs the power sensors on their periods and keeps the node's energy."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from edge_agent.sensors.base import ESTIMATE, Coverage, NoData, Reading, Sensor
from edge_agent.sensors.board import BoardSensor, BoardState
from edge_agent.sensors.energy import Charge, EnergyLedger, EnergyTotals, PowerSample, Work
from edge_agent.sensors.power_model import PowerModel

log = structlog.get_logger()

_BOARD_SECONDS: Final = 1.0
_MODEL_SECONDS: Final = 1.0
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
    """Choose the best of the sensors that give a real reading (cases D9, D16).

    A figure of the whole board, in the order given, wins; else what stands for a part of the
    machine is added up, such as a processor's package and the cards beside it.

    Returns:
        the chosen ones, none when none works; and why each other one says nothing.
    """
    parts: list[Sensor] = []
    refused: dict[str, NoData] = {}
    for sensor in sensors:
        answer = guarded_read(sensor, now)
        if isinstance(answer, NoData):
            refused[sensor.name] = answer
        elif answer.coverage in (Coverage.BOARD, Coverage.PARTIAL):
            return [sensor], refused
        else:
            parts.append(sensor)
    return parts, refused


def guarded_read(sensor: Sensor, now: float) -> Reading | NoData:
    """What the sensor says; an exception becomes `NoData` and stops nothing (case D7)."""
    try:
        return sensor.read(now)
    except Exception as error:
        log.warning("sensor.failed", sensor=sensor.name, error=f"{type(error).__name__}: {error}")
        return NoData(f"{type(error).__name__}: {error}")


class PowerSampler:
    """The node's power and energy, read in a thread of its own.

    Everything is by the monotonic clock (case D5). Where no sensor works, the power model fills
    in: fully busy while an engine has a request, else by the processor's utilisation.

    Args:
        sensors: best first; see `probe`.
        model: the fall-back; None leaves the node's energy unknown without a sensor.
        board: temperature and throttling; None for a node that is not its board.
    """

    def __init__(
        self,
        sensors: Sequence[Sensor],
        model: PowerModel | None,
        board: BoardSensor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sensors = sensors
        self._model = model
        self._board = board
        self._clock = clock
        self._lock = threading.Lock()
        self._ledger = EnergyLedger()
        self._chosen: list[Sensor] = []
        self._refused: dict[str, NoData] = {}
        self._failures = 0
        self._probe_seconds = _FIRST_PROBE_SECONDS
        self._probe_at = 0.0
        self._better_at = float("inf")
        self._board_at = 0.0
        self._board_state = BoardState()
        self._utilisation = 0.0
        self._utilisation_at = clock()
        self._engines: dict[str, int] = {}
        self._latest: Reading | None = None
        self._smoothed_watts: float | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # -- the thread's side ---------------------------------------------------------------------

    def start(self) -> None:
        """Read from now on, until `close`."""
        self._thread = threading.Thread(target=self._run, name="sensors", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop reading; waits for a reading that is under way, at most three seconds."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(3.0)
        for sensor in self._sensors:
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
        if self._board is not None and now >= self._board_at:
            self._board_at = now + _BOARD_SECONDS
            try:
                self._board_state = self._board.read(now)
            except Exception as error:
                log.warning("sensor.failed", sensor="board", error=str(error))
                self._board_state = BoardState()
        if now >= (self._better_at if self._chosen else self._probe_at):
            self._probe(now)
            if self._chosen:
                return self._period  # this reading may have been a counter's baseline
        if not self._chosen:
            self._account_model(now)
            return _MODEL_SECONDS
        answers = [guarded_read(sensor, self._clock()) for sensor in self._chosen]
        readings = [answer for answer in answers if isinstance(answer, Reading)]
        if len(readings) == len(answers):
            self._failures = 0
            self._probe_seconds = _FIRST_PROBE_SECONDS
            self._account(readings)
        else:
            self._failed(answers, now)
        return self._period

    @property
    def _period(self) -> float:
        return max((sensor.period_seconds for sensor in self._chosen), default=_MODEL_SECONDS)

    def _probe(self, now: float) -> None:
        before = self._chosen
        self._chosen, self._refused = probe(self._sensors, now)
        self._failures = 0
        # What an operator may mend meanwhile, such as a second source, is tried once in a while.
        is_mendable = any(answer.fix for answer in self._refused.values())
        self._better_at = now + _LAST_PROBE_SECONDS if is_mendable else float("inf")
        self._probe_at = now + self._probe_seconds
        self._probe_seconds = min(2.0 * self._probe_seconds, _LAST_PROBE_SECONDS)
        if self._chosen and self._chosen != before:
            log.info("sensor.chosen", sensors=[sensor.name for sensor in self._chosen])

    def _failed(self, answers: list[Reading | NoData], now: float) -> None:
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

    def _account(self, readings: list[Reading]) -> None:
        reading = readings[0] if len(readings) == 1 else _added(readings)
        previous = self._latest
        with self._lock:
            self._latest = reading
            self._smoothed_watts = _smoothed(previous, self._smoothed_watts, reading)
            self._ledger.add(
                PowerSample(
                    reading.measured_at,
                    reading.source,
                    reading.power_watts,
                    reading.energy_joules,
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

    # -- everyone else's side; none of these waits for a sensor ----------------------------------

    @property
    def board(self) -> BoardState:
        """What the board said last."""
        return self._board_state

    @property
    def gpu_utilisation_ratio(self) -> float | None:
        """How busy the graphics processor is, 0 to 1; None without one, or when it cannot tell."""
        if self._board_state.gpu_utilisation_ratio is not None:
            return self._board_state.gpu_utilisation_ratio
        for sensor in self._chosen:
            ratio: float | None = getattr(sensor, "gpu_utilisation_ratio", None)
            if ratio is not None:
                return ratio
        return None

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

    def saw_utilisation(self, ratio: float) -> None:
        """How busy the processor is, for the power model."""
        self._utilisation, self._utilisation_at = min(max(ratio, 0.0), 1.0), self._clock()

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
            reading, watts = self._latest, self._smoothed_watts
            if reading is None:
                return self._estimate(now)
            period = max((sensor.period_seconds for sensor in self._chosen), default=None)
        return PowerState(
            power_watts=watts,
            source=reading.source,
            coverage=reading.coverage,
            relative_error=reading.relative_error,
            sample_hertz=None if not period else 1.0 / period,
            age_seconds=now - reading.measured_at,
            detail=reading.detail,
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
            now - self._utilisation_at,
            f"{model.idle_watts:g} W idle to {model.max_watts:g} W busy, by utilisation",
        )

    def totals(self) -> EnergyTotals:
        """The node's energy since the start."""
        now = self._clock()
        with self._lock:
            return self._ledger.totals(now)


def _added(readings: list[Reading]) -> Reading:
    """One figure for parts of a machine that do not overlap; cards give it their name."""
    watts = [reading.power_watts for reading in readings]
    joules = [reading.energy_joules for reading in readings]
    named = next((found for found in readings if found.coverage is Coverage.GPU), readings[0])
    known_watts = [value for value in watts if value is not None]
    known_joules = [value for value in joules if value is not None]
    return Reading(
        source=named.source,
        coverage=Coverage.PARTIAL,
        relative_error=max(reading.relative_error for reading in readings),
        measured_at=max(reading.measured_at for reading in readings),
        power_watts=sum(known_watts) if len(known_watts) == len(watts) else None,
        energy_joules=sum(known_joules) if len(known_joules) == len(joules) else None,
        detail=" + ".join(f"{reading.source} {reading.detail}" for reading in readings),
    )


def _smoothed(previous: Reading | None, smoothed: float | None, now: Reading) -> float | None:
    """A moving mean over about a second, for people and for the routing."""
    if now.power_watts is None:
        return smoothed
    if smoothed is None or previous is None or previous.source != now.source:
        return now.power_watts
    seconds = now.measured_at - previous.measured_at
    weight = min(1.0, seconds / _SMOOTHED_SECONDS)
    return smoothed + weight * (now.power_watts - smoothed)


def board_sensors(
    root: Path = Path("/"), pmic_scale: float | None = None, pmic_offset_watts: float | None = None
) -> list[Sensor]:
    """Every source this software knows, best first; `probe` finds out which ones are real."""
    from edge_agent.sensors.jetson import JetsonSensor, JtopSensor
    from edge_agent.sensors.nvml import NvmlSensor
    from edge_agent.sensors.rapl import RaplSensor
    from edge_agent.sensors.raspberry_pi import PMIC_OFFSET_WATTS, PMIC_SCALE, PmicSensor

    return [
        JetsonSensor(root),
        PmicSensor(
            root,
            PMIC_SCALE if pmic_scale is None else pmic_scale,
            PMIC_OFFSET_WATTS if pmic_offset_watts is None else pmic_offset_watts,
        ),
        RaplSensor(root),
        NvmlSensor(root=root),
        JtopSensor(),
    ]
