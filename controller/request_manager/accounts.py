"""The account of a finished request, and the line that the log has of it."""

from collections.abc import Iterable

from controller.domain.completion import Completion
from controller.domain.link_traffic import answer_usd
from controller.domain.node_report import NodeAttributes, ReportedModel
from controller.domain.request_record import Account, RequestRecord


def account_of(
    record: RequestRecord,
    completion: Completion,
    models: Iterable[ReportedModel],
    attributes: NodeAttributes | None,
    now: float,
) -> Account:
    """What a completed request took and cost.

    Args:
        record: of a request that has been dispatched.
        completion: its node's last word.
        models: of its node, with their prices.
        attributes: of its node, with the prices of its link; None when the node is forgotten.
        now: monotonic seconds at which the client has read the end.
    """
    placement, decision = record.placement, record.decision
    assert placement is not None
    assert decision is not None
    chosen = placement.chosen
    assert chosen is not None
    closed_at = record.closed_at or now
    return Account(
        request_id=record.request.request_id,
        batch_id=decision.batch_id,
        node_id=chosen.node_id,
        model=chosen.model,
        policy=decision.policy,
        completion=completion,
        window_seconds=closed_at + decision.decision_seconds - record.admitted_at,
        first_token_seconds=(record.first_token_at or now) - record.admitted_at,
        total_seconds=now - record.admitted_at,
        predicted_finish_seconds=chosen.finish_seconds or 0.0,
        measured_finish_seconds=now - closed_at,
        cost_usd=next(
            (
                answer_usd(record.request, completion.usage, model.price, attributes)
                for model in models
                if model.name == chosen.model and attributes is not None
            ),
            0.0,
        ),
        attempts=record.attempts,
        query_class=placement.query_class,
        predicted_energy_joules=chosen.energy_joules,
    )


def log_line(record: RequestRecord, account: Account) -> dict[str, object]:
    """The whole story of a completed request, as the log has it."""
    usage = account.completion.usage
    chosen = record.placement.chosen if record.placement else None
    return {
        "request_id": account.request_id,
        "batch_id": account.batch_id,
        "node_id": account.node_id,
        "model": account.model,
        "outcome": account.completion.reason.value,
        "window_seconds": round(account.window_seconds, 4),
        "queue_seconds": round(usage.queue_seconds, 4),
        "prefill_seconds": round(usage.prefill_seconds, 4),
        "decode_seconds": round(usage.decode_seconds, 4),
        "predicted_finish_seconds": round(account.predicted_finish_seconds, 4),
        "measured_finish_seconds": round(account.measured_finish_seconds, 4),
        "predicted_prompt_tokens": round(chosen.predicted_prompt_tokens) if chosen else None,
        "predicted_completion_tokens": round(chosen.predicted_output_tokens) if chosen else None,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "energy_joules": usage.energy_joules,
    }
