import math

import pytest

from controller.api.convert import (
    ACCOUNT,
    WEIGHTS,
    explanation_to_proto,
    request_from_proto,
    weights_from_proto,
)
from controller.domain.batch import Weights
from controller.domain.completion import Completion, FinishReason, Usage
from controller.domain.request import (
    Constraints,
    FormatKind,
    InferenceRequest,
    ResponseFormat,
    Sampling,
)
from controller.domain.request_record import Account, RequestRecord, RequestState
from controller.errors import InvalidRequestError
from controller.fleet.convert import work_order
from controller.ids import BatchId, ModelName, NodeId, RequestId
from pointsman.v1 import types_pb2


def test_absent_fields_take_the_defaults_beside_them_in_the_protocol() -> None:
    request = request_from_proto(types_pb2.InferenceRequest(prompt="Hello"))
    assert request.sampling == Sampling(256, 0.7, 0.95, 40, None, ())
    assert request.constraints == Constraints()
    assert request.model is None
    assert request.request_id


def test_zero_that_was_sent_is_not_taken_for_absent() -> None:
    message = types_pb2.InferenceRequest(
        request_id="mine",
        prompt="Hello",
        sampling=types_pb2.SamplingParameters(
            max_tokens=0, temperature=0.0, top_p=0.0, top_k=0, seed=0
        ),
        constraints=types_pb2.RequestConstraints(
            min_quality_ratio=0.0, deadline_seconds=0.0, max_price_usd=0.0
        ),
    )
    request = request_from_proto(message)
    assert request.request_id == "mine"
    assert request.sampling == Sampling(0, 0.0, 0.0, 0, 0, ())
    assert request.constraints == Constraints(0.0, 0.0, 0.0, False)


def test_request_may_name_the_only_node_it_may_go_to() -> None:
    limits = types_pb2.RequestConstraints(node_id="pi")
    message = types_pb2.InferenceRequest(prompt="Hello", constraints=limits)
    assert request_from_proto(message).constraints == Constraints(node_id=NodeId("pi"))


@pytest.mark.parametrize("name", ["", "auto"])
def test_router_chooses_the_model_when_none_is_asked_for(name: str) -> None:
    message = types_pb2.InferenceRequest(prompt="Hello", model=name)
    assert request_from_proto(message).model is None
    message.model = "small"
    assert request_from_proto(message).model == "small"


def test_request_without_any_input_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="neither chat nor prompt"):
        request_from_proto(types_pb2.InferenceRequest(model="small"))


def test_weights_are_scaled_and_bad_ones_refused() -> None:
    weights = weights_from_proto(types_pb2.ObjectiveWeights(quality=3, time=1))
    assert weights == Weights(0.75, 0.0, 0.0, 0.25)
    assert weights_from_proto(WEIGHTS.write(weights)) == weights
    for bad in (
        types_pb2.ObjectiveWeights(),
        types_pb2.ObjectiveWeights(quality=-1, time=2),
        types_pb2.ObjectiveWeights(quality=math.nan),
        types_pb2.ObjectiveWeights(energy=math.inf),
    ):
        with pytest.raises(InvalidRequestError, match="weights: "):
            weights_from_proto(bad)


def test_account_tells_the_whole_story_and_unknown_energy_stays_absent() -> None:
    account = Account(
        RequestId("r1"),
        BatchId("b1"),
        NodeId("pi"),
        ModelName("small"),
        "memetic",
        Completion(FinishReason.LENGTH, Usage(3, 4, 0.1, 0.2, 0.3)),
        window_seconds=0.5,
        first_token_seconds=1.0,
        total_seconds=2.0,
        predicted_finish_seconds=1.5,
        measured_finish_seconds=1.4,
        cost_usd=0.01,
        attempts=2,
    )
    message = ACCOUNT.write(account)
    assert message.finish_reason == types_pb2.FINISH_REASON_LENGTH
    assert (message.request_id, message.batch_id, message.node_id) == ("r1", "b1", "pi")
    assert (message.usage.prompt_tokens, message.usage.completion_tokens) == (3, 4)
    assert not message.usage.HasField("energy_joules")
    assert message.predicted_finish_seconds == 1.5
    assert message.measured_finish_seconds == 1.4
    assert message.attempts == 2


def test_waiting_request_is_explained_without_a_decision() -> None:
    record = RequestRecord(InferenceRequest(RequestId("r1"), "Hello"), 1_700_000_000.2505, 5.0)
    message = explanation_to_proto(record)
    assert message.state == RequestState.WAITING.value
    assert message.admitted_time.ToMilliseconds() == 1_700_000_000_250
    for name in ("decision", "placement", "account"):
        assert not message.HasField(name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (types_pb2.ResponseFormat(), None),
        (types_pb2.ResponseFormat(json_object=False), None),
        (types_pb2.ResponseFormat(json_object=True), ResponseFormat(FormatKind.JSON_OBJECT)),
        (types_pb2.ResponseFormat(json_schema="{}"), ResponseFormat(FormatKind.JSON_SCHEMA, "{}")),
        (types_pb2.ResponseFormat(grammar="g"), ResponseFormat(FormatKind.GRAMMAR, "g")),
    ],
)
def test_response_format_and_conversation_reach_the_node_as_they_came(
    message: types_pb2.ResponseFormat, expected: ResponseFormat | None
) -> None:
    asked = types_pb2.InferenceRequest(prompt="Hi", response_format=message, session_id="talk")
    request = request_from_proto(asked)
    assert (request.response_format, request.session_id) == (expected, "talk")
    order = work_order(request, 1, ModelName("small"), 10.0)
    assert order.session_id == "talk"
    assert order.HasField("response_format") is (expected is not None)
    if expected is not None:
        assert order.response_format == message
