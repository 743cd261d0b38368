"""From an answer's account, and its node as it was then, to a measurement."""

import time
from dataclasses import dataclass

from controller.lab.offline.graders import Grade, Key
from controller.lab.offline.measurements import Measurement
from controller.lab.offline.questions import Question
from controller.predictors.features import profile_query
from controller.quality.store import prompt_digest
from pointsman.v1 import admin_pb2, fleet_pb2, router_pb2, types_pb2


def expected_text(key: Key) -> str:
    """The right answers, a line each."""
    return "\n".join(key.expected)


@dataclass(frozen=True, slots=True)
class Asked:
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
    asked: Asked,
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
    usage, features = account.usage, profile_query(question.text)
    attributes, health = node.attributes, node.health
    model = next((m for m in node.models if m.name == account.model), fleet_pb2.ModelState())
    speeds = model.calibration if model.HasField("calibration") else None
    has_health = node.HasField("health")
    served = usage.queue_seconds + usage.prefill_seconds + usage.decode_seconds
    return Measurement(
        run_id=asked.run_id,
        kind=asked.kind,
        measured_time=time.time(),
        workload=question.workload,
        question_id=question.question_id,
        question_class=question.question_class,
        query_class=account.query_class,
        prompt=question.text,
        prompt_digest=prompt_digest(question.text).hex(),
        prompt_characters=features.prompt_characters,
        prompt_words=features.prompt_words,
        prompt_sentences=features.prompt_sentences,
        prompt_lexical_diversity_ratio=features.lexical_diversity_ratio,
        node_id=account.node_id,
        model=account.model,
        node_kind=_name(types_pb2.NodeKind.Name(attributes.kind), "NODE_KIND_"),
        hardware=attributes.hardware,
        cpu_cores=attributes.cpu_cores,
        memory_bytes=attributes.memory_bytes,
        operating_system=attributes.operating_system,
        agent_version=attributes.agent_version,
        engine_version=model.calibration.engine_version or attributes.engine_version,
        power_mode=health.power_mode,
        has_gpu=health.HasField("gpu_utilisation_ratio"),
        model_family=model.family,
        model_parameters_billions=model.parameters_billions,
        model_quantisation=model.quantisation,
        model_digest=model.digest,
        model_context_tokens=model.context_tokens,
        model_slots=model.slots,
        model_is_base=model.is_base_model,
        calibrated_prefill_tokens_per_second=speeds and speeds.prefill_tokens_per_second,
        calibrated_decode_tokens_per_second=speeds and speeds.decode_tokens_per_second,
        calibrated_saturated_tokens_per_second=speeds and speeds.saturated_decode_tokens_per_second,
        max_tokens=asked.max_tokens,
        seed=asked.seed,
        policy=account.policy,
        batch_id=account.batch_id,
        batch_requests=asked.batch_requests,
        attempts=account.attempts,
        inflight_requests=asked.inflight_requests,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
        finish_reason=_name(types_pb2.FinishReason.Name(account.finish_reason), "FINISH_REASON_"),
        window_seconds=account.window_seconds,
        network_seconds=max(0.0, account.measured_finish_seconds - served),
        queue_seconds=usage.queue_seconds,
        prefill_seconds=usage.prefill_seconds,
        decode_seconds=usage.decode_seconds,
        first_token_seconds=account.first_token_seconds,
        total_seconds=account.total_seconds,
        predicted_finish_seconds=account.predicted_finish_seconds,
        measured_finish_seconds=account.measured_finish_seconds,
        round_trip_seconds=node.round_trip_seconds if node.HasField("round_trip_seconds") else None,
        energy_joules=usage.energy_joules if usage.HasField("energy_joules") else None,
        energy_source=usage.energy_source_name
        or _name(types_pb2.PowerSource.Name(usage.energy_source), "POWER_SOURCE_")
        or "none",
        prefill_joules=usage.prefill_joules if usage.HasField("prefill_joules") else None,
        decode_joules=usage.decode_joules if usage.HasField("decode_joules") else None,
        cost_usd=account.cost_usd,
        cpu_utilisation_ratio=health.cpu_utilisation_ratio if has_health else None,
        gpu_utilisation_ratio=health.gpu_utilisation_ratio
        if health.HasField("gpu_utilisation_ratio")
        else None,
        memory_utilisation_ratio=_memory_utilisation(attributes, health) if has_health else None,
        power_watts=health.power_watts if health.HasField("power_watts") else None,
        temperature_celsius=health.temperature_celsius
        if health.HasField("temperature_celsius")
        else None,
        is_throttled=health.is_throttled if health.HasField("is_throttled") else None,
        answer=answer,
        extracted_answer=grade.extracted,
        expected_answer=expected_text(question.key),
        grader=question.key.grader.value,
        score_ratio=grade.score_ratio,
    )


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
