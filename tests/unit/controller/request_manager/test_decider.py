"""The decider around policies that keep their contract, and around some that do not."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from controller.config import RoutingSettings
from controller.domain.batch import Weights
from controller.domain.cluster import ClusterSnapshot
from controller.domain.policy_choice import KeptChoice, PolicyChoice
from controller.domain.request import InferenceRequest
from controller.errors import InvalidRequestError, NoDestinationError, UnknownPolicyError
from controller.ids import ModelName, NodeId, RequestId
from controller.profiler.state import ProfilerState
from controller.request_manager import decider as decider_module
from controller.request_manager.decider import FALLBACK_POLICY, Decider
from controller.request_manager.refusals import refusal_text
from controller.routing.policies import policy_named
from controller.routing.policy import (
    UNASSIGNED,
    Budget,
    Decision,
    FallbackCause,
    RoutingPolicy,
)
from controller.routing.ppo.artifact import FindArtifact, no_artifact
from controller.routing.problem import RoutingProblem
from tests.fakes.reports import hello, join, reported_model

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def fleet(*names: str) -> ClusterSnapshot:
    profiler = ProfilerState(10.0)
    for name in names:
        join(profiler, 0.0, hello(name, (reported_model(f"model-{name}"),)))
    return profiler.snapshot(0.0)


FLEET = fleet("a", "b", "c")
BATCH = [InferenceRequest(RequestId(f"r{number}"), "Hello there") for number in range(6)]


@pytest.fixture
async def decider() -> Decider:
    return Decider(RoutingSettings(policy="round-robin"))


class Scripted:
    """A policy that answers with what the test says."""

    name = "scripted"

    def __init__(self, answer: Callable[[RoutingProblem], object]) -> None:
        self._answer = answer

    def decide(self, problem: RoutingProblem, rng: np.random.Generator, budget: Budget) -> Decision:
        return Decision(np.asarray(self._answer(problem)), None)  # type: ignore[arg-type]


def use(monkeypatch: pytest.MonkeyPatch, policy: object) -> None:
    """Let the name "scripted" mean this policy."""

    def named(name: str, find: FindArtifact = no_artifact) -> RoutingPolicy:
        return policy if name == "scripted" else policy_named(name)  # type: ignore[return-value]

    monkeypatch.setattr(decider_module, "policy_named", named)


# -- decisions -------------------------------------------------------------------------------------


async def test_every_request_gets_its_placement_with_every_other_destination(
    decider: Decider,
) -> None:
    decision, placements = await decider.decide(BATCH, FLEET)
    assert (decision.policy, decision.batch_size, decision.fallback_reason) == (
        "round-robin",
        6,
        "",
    )
    assert [placement.request_id for placement in placements] == [r.request_id for r in BATCH]
    for placement in placements:
        assert placement.chosen is not None
        assert placement.chosen.refusals == ()
        assert placement.chosen.finish_seconds is not None
        assert placement.chosen.finish_seconds > placement.chosen.latency_seconds
        assert placement.chosen.predicted_output_tokens > 0
        nodes = {other.node_id for other in placement.others} | {placement.chosen.node_id}
        assert nodes == {"a", "b", "c"}
    assert {p.chosen.node_id for p in placements if p.chosen} == {"a", "b", "c"}


async def test_refused_request_is_told_by_whom_and_the_others_go_on(decider: Decider) -> None:
    only_b = InferenceRequest(RequestId("only"), "Hello", model=ModelName("model-b"))
    nobody = InferenceRequest(RequestId("nobody"), "Hello", model=ModelName("model-x"))
    _, (chosen, refused) = await decider.decide([only_b, nobody], FLEET)
    assert chosen.chosen is not None
    assert chosen.chosen.node_id == "b"
    assert all(other.refused_by for other in chosen.others)
    assert refused.chosen is None
    assert [refusal_text(other) for other in refused.others] == [
        f"serves model-{name}, not model-x" for name in ("a", "b", "c")
    ]


async def test_node_that_failed_a_request_is_used_again_only_when_nothing_else_is_left(
    decider: Decider,
) -> None:
    """A retry judges every destination anew."""
    excluded: list[set[NodeId]] = [{NodeId("a"), NodeId("b")}, {NodeId(n) for n in "abc"}]
    _, (moved, stuck) = await decider.decide(BATCH[:2], FLEET, excluded)
    assert moved.chosen is not None
    assert moved.chosen.node_id == "c"
    assert {refusal_text(other) for other in moved.others} == {"has failed this request before"}
    assert stuck.chosen is not None


async def test_fleet_without_any_model_is_no_destination(decider: Decider) -> None:
    with pytest.raises(NoDestinationError, match="start an agent"):
        await decider.decide(BATCH, fleet())


async def test_later_decisions_do_not_depend_on_dry_runs() -> None:
    async def nodes_chosen(dry_runs: int) -> list[str]:
        decider = Decider(RoutingSettings(policy="round-robin", seed=3))
        found: list[str] = []
        for _ in range(6):
            for _ in range(dry_runs):
                await decider.dry_run(BATCH, FLEET, None, None)
            _, placements = await decider.decide(BATCH[:1], FLEET)
            found += [placement.chosen.node_id for placement in placements if placement.chosen]
        return found

    alone = await nodes_chosen(0)
    assert len(set(alone)) > 1
    assert await nodes_chosen(1) == alone
    assert await nodes_chosen(3) == alone


async def test_same_dry_run_gives_the_same_answer(decider: Decider) -> None:
    answers = [await decider.dry_run(BATCH, FLEET, "random", None) for _ in range(3)]
    chosen = [[p.chosen.node_id for p in placements if p.chosen] for _, placements in answers]
    assert chosen[0] == chosen[1] == chosen[2]


async def test_dry_run_with_another_policy_and_weights_changes_nothing(decider: Decider) -> None:
    before = decider.choice
    decision, _ = await decider.dry_run(BATCH, FLEET, "least-loaded", Weights(0, 0, 0, 1))
    assert (decision.policy, decision.weights) == ("least-loaded", Weights(0, 0, 0, 1))
    assert decider.choice == before
    with pytest.raises(UnknownPolicyError):
        await decider.dry_run(BATCH, FLEET, "no-such", None)


async def test_same_seed_gives_the_same_decisions() -> None:
    found = []
    for _ in range(2):
        made = Decider(RoutingSettings(policy="random", seed=5))
        _, placements = await made.decide(BATCH, FLEET)
        found.append([p.chosen.node_id for p in placements if p.chosen])
    assert found[0] == found[1]


# -- policies that fail ----------------------------------------------------------------------------


def beyond(problem: RoutingProblem) -> list[int]:
    return [problem.n_destinations] * problem.n_requests


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda problem: [0], "shape"),
        (beyond, "outside the destinations"),
        (lambda problem: [-2] * problem.n_requests, "outside the destinations"),
        (lambda problem: [UNASSIGNED] * problem.n_requests, "was sent nowhere"),
        (lambda problem: 1 / 0, "ZeroDivisionError"),
    ],
    ids=["wrong shape", "beyond", "negative", "nowhere", "raises"],
)
async def test_batch_of_a_policy_that_fails_goes_to_the_least_loaded(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[RoutingProblem], object], reason: str
) -> None:
    """The decision says so."""
    use(monkeypatch, Scripted(answer))
    decider = Decider(RoutingSettings(policy="scripted"))
    decision, placements = await decider.decide(BATCH, FLEET)
    assert decision.policy == FALLBACK_POLICY
    assert reason in decision.fallback_reason
    assert decision.lower_bound is None
    assert all(placement.chosen for placement in placements)
    assert decider.choice.policy == "scripted"
    assert decider.fallbacks == {("scripted", FallbackCause.FAILED): len(BATCH)}


async def test_fall_backs_of_live_batches_are_counted_and_those_of_dry_runs_are_not() -> None:
    decider = Decider(RoutingSettings(policy="ppo"))
    await decider.decide(BATCH, FLEET)
    await decider.decide(BATCH[:2], FLEET)
    found, _ = await decider.dry_run(BATCH, FLEET, "ppo-set", None)
    assert "edge-controller lab train ppo-set" in found.fallback_reason
    decider.choose("greedy-reward", None, None)
    await decider.decide(BATCH, FLEET)
    assert decider.fallbacks == {("ppo", FallbackCause.NO_ARTIFACT): len(BATCH) + 2}


async def test_assignment_that_breaks_a_constraint_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, Scripted(lambda problem: [0] * problem.n_requests))
    decider = Decider(RoutingSettings(policy="scripted"))
    picky = InferenceRequest(RequestId("picky"), "Hello", model=ModelName("model-b"))
    decision, (placement,) = await decider.decide([picky], FLEET)
    assert "infeasible" in decision.fallback_reason
    assert placement.chosen is not None
    assert placement.chosen.node_id == "b"


async def test_policy_that_never_answers_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread cannot be stopped, so the next batch gets another."""
    monkeypatch.setattr(decider_module, "_OVERRUN_SECONDS", 0.05)
    is_over = threading.Event()
    asked: list[int] = []

    def never(problem: RoutingProblem) -> list[int]:
        asked.append(problem.n_requests)
        if len(asked) == 1:
            is_over.wait(30.0)
        return [0] * problem.n_requests

    use(monkeypatch, Scripted(never))
    decider = Decider(RoutingSettings(policy="scripted", budget_seconds=0.001))
    try:
        decision, _ = await decider.decide(BATCH, FLEET)
        assert decision.policy == FALLBACK_POLICY
        assert "did not answer within" in decision.fallback_reason
        assert decider.fallbacks == {("scripted", FallbackCause.TOO_LATE): len(BATCH)}
        decision, _ = await decider.decide(BATCH, FLEET)
        assert (decision.policy, decision.fallback_reason) == ("scripted", "")
        # What is left behind must not keep a stopped controller alive.
        left = [thread for thread in threading.enumerate() if thread.name == "policy"]
        assert left
        assert all(thread.daemon for thread in left)
    finally:
        is_over.set()


