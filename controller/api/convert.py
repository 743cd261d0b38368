"""Between pointsman.v1 client messages and the domain."""

from controller.api.service import Calibrating, NodeView, ServedModel
from controller.domain.batch import BatchDecision, Candidate, Placement, Weights
from controller.domain.order import ManageModel
from controller.domain.request import (
    ChatMessage,
    Constraints,
    FormatKind,
    InferenceRequest,
    ResponseFormat,
    Sampling,
)
from controller.domain.request_record import Account, RequestRecord
from controller.errors import InvalidRequestError
from controller.fleet.convert import (
    action_from_proto,
    attributes_to_proto,
    finish_reason_to_proto,
    health_to_proto,
    model_to_proto,
    order_update_to_proto,
    usage_to_proto,
)
from controller.ids import ModelName, NodeId, RequestId, new_request_id
from controller.request_manager.refusals import refusal_text
from pointsman.v1 import admin_pb2, router_pb2, types_pb2


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
            prompt = tuple(ChatMessage(turn.role, turn.content) for turn in message.chat.messages)
        case _:
            raise InvalidRequestError("The request has neither chat nor prompt; send one of them.")
    defaults, given = Sampling(), message.sampling
    limits = message.constraints
    return InferenceRequest(
        request_id=RequestId(message.request_id) if message.request_id else new_request_id(),
        prompt=prompt,
        model=None if message.model in ("", "auto") else ModelName(message.model),
        sampling=Sampling(
            max_tokens=given.max_tokens if given.HasField("max_tokens") else defaults.max_tokens,
            temperature=given.temperature
            if given.HasField("temperature")
            else defaults.temperature,
            top_p=given.top_p if given.HasField("top_p") else defaults.top_p,
            top_k=given.top_k if given.HasField("top_k") else defaults.top_k,
            seed=given.seed if given.HasField("seed") else None,
            stop=tuple(given.stop),
        ),
        constraints=Constraints(
            min_quality_ratio=limits.min_quality_ratio
            if limits.HasField("min_quality_ratio")
            else None,
            deadline_seconds=limits.deadline_seconds
            if limits.HasField("deadline_seconds")
            else None,
            max_price_usd=limits.max_price_usd if limits.HasField("max_price_usd") else None,
            edge_only=limits.edge_only,
            node_id=NodeId(limits.node_id) if limits.node_id else None,
        ),
        response_format=response_format_from_proto(message.response_format)
        if message.HasField("response_format")
        else None,
        session_id=message.session_id,
    )


def response_format_from_proto(message: types_pb2.ResponseFormat) -> ResponseFormat | None:
    """What an answer must look like; None for free text."""
    match message.WhichOneof("format"):
        case "json_object":
            return ResponseFormat(FormatKind.JSON_OBJECT) if message.json_object else None
        case "json_schema":
            return ResponseFormat(FormatKind.JSON_SCHEMA, message.json_schema)
        case "grammar":
            return ResponseFormat(FormatKind.GRAMMAR, message.grammar)
        case _:
            return None


def weights_from_proto(message: types_pb2.ObjectiveWeights) -> Weights:
    """Weights scaled to sum 1.

    Raises:
        InvalidRequestError: one is negative, or all are 0.
    """
    try:
        return Weights.scaled(message.quality, message.cost, message.energy, message.time)
    except ValueError as error:
        raise InvalidRequestError(f"weights: {error}.") from error


def weights_to_proto(weights: Weights) -> types_pb2.ObjectiveWeights:
    """Weights as they are used."""
    return types_pb2.ObjectiveWeights(
        quality=weights.quality, cost=weights.cost, energy=weights.energy, time=weights.time
    )


def decision_to_proto(decision: BatchDecision) -> router_pb2.Decision:
    """A batch's decision as a whole."""
    return router_pb2.Decision(
        batch_id=decision.batch_id,
        policy=decision.policy,
        weights=weights_to_proto(decision.weights),
        normalisation=decision.normalisation,
        quality_loss=decision.quality_loss,
        cost_usd=decision.cost_usd,
        energy_joules=decision.energy_joules,
        completion_seconds=decision.completion_seconds,
        objective=decision.objective,
        lower_bound=decision.lower_bound,
        decision_milliseconds=1000.0 * decision.decision_seconds,
        batch_size=decision.batch_size,
        fallback_reason=decision.fallback_reason,
        predictors=decision.predictors,
    )


