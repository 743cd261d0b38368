"""Domain values to JSON documents and back, checked on the way in.

Pydantic reads the dataclasses' own annotations, so a field added with a default can be read from
documents that lack it, and a document that does not fit is an error, never a half-read value.
"""

from dataclasses import fields, replace
from typing import Any, Final

import pydantic_core
from pydantic import TypeAdapter

from controller.domain.completion import Usage
from controller.domain.known_calibration import KnownCalibration
from controller.domain.node_report import NodeHello
from controller.domain.policy_choice import KeptChoice
from controller.domain.refusal import Refusal, RefusalReason
from controller.domain.request_record import RequestRecord
from controller.storage.base import FinishedRow

_EARLIER_NAMES: Final = {
    "prefill_rate": "prefill_tokens_per_second",
    "decode_rate": "decode_tokens_per_second",
    "saturated_decode_rate": "saturated_decode_tokens_per_second",
}
"""Of fields in documents that an earlier version wrote."""

KEPT_OTHERS: Final = 8
"""Destinations beside the chosen one that a kept explanation names."""

CHOICE: Final = TypeAdapter(KeptChoice)
HELLO: Final = TypeAdapter(NodeHello)
CALIBRATION: Final = TypeAdapter(KnownCalibration)
RECORD: Final = TypeAdapter(RequestRecord)

_COLUMNS: Final = tuple(field.name for field in fields(FinishedRow))
_OF_USAGE: Final = tuple(field.name for field in fields(Usage) if field.name in _COLUMNS)
_OF_ACCOUNT: Final = (
    *("window_seconds", "first_token_seconds", "total_seconds"),
    *("predicted_finish_seconds", "measured_finish_seconds", "cost_usd"),
)


def kept_hello(document: str) -> NodeHello:
    """How a node introduced itself.

    Raises:
        ValueError: the document does not fit.
    """
    return HELLO.validate_python(_renamed(pydantic_core.from_json(document)))


def kept_calibration(document: str) -> KnownCalibration:
    """A calibration as it was remembered.

    Raises:
        ValueError: the document does not fit.
    """
    return CALIBRATION.validate_python(_renamed(pydantic_core.from_json(document)))


def _renamed(found: Any) -> Any:
    if isinstance(found, list):
        return [_renamed(item) for item in found]
    if isinstance(found, dict):
        return {_EARLIER_NAMES.get(key, key): _renamed(value) for key, value in found.items()}
    return found


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
    account, decision = record.account, record.decision
    chosen = record.placement.chosen if record.placement else None
    return FinishedRow(
        request_id=record.request.request_id,
        finished_time=finished_time,
        state=record.state.value,
        batch_id=decision.batch_id if decision else None,
        policy=decision.policy if decision else None,
        node_id=chosen.node_id if chosen else None,
        model=chosen.model if chosen else None,
        quality_ratio=chosen.quality_ratio if chosen else None,
        finish_reason=account.completion.reason.value if account else None,
        attempts=record.attempts,
        prompt_characters=len(record.request.text),
        prompt=record.request.text if keep_prompt else None,
        **{name: getattr(account, name, None) for name in _OF_ACCOUNT},
        **{name: getattr(account and account.completion.usage, name, None) for name in _OF_USAGE},
    )


def finished_columns(row: FinishedRow) -> dict[str, object]:
    """Its values by column; `dataclasses.asdict` would copy each one."""
    return {name: getattr(row, name) for name in _COLUMNS}
