"""Whether what a learned policy gains hangs on one training: the same over several."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from controller.lab.experiments.comparisons import Comparison
from controller.lab.experiments.contenders import GREEDY, SUBJECTS, Contender
from controller.lab.experiments.statistics import Difference

_METRICS: Final = ("reward", "unloaded_reward", "waiting_seconds", "end_to_end_seconds")
_AGAINST: Final = {
    "ppo": (GREEDY.policy,),
    "ppo-set": (GREEDY.policy,),
    "ppo-set-strangers": (GREEDY.policy, "ppo-set"),
}


@dataclass(frozen=True, slots=True)
class Spread:
    """A learned policy against another in one quantity under one load, over its trainings.

    Attributes:
        policy: which was trained several times.
        against: which policy; a learned one is that of the same training.
        requests, rate: the load.
        metric: the quantity.
        seeds: of the trainings, the first one's being None.
        differences: of each training, over the paired runs.
    """

    policy: str
    against: str
    requests: int
    rate: float
    metric: str
    seeds: list[int | None]
    differences: list[Difference]


def spreads(comparisons: Sequence[Comparison], contenders: Sequence[Contender]) -> list[Spread]:
    """For each load, learned policy and quantity; none of what was trained once."""
    by_label = {each.label: each for each in contenders}
    found: dict[tuple[str, str, int, float, str], Spread] = {}
    for one in comparisons:
        ours, theirs = by_label[one.policy], by_label[one.against]
        if one.metric not in _METRICS or theirs.policy not in _AGAINST[ours.policy]:
            continue
        if theirs.policy in SUBJECTS and theirs.training_seed != ours.training_seed:
            continue
        key = (ours.policy, theirs.policy, one.requests, one.rate, one.metric)
        spread = found.setdefault(key, Spread(*key, [], []))
        spread.seeds.append(ours.training_seed)
        spread.differences.append(one.difference)
    return [spread for spread in found.values() if len(spread.seeds) > 1]