def placement_to_proto(placement: Placement) -> router_pb2.Placement:
    """Where one request goes."""
    return router_pb2.Placement(
        request_id=placement.request_id,
        chosen=_candidate_to_proto(placement.chosen) if placement.chosen else None,
        others=[_candidate_to_proto(other) for other in placement.others],
    )


def _candidate_to_proto(candidate: Candidate) -> router_pb2.Candidate:
    return router_pb2.Candidate(
        node_id=candidate.node_id,
        model=candidate.model,
        quality_ratio=candidate.quality_ratio,
        cost_usd=candidate.cost_usd,
        energy_joules=candidate.energy_joules,
        work_seconds=candidate.work_seconds,
        latency_seconds=candidate.latency_seconds,
        network_seconds=candidate.network_seconds,
        finish_seconds=candidate.finish_seconds,
        refusal=refusal_text(candidate),
        quality_source=candidate.quality_source,
        latency_source=candidate.latency_source,
        quality_count=candidate.quality_count,
    )


def account_to_proto(account: Account) -> router_pb2.Account:
    """The whole story of one finished request."""
    return router_pb2.Account(
        request_id=account.request_id,
        batch_id=account.batch_id,
        node_id=account.node_id,
        model=account.model,
        policy=account.policy,
        finish_reason=finish_reason_to_proto(account.completion.reason),
        usage=usage_to_proto(account.completion.usage),
        window_seconds=account.window_seconds,
        first_token_seconds=account.first_token_seconds,
        total_seconds=account.total_seconds,
        predicted_finish_seconds=account.predicted_finish_seconds,
        measured_finish_seconds=account.measured_finish_seconds,
        cost_usd=account.cost_usd,
        attempts=account.attempts,
        query_class=account.query_class,
    )


def explanation_to_proto(record: RequestRecord) -> router_pb2.ExplainResponse:
    """Why a request went where it went."""
    response = router_pb2.ExplainResponse(
        state=record.state.value,
        decision=decision_to_proto(record.decision) if record.decision else None,
        placement=placement_to_proto(record.placement) if record.placement else None,
        account=account_to_proto(record.account) if record.account else None,
        error=record.error,
    )
    response.admitted_time.FromNanoseconds(int(record.admitted_time * 1e9))
    return response


def served_model_to_proto(model: ServedModel) -> router_pb2.ServedModel:
    """A model that the fleet can answer with."""
    return router_pb2.ServedModel(
        name=model.name,
        family=model.family,
        parameters_billions=model.parameters_billions,
        quantisation=model.quantisation,
        context_tokens=model.context_tokens,
        node_ids=model.node_ids,
    )


def node_to_proto(view: NodeView) -> admin_pb2.NodeStatus:
    """A node as operators see it."""
    record = view.record
    return admin_pb2.NodeStatus(
        node_id=view.node_id,
        state=record.state.value,
        last_seen_seconds=view.last_seen_seconds,
        attributes=attributes_to_proto(record.hello.attributes),
        models=[model_to_proto(model) for model in view.models],
        health=health_to_proto(record.health) if record.health else None,
        round_trip_seconds=record.round_trip_seconds,
        backlog_seconds=view.backlog_seconds,
        inflight_requests=len(record.requests),
        completed_requests=record.completed_requests,
        failed_requests=record.failed_requests,
        cancelled_requests=record.cancelled_requests,
        round_trip_age_seconds=view.round_trip_age_seconds,
        receive_bytes_per_second=record.path.receive_bytes_per_second,
        transmit_bytes_per_second=record.path.transmit_bytes_per_second,
        goodput_age_seconds=view.goodput_age_seconds,
        health_age_seconds=view.health_age_seconds,
    )


def manage_model_from_proto(message: admin_pb2.ManageModelRequest) -> ManageModel:
    """An operator's order.

    Raises:
        InvalidRequestError: it does not say what is to be done.
    """
    action = action_from_proto(message.action)
    if action is None:
        raise InvalidRequestError("action: LOAD, UNLOAD, PIN or UNPIN.")
    return ManageModel(
        action,
        ModelName(message.model),
        message.slots if message.HasField("slots") else None,
        message.context_tokens if message.HasField("context_tokens") else None,
    )


def calibrating_to_proto(event: Calibrating) -> admin_pb2.CalibrateResponse:
    """How a node's measurement goes."""
    return admin_pb2.CalibrateResponse(
        node_id=event.node_id,
        update=order_update_to_proto(event.update),
        models=[model_to_proto(model) for model in event.models],
    )
