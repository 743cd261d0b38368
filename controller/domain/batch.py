"""What was decided for a batch, with the reasons behind it."""

from dataclasses import dataclass

from controller.domain.refusal import Refusal, RefusalReason
from controller.ids import BatchId, ModelName, NodeId, RequestId


@dataclass(frozen=True, slots=True)
class Weights:
    """Of the four terms of J; not negative, sum 1 (`scaled` sees to it)."""

    quality: float = 0.25
    cost: float = 0.25
    energy: float = 0.25
    time: float = 0.25

    @classmethod
    def scaled(cls, quality: float, cost: float, energy: float, time: float) -> "Weights":
        """Weights in these proportions.

        Raises:
            ValueError: one is negative or not finite, or all are 0.
        """
        values = (quality, cost, energy, time)
        total = sum(values)
        if not all(0 <= value < float("inf") for value in (*values, total)):
            raise ValueError("weights must be finite and not negative")
        if total <= 0:
            raise ValueError("at least one weight must be above 0")
        return cls(*(value / total for value in values))

    def as_tuple(self) -> tuple[float, float, float, float]:
        """Quality, cost, energy, time."""
        return (self.quality, self.cost, self.energy, self.time)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One destination seen from one request; `refusals` say why it cannot take it.

    `prefill_seconds` is the part of `work_seconds` that reads the prompt, of which
    `predicted_prompt_tokens` are not held from an earlier turn. `latency_source` says where
    `latency_seconds` comes from when fitted predictors were asked. `quality_count` is how many
    outcomes `quality_ratio` rests on: similar prompts, or all scores of a mean; 0 for a prior.
    """

    node_id: NodeId
    model: ModelName
    quality_ratio: float
    quality_source: str
    cost_usd: float
    energy_joules: float
    work_seconds: float
    latency_seconds: float
    network_seconds: float
    predicted_output_tokens: float
    finish_seconds: float | None = None
    refusals: tuple[Refusal, ...] = ()
    predicted_prompt_tokens: float = 0.0
    prefill_seconds: float = 0.0
    latency_source: str = ""
    quality_count: int = 0

    @property
    def refused_by(self) -> frozenset[RefusalReason]:
        """Every reason why it does not take the request; empty when it could."""
        return frozenset(refusal.reason for refusal in self.refusals)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one request goes; `chosen` is None when every destination refused.

    `others` are the destinations beside it, as many as an explanation names: those that could take
    the request first, by quality. When none can, those come first that nearly could.
    `query_class` is what the classifier says of the prompt; empty without one.
    """

    request_id: RequestId
    chosen: Candidate | None
    others: tuple[Candidate, ...]
    query_class: str = ""


@dataclass(frozen=True, slots=True)
class BatchDecision:
    """The decision for one batch; raw terms and J of the chosen assignment.

    `predictors` names the fitted predictors that were asked; empty when there are none.
    """

    batch_id: BatchId
    policy: str
    weights: Weights
    normalisation: str
    quality_loss: float
    cost_usd: float
    energy_joules: float
    completion_seconds: float
    objective: float
    lower_bound: float | None
    decision_seconds: float
    batch_size: int
    fallback_reason: str = ""
    predictors: str = ""


@dataclass(frozen=True, slots=True)
class DecisionTotals:
    """Live batches that one policy has decided."""

    batches: int = 0
    requests: int = 0
    seconds: float = 0.0

    def plus(self, decision: BatchDecision) -> "DecisionTotals":
        """With one more."""
        return DecisionTotals(
            self.batches + 1,
            self.requests + decision.batch_size,
            self.seconds + decision.decision_seconds,
        )
