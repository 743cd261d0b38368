"""Between pointsman.v1 client messages and the domain; `Codec` walks what has one name on both."""

from controller.api.service import Calibrating, ServedModel
from controller.domain.batch import BatchDecision, Candidate, Placement, Weights
from controller.domain.order import ManageModel, ModelAction
from controller.domain.request import (
    ChatMessage,
    Constraints,
    InferenceRequest,
)
from controller.domain.request_record import Account, RequestRecord
from controller.errors import InvalidRequestError
from controller.fleet.convert import ATTRIBUTES, HEALTH, MODEL
from controller.ids import ModelName, RequestId, new_request_id
from controller.profiler.state import NodeRecord
from controller.request_manager.refusals import refusal_text
from controller.request_manager.stream import RoutedTo, Text
from pointsman.codec import Codec
from pointsman.convert import (
    FINISH_REASONS,
    ORDER_UPDATE,
    SAMPLING,
    USAGE,
    response_format_from_proto,
)
from pointsman.v1 import admin_pb2, router_pb2, types_pb2

_CONSTRAINTS = Codec(Constraints, types_pb2.RequestConstraints)
_TURN = Codec(ChatMessage, types_pb2.ChatMessage)
WEIGHTS = Codec(Weights, types_pb2.ObjectiveWeights)
SERVED_MODEL = Codec(ServedModel, router_pb2.ServedModel)
CALIBRATING = Codec(Calibrating, admin_pb2.CalibrateResponse, nested=[MODEL, ORDER_UPDATE])
ROUTED = Codec(RoutedTo, router_pb2.Routed)
TEXT = Codec(Text, router_pb2.TextDelta)

DECISION = Codec(
    BatchDecision,
    router_pb2.Decision,
    by_hand=["decision_seconds"],
    write_with={"decision_milliseconds": lambda decision: 1000.0 * decision.decision_seconds},
)
_CANDIDATE = Codec(
    Candidate,
    router_pb2.Candidate,
    by_hand=["predicted_output_tokens", "predicted_prompt_tokens", "prefill_seconds", "refusals"],
    write_with={"refusal": refusal_text},
)
PLACEMENT = Codec(Placement, router_pb2.Placement, nested=[_CANDIDATE], by_hand=["query_class"])
ACCOUNT = Codec(
    Account,
    router_pb2.Account,
    by_hand=["completion"],
    write_with={
        "finish_reason": lambda account: FINISH_REASONS[account.completion.reason],
        "usage": lambda account: USAGE.write(account.completion.usage),
    },
)


def _known_action(action: ModelAction | None) -> ModelAction:
    if action is None:
        raise InvalidRequestError("action: LOAD, UNLOAD, PIN or UNPIN.")
    return action


MANAGE_MODEL = Codec(
    ManageModel,
    admin_pb2.ManageModelRequest,
    by_hand=["node_id"],
    checks={"action": _known_action},
)
"""Reading raises `InvalidRequestError` when it does not say what is to be done."""


def request_from_proto(message: types_pb2.InferenceRequest) -> InferenceRequest:
    """A client's request, with the defaults of types.proto filled in.

    Raises:
        InvalidRequestError: it has neither a chat nor a prompt.
    """
    prompt: str | tuple[ChatMessage, ...]
    match message.WhichOneof("input"):
        case "prompt":
            prompt = message.prompt
        case "chat":
            prompt = tuple(map(_TURN.read, message.chat.messages))
        case _:
            raise InvalidRequestError("The request has neither chat nor prompt; send one of them.")
    return InferenceRequest(
        request_id=RequestId(message.request_id) if message.request_id else new_request_id(),
        prompt=prompt,
        model=None if message.model in ("", "auto") else ModelName(message.model),
        sampling=SAMPLING.read(message.sampling),
        constraints=_CONSTRAINTS.read(message.constraints),
        response_format=response_format_from_proto(message.response_format),
        session_id=message.session_id,
    )


def weights_from_proto(message: types_pb2.ObjectiveWeights) -> Weights:
    """Weights scaled to sum 1.

    Raises:
        InvalidRequestError: one is negative, or all are 0.
    """
    try:
        return Weights.scaled(*WEIGHTS.read(message).as_tuple())
    except ValueError as error:
        raise InvalidRequestError(f"weights: {error}.") from error


def explanation_to_proto(record: RequestRecord) -> router_pb2.ExplainResponse:
    """Why a request went where it went."""
    response = router_pb2.ExplainResponse(
        state=record.state.value,
        decision=DECISION.write(record.decision) if record.decision else None,
        placement=PLACEMENT.write(record.placement) if record.placement else None,
        account=ACCOUNT.write(record.account) if record.account else None,
        error=record.error,
    )
    response.admitted_time.FromNanoseconds(int(record.admitted_time * 1e9))
    return response


def node_to_proto(record: NodeRecord, now: float) -> admin_pb2.NodeStatus:
    """A node as operators see it, from what routing uses; `now` in monotonic seconds."""
    return admin_pb2.NodeStatus(
        node_id=record.hello.node_id,
        state=record.state.value,
        last_seen_seconds=now - record.last_seen_at,
        attributes=ATTRIBUTES.write(record.hello.attributes),
        models=map(MODEL.write, record.models_now),
        health=HEALTH.write(record.health) if record.health else None,
        round_trip_seconds=record.round_trip_seconds,
        backlog_seconds=record.requests.backlog_seconds(now),
        inflight_requests=len(record.requests),
        completed_requests=record.completed_requests,
        failed_requests=record.failed_requests,
        cancelled_requests=record.cancelled_requests,
        round_trip_age_seconds=record.path.round_trip_age_seconds(now),
        receive_bytes_per_second=record.path.receive_bytes_per_second,
        transmit_bytes_per_second=record.path.transmit_bytes_per_second,
        goodput_age_seconds=record.path.goodput_age_seconds(now),
        health_age_seconds=record.health_age_seconds(now),
    )