# -- the choice ------------------------------------------------------------------------------------


async def test_choice_changes_what_is_given_and_nothing_else(decider: Decider) -> None:
    before = decider.choice
    assert decider.choose("least-loaded", None, None).policy == "least-loaded"
    assert decider.choice.weights == before.weights
    decider.choose(None, Weights(1, 0, 0, 0), None)
    assert decider.choice.policy == "least-loaded"
    assert decider.choose(None, None, "minmax").normalisation == "minmax"
    assert decider.choice.weights == Weights(1, 0, 0, 0)
    decision, _ = await decider.decide(BATCH, FLEET)
    assert (decision.policy, decision.normalisation) == ("least-loaded", "minmax")


async def test_wrong_choice_is_refused_whole(decider: Decider) -> None:
    before = decider.choice
    with pytest.raises(UnknownPolicyError, match="Did you mean 'least-loaded'"):
        decider.choose("least_loaded", Weights(1, 0, 0, 0), "minmax")
    with pytest.raises(InvalidRequestError, match="did you mean 'minmax'"):
        decider.choose("least-loaded", Weights(1, 0, 0, 0), "min-max")
    assert decider.choice == before
    decision, _ = await decider.decide(BATCH, FLEET)
    assert decision.policy == "round-robin"


async def test_start_with_an_unknown_policy_is_refused() -> None:
    with pytest.raises(UnknownPolicyError):
        Decider(RoutingSettings(policy="no-such"))


