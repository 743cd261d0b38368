"""Every store of the controller's state behaves alike."""

import dataclasses
import time

import pytest

from controller.domain.batch import Weights
from controller.domain.cluster import Calibration, NodeKind, PowerProfile, TokenPrice
from controller.domain.known_calibration import CalibrationKey, KnownCalibration
from controller.domain.node_report import ModelPhase, NodeAttributes, NodeHello, ReportedModel
from controller.domain.policy_choice import KeptChoice, PolicyChoice
from controller.domain.request_record import RequestState
from controller.ids import ModelName, NodeId, RequestId
from controller.storage.base import KnownNode, Retention
from controller.storage.memory import MemoryStore
from controller.storage.sqlite import SqliteStore
from tests.fakes.records import finished_record

SPEEDS = Calibration(200.0, 20.0, 60.0)


def node(name: str = "pi-1", done: int = 3) -> KnownNode:
    model = ReportedModel(
        ModelName("small"), "smol", 0.135, "Q4_1", "ab" * 32, ModelPhase.READY, "", 2048, 4,
        SPEEDS, TokenPrice(0.0, 0.0, 0.0), True, 4.2,
    )  # fmt: skip
    attributes = NodeAttributes(
        NodeKind.EDGE, "Raspberry Pi 5", 4, 8 << 30, "Debian 12", "0.1", "llama.cpp 1",
        PowerProfile(3.0, 9.0), True, 1e-10, 2e-10,
    )  # fmt: skip
    hello = NodeHello(NodeId(name), "start-1", attributes, (model,))
    return KnownNode(hello, True, done, 1, 2, "start-1", 17)


def calibration(mode: str = "15W", rate: float = 20.0) -> KnownCalibration:
    key = CalibrationKey("Raspberry Pi 5", "ab" * 32, "llama.cpp 1", mode)
    return KnownCalibration(key, dataclasses.replace(SPEEDS, decode_tokens_per_second=rate), 9)


def chosen(policy: str) -> KeptChoice:
    weights = Weights.scaled(0.1, 0.2, 0.3, 0.7)
    configured = PolicyChoice("greedy", Weights(), "payoff")
    return KeptChoice(PolicyChoice(policy, weights, "minmax"), configured)


@pytest.fixture(params=["memory", "sqlite"])
def open_store(request, tmp_path):
    opened = []

    def open_it(retention: Retention | None = None):
        store = (
            MemoryStore(retention)
            if request.param == "memory"
            else SqliteStore(tmp_path / "data", retention)
        )
        opened.append(store)
        return store

    yield open_it
    for store in opened:
        store.close(5.0)


def test_nodes_and_calibrations_come_back_as_they_were(open_store):
    store = open_store()
    store.save_node(node("pi-2"))
    store.save_node(node("pi-1"))
    store.save_calibrations([calibration("15W"), calibration("30W")])
    assert store.flush(10.0)
    remembered = store.load()
    assert sorted(remembered.nodes, key=lambda one: one.node_id) == [node("pi-1"), node("pi-2")]
    assert set(remembered.calibrations) == {calibration("15W"), calibration("30W")}


def test_of_the_same_thing_only_the_latest_is_kept(open_store):
    store = open_store()
    for done in (1, 2, 3):
        store.save_node(node(done=done))
        store.save_calibrations([calibration(rate=float(done))])
    assert store.flush(10.0)
    remembered = store.load()
    assert [one.completed_requests for one in remembered.nodes] == [3]
    assert [one.calibration.decode_tokens_per_second for one in remembered.calibrations] == [3.0]


def test_nodes_are_told_of_once_they_and_what_came_before_are_kept(open_store):
    store = open_store()
    told: list[KnownNode] = []
    kept_before: list[bool] = []

    def tell(nodes):
        told.extend(nodes)
        kept_before.append(bool(store.finished(1)))

    store.tell_kept(tell)
    store.save_finished(finished_record())
    store.save_node(node())
    store.forget_node(NodeId("pi-9"))
    assert store.flush(10.0)
    assert told == [node()]
    assert all(kept_before)


