"""Orders on their way from the controller to a node."""

import typing

import pytest

from pointsman.convert import order_from_proto, order_to_proto
from pointsman.v1 import fleet_pb2
from pointsman.values import ORDERS, ManageModel, MeasureSpeed, ModelAction, Order


def test_every_order_has_the_field_that_carries_it() -> None:
    assert set(ORDERS.values()) == set(typing.get_args(Order))


@pytest.mark.parametrize(
    "order",
    [
        *(ManageModel(action, "small") for action in ModelAction),
        ManageModel(ModelAction.LOAD, "small", slots=3, context_tokens=512),
        MeasureSpeed("small"),
        MeasureSpeed(),
    ],
)
def test_order_arrives_as_it_was_given(order: Order) -> None:
    assert order_from_proto(order_to_proto("o1", order)) == ("o1", order)


def test_action_of_a_newer_controller_is_no_order_but_has_its_id() -> None:
    newer = fleet_pb2.ModelOrder(order_id="o1", action=99)  # type: ignore[arg-type]
    assert order_from_proto(fleet_pb2.ConnectResponse(model_order=newer)) == ("o1", None)


def test_other_messages_are_no_orders() -> None:
    assert order_from_proto(fleet_pb2.ConnectResponse(acked_sequence=3)) is None
    work = fleet_pb2.ConnectResponse(work=fleet_pb2.WorkOrder(request_id="r1"))
    assert order_from_proto(work) is None
