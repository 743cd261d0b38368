"""What DRLM's paper reports, and what a learned policy must do to have a reason: met or not."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from controller.lab.experiments.comparisons import Comparison


@dataclass(frozen=True, slots=True)
class ClaimTarget:
    """What the paper reports, or a learned policy must do to have a reason, and what was found.

    Attributes:
        claim: in words.
        wanted: bound on the relative change (`is_change`) or on the difference.
        found, low, high: with its 95 % interval.
        is_met: whether `found` keeps the bound.
        is_certain: whether the whole interval does.
    """

    claim: str
    policy: str
    against: str
    metric: str
    requests: int
    rate: float
    is_change: bool
    wanted: float
    found: float
    low: float
    high: float
    is_met: bool
    is_certain: bool


@dataclass(frozen=True, slots=True)
class PaperClaim:
    """A bound on the relative change of a quantity against another policy's."""

    claim: str
    against: str
    metric: str
    wanted: float

    def is_kept_by(self, change: float) -> bool:
        """Whether the change is at least as good."""
        better = (
            change >= self.wanted if self.metric in _HIGHER_IS_BETTER else change <= self.wanted
        )
        return bool(better)


def paper_claims() -> tuple[PaperClaim, ...]:
    """What DRLM's paper reports of its policy at 100 requests, 2 a second (its section V)."""
    return (
        PaperClaim("waiting at least 52 % lower", "optllm", "waiting_seconds", -0.52),
        PaperClaim("waiting at least 62 % lower", "routellm", "waiting_seconds", -0.62),
        PaperClaim("inference at least 19.2 % lower", "optllm", "inference_seconds", -0.192),
        PaperClaim("inference at least 38 % lower", "routellm", "inference_seconds", -0.38),
        PaperClaim("accuracy at most 8 % lower", "optllm", "quality", -0.08),
        PaperClaim("accuracy at most 8 % lower", "routellm", "quality", -0.08),
    )


_HIGHER_IS_BETTER: Final = frozenset({"quality", "reward", "unloaded_reward"})
_OWN: Final = ("ppo", "ppo-set")
_CLAIMS: Final = (
    # claim, of whom, against, metric, rates, is a relative change, wanted
    *(
        (each.claim, _OWN, each.against, each.metric, (2.0,), True, each.wanted)
        for each in paper_claims()
    ),
    ("accuracy at most 8 % lower", _OWN, "high-accuracy", "quality", (2.0,), True, -0.08),
    ("better reward", _OWN, "greedy-reward", "reward", (1.0, 2.0), False, 0.0),
    ("shorter waits", _OWN, "greedy-reward", "waiting_seconds", (1.0, 2.0), True, 0.0),
    # In absolute seconds, and on a scale that no policy can stretch.
    ("sooner answers", _OWN, "greedy-reward", "end_to_end_seconds", (1.0, 2.0), True, 0.0),
    (
        "better reward on an idle fleet's scale",
        _OWN,
        "greedy-reward",
        "unloaded_reward",
        (1.0, 2.0),
        False,
        0.0,
    ),
    (
        "reward at most 5 % lower on a fleet it has never seen",
        ("ppo-set-strangers",),
        "ppo-set",
        "reward",
        (1.0, 2.0),
        True,
        -0.05,
    ),
)


def targets_of(comparisons: Sequence[Comparison], requests: int = 100) -> list[ClaimTarget]:
    """The paper's figures at 100 requests, and what a learned policy must do better than greedy."""
    found = []
    for claim, subjects, against, metric, rates, is_change, wanted in _CLAIMS:
        for each in (one for one in comparisons if one.policy in subjects):
            if (each.against, each.metric, each.requests) != (against, metric, requests):
                continue
            if each.rate not in rates:
                continue
            d = each.difference
            value, low, high = (
                (d.change, d.change_low, d.change_high) if is_change else (d.mean, d.low, d.high)
            )
            if metric in _HIGHER_IS_BETTER:
                is_met, is_certain = value >= wanted, low >= wanted
            else:
                is_met, is_certain = value <= wanted, high <= wanted
            found.append(
                ClaimTarget(
                    claim,
                    each.policy,
                    against,
                    metric,
                    requests,
                    each.rate,
                    is_change,
                    wanted,
                    value,
                    low,
                    high,
                    is_met,
                    is_certain and not math.isnan(low),
                )
            )
    return found
