"""Domain values to JSON documents and back, checked on the way in.

Pydantic reads the dataclasses' own annotations, so a field added with a default can be read from
documents that lack it, and a document that does not fit is an error, never a half-read value.
"""

from dataclasses import fields, replace
from typing import Final

import pydantic_core
from pydantic import TypeAdapter

from controller.domain.known_calibration import KnownCalibration
from controller.domain.node_report import NodeHello
from controller.domain.policy_choice import KeptChoice
from controller.domain.refusal import Refusal, RefusalReason
from controller.domain.request_record import RequestRecord
from controller.storage.base import FinishedRow

KEPT_OTHERS: Final = 8
"""Destinations beside the chosen one that a kept explanation names."""

CHOICE: Final = TypeAdapter(KeptChoice)
HELLO: Final = TypeAdapter(NodeHello)
CALIBRATION: Final = TypeAdapter(KnownCalibration)
RECORD: Final = TypeAdapter(RequestRecord)

_COLUMNS: Final = tuple(field.name for field in fields(FinishedRow))


def record_document(record: RequestRecord, keep_prompt: bool) -> bytes:
    """A finished request as JSON; without its prompt unless it is to be kept."""
    request = record.request
    if not keep_prompt:
        request = replace(request, prompt="")
    placement = record.placement
    if placement is not None and len(placement.others) > KEPT_OTHERS:
        placement = replace(placement, others=placement.others[:KEPT_OTHERS])
    return RECORD.dump_json(replace(record, request=request, placement=placement))


def kept_record(document: bytes) -> RequestRecord:
    """The finished request of a document.

    Raises:
        ValueError: the document does not fit.
    """
    record = RECORD.validate_json(document)
    placement = record.placement
    if placement is None or b'"refusal":' not in document:
        return record
    # Earlier, a candidate's refusals were kept as one sentence.
    sentences = [
        other["refusal"] for other in pydantic_core.from_json(document)["placement"]["others"]
    ]
    others = tuple(
        replace(other, refusals=(Refusal(RefusalReason.AS_KEPT, (sentence,)),))
        if sentence
        else other
        for other, sentence in zip(placement.others, sentences, strict=True)
    )
    return replace(record, placement=replace(placement, others=others))


def finished_row(record: RequestRecord, finished_time: float, keep_prompt: bool) -> FinishedRow:
    """A finished request as one row of figures."""
    account = record.account
    usage = account.completion.usage if account else None
    chosen = record.placement.chosen if record.placement else None
    return FinishedRow(
        request_id=record.request.request_id,
        finished_time=finished_time,
        state=record.state.value,
        batch_id=record.decision.batch_id if record.decision else None,
        node_id=chosen.node_id if chosen else None,
        model=chosen.model if chosen else None,
        policy=record.decision.policy if record.decision else None,
        finish_reason=account.completion.reason.value if account else None,
        prompt_tokens=usage.prompt_tokens if usage else None,
        completion_tokens=usage.completion_tokens if usage else None,
        cached_prompt_tokens=usage.cached_prompt_tokens if usage else None,
        queue_seconds=usage.queue_seconds if usage else None,
        prefill_seconds=usage.prefill_seconds if usage else None,
        decode_seconds=usage.decode_seconds if usage else None,
        window_seconds=account.window_seconds if account else None,
        first_token_seconds=account.first_token_seconds if account else None,
        total_seconds=account.total_seconds if account else None,
        predicted_finish_seconds=account.predicted_finish_seconds if account else None,
        measured_finish_seconds=account.measured_finish_seconds if account else None,
        quality_ratio=chosen.quality_ratio if chosen else None,
        cost_usd=account.cost_usd if account else None,
        energy_joules=usage.energy_joules if usage else None,
        energy_source=usage.energy_source if usage else None,
        attempts=record.attempts,
        prompt_characters=len(record.request.text),
        prompt=record.request.text if keep_prompt else None,
    )


def finished_columns(row: FinishedRow) -> dict[str, object]:
    """Its values by column; `dataclasses.asdict` would copy each one."""
    return {name: getattr(row, name) for name in _COLUMNS}
