"""What orders have made of a node's models is there again after a restart."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from edge_agent.config import ModelSettings
from edge_agent.serving.kept_orders import KeptOrder, KeptOrders, models_at_start, order_of
from edge_agent.serving.lifecycle import ModelPhase
from tests.fakes.hosted import hosted_model

LISTED = ModelSettings("listed", slots=2)


def kept(
    entry: ModelSettings | None, is_wanted: bool, is_pinned: bool = False, slots: int = 2
) -> KeptOrder | None:
    model = hosted_model(ModelSettings("listed", slots=slots, is_pinned=is_pinned))
    return order_of(model, is_wanted, entry)


@pytest.mark.parametrize(
    ("is_wanted", "is_pinned", "slots"),
    [(False, False, 2), (True, True, 2), (True, False, 5)],
)
def test_what_differs_from_the_settings_is_there_again(
    tmp_path: Path, is_wanted: bool, is_pinned: bool, slots: int
) -> None:
    KeptOrders(tmp_path / "orders").put({"listed": kept(LISTED, is_wanted, is_pinned, slots)})
    found = models_at_start([LISTED], KeptOrders(tmp_path / "orders").orders)["listed"]
    assert (found.is_wanted, found.is_pinned, found.settings.slots) == (is_wanted, is_pinned, slots)
    assert found.phase is (ModelPhase.LOADING if is_wanted else ModelPhase.UNLOADED)


def test_what_the_settings_say_anyway_is_not_kept() -> None:
    assert kept(LISTED, is_wanted=True) is None
    assert kept(None, is_wanted=False) is None


def test_edited_settings_are_the_later_word() -> None:
    orders = {"listed": kept(LISTED, is_wanted=False)}
    assert orders["listed"] is not None
    found = models_at_start([replace(LISTED, slots=3)], orders)  # type: ignore[arg-type]
    assert found["listed"].is_wanted
    assert found["listed"].settings.slots == 3
    assert models_at_start([], orders) == {}, "what has left the settings has left"  # type: ignore[arg-type]


def test_ordered_model_that_is_in_no_settings_is_there_again() -> None:
    order = kept(None, is_wanted=True, is_pinned=True, slots=7)
    assert order is not None
    models = models_at_start([LISTED], {"extra": order})
    assert list(models) == ["listed", "extra"]
    assert (models["extra"].is_wanted, models["extra"].is_pinned) == (True, True)
    assert models["extra"].settings.slots == 7
    later = replace(LISTED, name="extra", slots=1)
    assert models_at_start([later], {"extra": order})["extra"].settings == later


def test_order_that_was_undone_is_forgotten(tmp_path: Path) -> None:
    orders = KeptOrders(tmp_path / "orders")
    orders.put({"listed": kept(LISTED, is_wanted=False), "extra": kept(None, is_wanted=True)})
    orders.put({"extra": None})
    assert list(KeptOrders(tmp_path / "orders").orders) == ["listed"]


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a": {"slots": "many"}}', "\0"])
def test_damaged_file_leaves_the_settings_in_force(tmp_path: Path, text: str) -> None:
    (tmp_path / "orders").write_text(text)
    orders = KeptOrders(tmp_path / "orders")
    assert orders.orders == {}
    orders.put({"listed": kept(LISTED, is_wanted=False)})
    assert list(json.loads((tmp_path / "orders").read_text())) == ["listed"]


def test_folder_that_cannot_be_written_stops_no_order(tmp_path: Path) -> None:
    orders = KeptOrders(tmp_path / "absent" / "orders")
    orders.put({"listed": kept(LISTED, is_wanted=False)})
    assert "listed" in orders.orders