# -- the policy over restarts ----------------------------------------------------------------------


class Kept:
    """What is kept of an operator's choice."""

    def __init__(self) -> None:
        self.choice: KeptChoice | None = None

    def __call__(self, choice: KeptChoice | None) -> None:
        self.choice = choice

    def restarted(self, **settings: object) -> Decider:
        made = RoutingSettings(**{"policy": "round-robin", **settings})  # type: ignore[arg-type]
        return Decider(made, kept=self.choice, keep=self)


async def test_choice_of_an_operator_holds_over_a_restart() -> None:
    kept = Kept()
    assert kept.restarted().is_configured
    chosen = kept.restarted().choose("least-loaded", Weights.scaled(1, 0, 0, 3), "minmax")
    again = kept.restarted()
    assert (again.choice, again.is_configured) == (chosen, False)
    decision, _ = await again.decide(BATCH, FLEET)
    assert decision.policy == "least-loaded"


@pytest.mark.parametrize(
    "changed",
    [{"policy": "random"}, {"weights": (1.0, 0.0, 0.0, 0.0)}, {"normalisation": "minmax"}],
)
async def test_settings_that_have_changed_win_over_an_earlier_choice(
    changed: dict[str, object],
) -> None:
    kept = Kept()
    kept.restarted().choose("least-loaded", None, None)
    made = kept.restarted(**changed)
    assert made.is_configured
    assert made.choice == kept.restarted(**changed).choice
    assert kept.choice is None, "and the choice is gone for good"
    assert kept.restarted().choice.policy == "round-robin"


async def test_choice_that_is_taken_back_is_not_kept() -> None:
    kept = Kept()
    decider = kept.restarted()
    decider.choose("least-loaded", None, None)
    decider.choose("round-robin", None, None)
    assert kept.choice is None


async def test_chosen_policy_that_is_no_longer_installed_gives_way_to_the_settings() -> None:
    kept = Kept()
    configured = kept.restarted().choice
    kept.choice = KeptChoice(PolicyChoice("gone", Weights(), "payoff"), configured)
    assert kept.restarted().choice == configured
    assert kept.choice is None
