"""From an answer's account, and its node as it was then, to a measurement."""

import time
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import Message

from controller.lab.offline.graders import Grade, Key
from controller.lab.offline.measurements import COLUMNS, Measurement
from controller.lab.offline.questions import Question
from controller.predictors.features import profile_query
from controller.quality.store import prompt_digest
from pointsman.convert import USAGE
from pointsman.v1 import admin_pb2, fleet_pb2, router_pb2, types_pb2


def expected_text(key: Key) -> str:
    """The right answers, a line each."""
    return "\n".join(key.expected)


@dataclass(frozen=True, slots=True)
class HowAsked:
    """How a question was asked.

    Attributes:
        kind: "profiled" or "routed".
        inflight_requests: others of this run that were under way when it was sent.
        batch_requests: of its decision; None when that is not known.
    """

    run_id: str
    kind: str
    max_tokens: int
    seed: int
    inflight_requests: int
    batch_requests: int | None


def measurement(
    question: Question,
    asked: HowAsked,
    answer: str,
    grade: Grade,
    account: router_pb2.Account,
    node: admin_pb2.NodeStatus,
) -> Measurement:
    """One row of profiling data.

    Args:
        question: that was asked.
        asked: how.
        answer: the whole text.
        grade: of it.
        account: as the controller told it.
        node: the answering node, as lately as it was seen; without any field when it is gone.
    """
    usage, attributes, health = USAGE.read(account.usage), node.attributes, node.health
    model = next((m for m in node.models if m.name == account.model), fleet_pb2.ModelState())
    features = profile_query(question.text)
    served = usage.queue_seconds + usage.prefill_seconds + usage.decode_seconds
    has_health, has_speeds = node.HasField("health"), model.HasField("calibration")
    by_name = {
        **_columns_of(node),
        **_columns_of(attributes),
        **_columns_of(health),
        **_columns_of(model, "model_"),
        **(_columns_of(model.calibration, "calibrated_") if has_speeds else _UNCALIBRATED),
        **_columns_of(features),
        **_columns_of(usage),
        **_columns_of(account),
        **_columns_of(question),
        **_columns_of(asked),
        **_columns_of(grade),
    }
    by_hand = {
        "measured_time": time.time(),
        "prompt": question.text,
        "prompt_digest": prompt_digest(question.text).hex(),
        "prompt_lexical_diversity_ratio": features.lexical_diversity_ratio,
        "node_kind": _name(types_pb2.NodeKind.Name(attributes.kind), "NODE_KIND_"),
        "engine_version": model.calibration.engine_version or attributes.engine_version,
        "has_gpu": health.HasField("gpu_utilisation_ratio"),
        "model_is_base": model.is_base_model,
        "calibrated_saturated_tokens_per_second": (
            model.calibration.saturated_decode_tokens_per_second if has_speeds else None
        ),
        "finish_reason": _name(
            types_pb2.FinishReason.Name(account.finish_reason), "FINISH_REASON_"
        ),
        "network_seconds": max(0.0, account.measured_finish_seconds - served),
        "cpu_utilisation_ratio": health.cpu_utilisation_ratio if has_health else None,
        "memory_utilisation_ratio": _memory_utilisation(attributes, health) if has_health else None,
        "answer": answer,
        "extracted_answer": grade.extracted,
        "expected_answer": expected_text(question.key),
        "grader": question.key.grader.value,
    }
    return Measurement(**{**by_name, **by_hand})


_UNCALIBRATED: Final = dict.fromkeys(
    ("calibrated_prefill_tokens_per_second", "calibrated_decode_tokens_per_second")
)


def _columns_of(source: object, prefix: str = "") -> dict[str, Any]:
    """Every column that the source has a field of the same name for; None where it is absent."""
    found = {}
    for column in COLUMNS:
        name = column.name.removeprefix(prefix)
        if column.name.startswith(prefix) and hasattr(source, name):
            found[column.name] = getattr(source, name)
            if isinstance(source, Message):
                field = source.DESCRIPTOR.fields_by_name[name]
                if field.has_presence and not source.HasField(name):
                    found[column.name] = None
    return found


def _name(value: str, prefix: str) -> str:
    """An enum's value in small letters; empty when it is unspecified."""
    name = value.removeprefix(prefix).lower()
    return "" if name == "unspecified" else name


def _memory_utilisation(
    attributes: fleet_pb2.StaticAttributes, health: fleet_pb2.HealthSample
) -> float | None:
    if not attributes.memory_bytes or not health.memory_available_bytes:
        return None
    return min(1.0, max(0.0, 1 - health.memory_available_bytes / attributes.memory_bytes))
