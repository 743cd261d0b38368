"""The desk with a meter: what an answer cost, by the node's own sensor."""

import asyncio
from pathlib import Path

import pytest

from edge_agent.config import ModelSettings
from edge_agent.engine.base import EngineSettings, Sampling
from edge_agent.engine.fake import FakeEngine, FakeSpeeds
from edge_agent.engine.remote.settings import RemoteSettings
from edge_agent.link.convert import completion_to_proto, health_to_proto
from edge_agent.sensors.base import ESTIMATE, Coverage, NoData, PowerReading, Readings
from edge_agent.sensors.power_model import PowerModel
from edge_agent.sensors.sampler import SensorSampler
from edge_agent.serving.completion import Completion
from edge_agent.serving.work import WorkDesk, WorkOrder
from pointsman.v1 import types_pb2
from tests.fakes.hosted import READY, hosted_model
from tests.fakes.waiting import until

pytestmark = pytest.mark.anyio

MODEL = PowerModel(2.0, 10.0)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Meter12Watts:
    """A board that draws 12 W whatever it does."""

    name = "ina3221"
    period_seconds = 0.1

    def read(self, now: float) -> Readings | NoData:
        return Readings(now, PowerReading(Coverage.BOARD, 0.05, 12.0, detail="VDD_IN"))

    def close(self) -> None:
        """Nothing is held open."""


class Bench:
    """A fake engine, its desk and its sampler on one clock that only work moves."""

    def __init__(self, remote: RemoteSettings | None = None, has_sensor: bool = True) -> None:
        self.now = 100.0
        self.completions: list[Completion] = []
        self.sampler = SensorSampler(
            [Meter12Watts()] if has_sensor else [], MODEL, clock=lambda: self.now
        )
        self.engine = FakeEngine(
            EngineSettings(Path("/nowhere.gguf"), context_tokens=500, slots=2),
            sleep=self.sleep,
            clock=lambda: self.now,
            speeds=FakeSpeeds(prefill_tokens_per_second=100.0, decode_tokens_per_second=10.0),
        )
        self.hosted = hosted_model(ModelSettings("small", remote=remote), READY, self.engine)
        self.desk = WorkDesk({"small": self.hosted}.get, self, MODEL, self.sampler)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.sampler.step()
        await asyncio.sleep(0)

    def progressed(self, request_id: str, attempt: int, text: str, tokens: int) -> None:
        """Text is of no interest here."""

    def completed(self, completion: Completion) -> None:
        self.completions.append(completion)

    async def answer(self, count: int = 1) -> list[Completion]:
        await self.engine.load()
        for _ in range(3):  # the probe, and two readings
            self.sampler.step()
            self.now += 0.1
        for number in range(count):
            self.desk.accept(
                WorkOrder(f"r{number}", 1, "small", "Hello", Sampling(max_tokens=9, seed=7), 60.0)
            )
        await until(lambda: len(self.completions) == count and not self.desk.running_requests)
        await self.engine.close()
        return self.completions


async def test_answer_costs_what_the_board_measured_while_it_was_made() -> None:
    bench = Bench()
    (completion,) = await bench.answer()
    seconds = completion.usage.prefill_seconds + completion.usage.decode_seconds
    assert completion.usage.energy_joules == pytest.approx(12.0 * seconds, rel=0.01)
    assert completion.usage.energy_source == "ina3221"
    usage = completion_to_proto(completion).usage
    assert usage.energy_source == types_pb2.POWER_SOURCE_INA3221
    totals = bench.sampler.totals()
    assert totals.requests_joules == pytest.approx(bench.desk.energy_joules)
    assert totals.requests_joules + totals.idle_joules == pytest.approx(totals.total_joules)


async def test_answers_that_overlap_are_charged_once_for_the_same_time() -> None:
    bench = Bench()
    await bench.answer(2)
    totals = bench.sampler.totals()
    assert bench.desk.energy_joules <= totals.total_joules
    busy = bench.engine.stats().busy_seconds_total
    assert bench.desk.energy_joules <= 12.0 * busy * 1.01


async def test_answer_of_a_board_without_a_sensor_is_an_estimate() -> None:
    (completion,) = await Bench(has_sensor=False).answer()
    assert completion.usage.energy_source == ESTIMATE
    usage = completion_to_proto(completion).usage
    assert usage.energy_source == types_pb2.POWER_SOURCE_ESTIMATE
    assert usage.energy_joules > 0


async def test_answer_of_a_remote_engine_is_not_this_boards_energy() -> None:
    bench = Bench(RemoteSettings("http://gpu:8080/v1"))
    (completion,) = await bench.answer()
    assert (completion.usage.energy_joules, completion.usage.energy_source) == (None, "none")
    assert bench.sampler.totals().requests_joules == 0


async def test_health_carries_the_measured_power_and_its_source() -> None:
    bench = Bench()
    await bench.answer()
    readings = Readings(1.0, temperature_celsius=50.0, is_throttled=True)
    message = health_to_proto(readings, bench.sampler.power())
    assert message.power_watts == pytest.approx(12.0)
    assert message.power_source == types_pb2.POWER_SOURCE_INA3221
    assert message.is_throttled
    estimate = health_to_proto(readings, SensorSampler([], MODEL).power())
    assert estimate.power_source == types_pb2.POWER_SOURCE_ESTIMATE


async def test_counter_without_a_second_reading_is_an_estimate_and_not_nothing() -> None:
    class Counter:
        name = "rapl"
        period_seconds = 0.1

        def read(self, now: float) -> Readings | NoData:
            return Readings(now, PowerReading(Coverage.PACKAGE, 0.1, None, 0.0))

        def close(self) -> None:
            """Nothing is held open."""

    now = 1.0
    sampler = SensorSampler([Counter()], MODEL, clock=lambda: now)
    for _ in range(2):
        now += sampler.step()
    assert (sampler.has_sensor, sampler.power().source) == (True, ESTIMATE)
    assert health_to_proto(sampler.readings, sampler.power()).power_watts == pytest.approx(2.0)
