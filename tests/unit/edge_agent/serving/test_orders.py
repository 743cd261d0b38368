"""Orders about models: each carried out once, and told of to its end."""

import asyncio
from pathlib import Path

import pytest

from edge_agent.config import ModelSettings, Settings
from edge_agent.engine.base import InferenceEngine
from edge_agent.engine.spec import PreparedModel, Report
from edge_agent.errors import UnknownModelError
from edge_agent.serving.calibrations import Speeds
from edge_agent.serving.models import ModelHost
from edge_agent.serving.orders import (
    GivenOrder,
    ManageModel,
    MeasureSpeed,
    ModelAction,
    Order,
    OrderDesk,
    OrderPhase,
    OrderUpdate,
)
from tests.fakes.engines import engines_with
from tests.fakes.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Bench:
    """A desk over a host with pretended models; listens to what it is told."""

    def __init__(self, folder: Path) -> None:
        self.updates: list[OrderUpdate] = []
        self.prepared: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.host = ModelHost(
            Settings(node_id="pi", data_dir=folder, models=(ModelSettings("a", threads=1),)),
            self.prepare,
            self.calibrate,
            lambda: None,
            engines_with(estimate=lambda settings: 1),
        )
        self.desk = OrderDesk(self.host)

    async def prepare(self, name: str, report: Report) -> PreparedModel:
        if name == "nonsense":
            raise UnknownModelError("nonsense is not in the catalogue; it has: a, b")
        self.prepared.append(name)
        report("downloading", 0.5, is_downloading=True)
        await self.gate.wait()
        return PreparedModel(Path(f"/{name}.gguf"), name, "llama", 0.1, "Q4_0", 2048, None)

    async def calibrate(self, engine: InferenceEngine, slots: int) -> Speeds:
        return Speeds(100.0, 10.0, 20.0)

    def order_updated(self, update: OrderUpdate) -> None:
        self.updates.append(update)

    async def ended(self, order: GivenOrder) -> OrderUpdate:
        self.desk.accept(order, self)
        await until(lambda: self.updates and self.updates[-1].is_last)
        return self.updates[-1]


async def test_load_order_tells_of_the_download_and_ends_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.gate.clear()
    bench.desk.accept(GivenOrder("o1", ManageModel(ModelAction.LOAD, "b", slots=3)), bench)
    await until(lambda: bench.updates and bench.updates[-1].progress_ratio == 0.5)
    assert bench.updates[0] == OrderUpdate("o1", OrderPhase.RUNNING, "taken up")
    assert bench.updates[-1].message == "downloading"
    bench.gate.set()
    await until(lambda: bench.updates[-1].is_last)
    assert bench.updates[-1] == OrderUpdate("o1", OrderPhase.DONE, "b is loaded", 1.0)
    assert [update.is_last for update in bench.updates].count(True) == 1
    assert bench.host.models["b"].settings.slots == 3
    await bench.host.close()


async def test_repeat_of_an_order_only_hears_where_it_stands(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.gate.clear()
    order = GivenOrder("o1", ManageModel(ModelAction.LOAD, "b"))
    bench.desk.accept(order, bench)
    await until(lambda: bench.prepared == ["b"])
    bench.desk.accept(order, bench)
    assert not bench.updates[-1].is_last
    bench.gate.set()
    await until(lambda: bench.updates[-1].is_last)
    count = len(bench.updates)
    bench.desk.accept(order, bench)
    assert bench.updates[count:] == [OrderUpdate("o1", OrderPhase.DONE, "b is loaded", 1.0)]
    assert bench.prepared == ["b"]
    await bench.host.close()


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (ManageModel(ModelAction.LOAD, "nonsense"), "nonsense is not in the catalogue"),
        (ManageModel(ModelAction.UNLOAD, "b"), "b is not on this node; it has: a"),
        (ManageModel(ModelAction.PIN, "b"), "b is not on this node"),
        (MeasureSpeed("a"), "a is not loaded now"),
        (MeasureSpeed(), "no model is loaded"),
    ],
)
async def test_order_that_cannot_be_carried_out_says_why(
    tmp_path: Path, order: Order, words: str
) -> None:
    bench = Bench(tmp_path)
    end = await bench.ended(GivenOrder("o1", order))
    assert end.phase is OrderPhase.FAILED
    assert words in end.message
    assert bench.desk.running_orders <= 1


async def test_orders_pin_measure_and_unload(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for number, (order, words) in enumerate(
        [
            (ManageModel(ModelAction.LOAD, "a"), "a is loaded"),
            (ManageModel(ModelAction.PIN, "a"), "a is pinned"),
            (ManageModel(ModelAction.UNPIN, "a"), "a is not pinned"),
            (MeasureSpeed(), "measured: a"),
            (MeasureSpeed("a"), "a is measured"),
            (ManageModel(ModelAction.UNLOAD, "a"), "a is unloaded"),
        ]
    ):
        bench.updates.clear()
        end = await bench.ended(GivenOrder(f"o{number}", order))
        assert (end.phase, end.message) == (OrderPhase.DONE, words)
    assert bench.host.models["a"].engine is None


async def test_unload_order_ends_a_load_that_is_under_way(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.gate.clear()
    bench.desk.accept(GivenOrder("o1", ManageModel(ModelAction.LOAD, "a")), bench)
    await until(lambda: bench.prepared == ["a"])
    bench.desk.accept(GivenOrder("o2", ManageModel(ModelAction.UNLOAD, "a")), bench)
    await until(lambda: sum(update.is_last for update in bench.updates) == 2)
    ends = {update.order_id: update for update in bench.updates if update.is_last}
    assert ends["o2"].phase is OrderPhase.DONE
    assert (ends["o1"].phase, ends["o1"].message) == (
        OrderPhase.FAILED,
        "another order replaced this one",
    )


async def test_agent_that_stops_gives_its_orders_up(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.gate.clear()
    bench.desk.accept(GivenOrder("o1", ManageModel(ModelAction.LOAD, "b")), bench)
    await until(lambda: bench.prepared == ["b"])
    await bench.desk.close()
    assert bench.updates[-1] == OrderUpdate("o1", OrderPhase.FAILED, "the agent stopped")
    await bench.host.close()
