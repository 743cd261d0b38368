"""A node's models as the destinations of a snapshot."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from controller.domain.answer_length import AnswerLengthCurve
from controller.domain.cluster import Calibration, Destination, InFlightWork
from controller.domain.engine_speed import decode_step
from controller.domain.node_report import ReportedModel
from controller.domain.quality_prior import quality_prior
from controller.ids import ModelName, NodeId

_DEFAULT_CHARACTERS_PER_TOKEN: Final = 4.0
"""English under most tokenizers, until the node has counted with its own."""


@dataclass(frozen=True, slots=True)
class _View:
    """A destination while nothing is in flight there, and what it was made from."""

    made_from: tuple[object, ...]
    idle: Destination


class DestinationViews:
    """One node's; made again only where something has changed, for a big fleet has a thousand."""

    def __init__(self) -> None:
        self._views: dict[ModelName, _View] = {}

    def forget(self) -> None:
        """Drop those of models that may be gone."""
        self._views.clear()

    def idle(
        self,
        node_id: NodeId,
        model: ReportedModel,
        speeds: Calibration,
        lengths: AnswerLengthCurve | None,
        extra_prompt_tokens: float,
    ) -> Destination:
        """The destination while nothing is in flight there.

        Args:
            node_id: the same at each call.
            model: as the node reports it.
            speeds: as they are believed now.
            lengths: of its answers; None while none was seen.
            extra_prompt_tokens: what its template adds to a prompt.
        """
        view = self._views.get(model.name)
        made_from = (model, speeds, lengths, extra_prompt_tokens)
        if view is not None and view.made_from == made_from:  # mostly the same objects
            return view.idle
        idle = Destination(
            node_id=node_id,
            model=model.name,
            family=model.family,
            parameters_billions=model.parameters_billions,
            quantisation=model.quantisation,
            context_tokens=model.context_tokens,
            slots=model.slots,
            has_chat_template=model.has_chat_template,
            calibration=speeds,
            price=model.price,
            mean_quality_ratio=quality_prior(
                model.parameters_billions, model.quantisation, not model.is_base_model
            ),
            quality_source="prior",
            quality_count=0,
            characters_per_token=model.characters_per_token or _DEFAULT_CHARACTERS_PER_TOKEN,
            refuses_raw_prompts=model.refuses_raw_prompts,
            supports_response_format=model.supports_response_format,
            free_slots=model.slots,
            next_slot_seconds=0.0,
            answer_lengths=lengths,
            extra_prompt_tokens=extra_prompt_tokens,
        )
        self._views[model.name] = _View(made_from, idle)
        return idle


def with_claims(idle: Destination, in_flight: Sequence[InFlightWork]) -> Destination:
    """A destination, less the slots that requests in flight at its node hold."""
    claims = [work for work in in_flight if work.model == idle.model][: idle.slots]
    if not claims:
        return idle
    free = idle.slots - len(claims)
    ends = [_remaining_seconds(idle, work) for work in claims]
    return replace(idle, free_slots=free, next_slot_seconds=0.0 if free else min(ends))


def _remaining_seconds(destination: Destination, work: InFlightWork) -> float:
    """Until a sequence ends with all slots busy."""
    speeds, slots = destination.calibration, destination.slots
    fixed, each = decode_step(speeds, slots)
    return work.prompt_tokens / speeds.prefill_tokens_per_second + work.output_tokens * (
        fixed + each * slots
    )
