"""What the composition puts together, without running it."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from controller.app import Parts, compose
from controller.config import Settings
from controller.domain.batch import DecisionTotals
from controller.domain.request import InferenceRequest
from controller.domain.request_record import RequestState
from controller.ids import RequestId
from controller.quality.learner import Learner
from controller.quality.predictor import QualityPredictor
from controller.request_manager.decider import Decider
from controller.routing.policy import FallbackCause
from controller.storage.base import StoreState
from controller.storage.memory import MemoryStore
from tests.fakes.records import finished_record
from tests.fakes.scraped import scraped

GOLDEN = Path(__file__).parents[2] / "golden" / "metrics.txt"

pytestmark = pytest.mark.anyio


class FailingStore(MemoryStore):
    """Its disk takes nothing."""

    @property
    def state(self) -> StoreState:
        return StoreState(4, 1, "disk_full: no space")


def composed(decider: Decider | None = None, learner: Learner | None = None) -> Parts:
    settings = Settings()
    return compose(
        settings, decider or Decider(settings.routing), learner or Learner(None), FailingStore()
    )


def test_metrics_have_the_names_types_and_labels_that_dashboards_know() -> None:
    """Changing or dropping one breaks somebody's dashboard; a new one is in docs/metrics.md."""
    described = {
        f"{metric.name} {metric.kind} {','.join(metric.labels)}".rstrip()
        for metric in composed().metrics.described
    }
    assert set(GOLDEN.read_text(encoding="utf-8").splitlines()) - described == set()


def test_one_policy_may_leave_requests_for_several_causes() -> None:
    decider = Decider(Settings().routing)
    for number, cause in enumerate(FallbackCause, 1):
        decider.fallbacks["ppo", cause] = number
    found = scraped(composed(decider).metrics)
    for number, cause in enumerate(FallbackCause, 1):
        assert found[f"policy_fallback_requests_total{{cause={cause.value},policy=ppo}}"] == number


async def test_requests_decisions_and_what_waits_are_told() -> None:
    learner = Learner(cast(QualityPredictor, SimpleNamespace(profiled_prompts=36_497)))
    for _ in range(6):
        learner.judged(finished_record(), 0.5)
    learner.dropped = 8
    parts = composed(learner=learner)
    manager = parts.manager
    manager.decisions["memetic"] = DecisionTotals(3, 24, 0.6)
    manager.records.ended.update({RequestState.COMPLETED: 7, RequestState.FAILED: 1})
    with (
        manager.admitted(InferenceRequest(RequestId("a"), "Hello")),
        manager.admitted(InferenceRequest(RequestId("b"), "Hello")),
    ):
        manager.records.add(finished_record("running elsewhere"))
        found = scraped(parts.metrics)
    expected = {
        "waiting_requests{}": 2,
        "running_requests{}": 3,
        "ended_requests_total{outcome=completed}": 7,
        "ended_requests_total{outcome=failed}": 1,
        "ended_requests_total{outcome=cancelled}": 0,
        "decision_seconds_count{policy=memetic}": 3,
        "decision_seconds_sum{policy=memetic}": 0.6,
        "decided_requests_total{policy=memetic}": 24,
        "storage_waiting{}": 4,
        "storage_is_failing{}": 1,
        "storage_lost_requests_total{}": 1,
        "learning_waiting{}": 6,
        "learning_dropped_outcomes_total{}": 8,
        "profiled_prompts{}": 36_497,
    }
    assert {key: found.get(key) for key in expected} == expected


async def test_profiled_prompts_are_unknown_without_an_embedding_model() -> None:
    assert "profiled_prompts{}" not in scraped(composed().metrics)