def test_a_forgotten_node_is_gone(open_store):
    store = open_store()
    store.save_node(node())
    store.forget_node(NodeId("pi-1"))
    assert store.flush(10.0)
    assert store.load().nodes == ()


def test_the_chosen_policy_comes_back_as_it_was_given_last_or_not_at_all(open_store):
    store = open_store()
    assert store.load_choice() is None
    for name in ("memetic", "cheapest"):
        store.save_choice(chosen(name))
    assert store.flush(10.0)
    assert store.load_choice() == chosen("cheapest")
    store.save_choice(None)
    assert store.flush(10.0)
    assert store.load_choice() is None


def test_the_story_of_a_request_can_be_read_but_not_its_prompt(open_store):
    store = open_store()
    record = finished_record()
    store.save_finished(record)
    assert store.flush(10.0)
    found = store.find(RequestId("r-1"))
    assert found.account == record.account
    assert found.decision == record.decision
    assert found.placement == record.placement
    assert found.request.text == ""
    assert store.find(RequestId("never")) is None
    (row,) = store.finished(10)
    assert (row.node_id, row.model, row.completion_tokens, row.prompt) == (
        "pi-1", "small", 34, None,
    )  # fmt: skip
    assert row.prompt_characters == len("What is 2 + 2?")


def test_prompts_are_kept_where_the_settings_say_so(open_store):
    store = open_store(Retention(keep_prompts=True))
    store.save_finished(finished_record())
    assert store.flush(10.0)
    assert store.find(RequestId("r-1")).request == finished_record().request
    assert store.finished(1)[0].prompt == "What is 2 + 2?"


def test_the_same_id_again_replaces_the_earlier_story(open_store):
    store = open_store()
    for attempts in (1, 2):
        record = finished_record()
        record.attempts = attempts
        store.save_finished(record)
        assert store.flush(10.0)
    assert [row.attempts for row in store.finished(10)] == [2]


def test_the_latest_finished_come_first(open_store):
    store = open_store()
    for number in range(5):
        store.save_finished(finished_record(f"r-{number}"))
    assert store.flush(10.0)
    assert [row.request_id for row in store.finished(2)] == ["r-4", "r-3"]


def test_accounts_are_of_answered_requests_and_the_latest_come_first(open_store):
    store = open_store()
    for number in range(4):
        record = finished_record(f"r-{number}")
        record.account = dataclasses.replace(record.account, request_id=RequestId(f"r-{number}"))
        if number == 2:
            record.state, record.account = RequestState.FAILED, None
        store.save_finished(record)
    assert [account.request_id for account in store.accounts(2)] == ["r-3", "r-1"]
    assert store.flush(10.0)
    assert [account.request_id for account in store.accounts(2)] == ["r-3", "r-1"]
    assert [account.request_id for account in store.accounts(9)] == ["r-3", "r-1", "r-0"]
    assert store.accounts(1)[0].completion == finished_record().account.completion


def test_a_clock_that_goes_backwards_loses_nothing_and_changes_no_order(open_store, monkeypatch):
    store = open_store(Retention(days=1.0))
    real = time.time()
    for number, now in enumerate((real, real - 86_400 * 365, 0.0, real)):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        store.save_finished(finished_record(f"r-{number}"))
        store.save_calibrations([calibration(rate=1.0 + number)])
        assert store.flush(10.0)
        if number < 3:
            assert store.finished(1)[0].request_id == f"r-{number}"
    assert store.load().calibrations == (calibration(rate=4.0),)
    monkeypatch.undo()
    assert store.finished(1)[0].request_id == "r-3"
    assert store.find(RequestId("r-0")) is not None


def test_values_given_before_the_end_are_kept(open_store):
    store = open_store()
    store.save_finished(finished_record())
    assert store.close(10.0)
    assert store.state.waiting == 0
