"""The math of the training, its networks, and a run small enough to watch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.lab.simulator.inputs import synthetic_inputs
from controller.lab.simulator.scenario_file import read_scenario
from controller.lab.training.evaluation import judge, problem_of
from controller.lab.training.export import artifact_of, export
from controller.lab.training.ppo import (
    Architecture,
    Curve,
    Trainer,
    TrainingSettings,
    clipped_policy_loss,
    explained_variance,
    generalised_advantages,
    masked_entropy,
    masked_log_probabilities,
)
from controller.lab.training.scenario_world import world_of
from controller.lab.training.vector_environment import Traffic, VectorEnvironment, World
from controller.lab.training.worlds import strange_world
from controller.request_manager.policy_files import load_policy
from controller.routing.policies import policy_named
from controller.routing.policy import Budget, FallbackCause
from controller.routing.ppo.network import factorised_choice, flat_choice, set_logits
from controller.routing.ppo.observation import candidate_features, candidates_of
from controller.routing.ppo.policy import LearnedPolicy


def drlm_world(seed: int, queries: int) -> World:
    cluster = read_scenario("drlm")
    return world_of(cluster, synthetic_inputs(cluster, seed, queries))


TINY = TrainingSettings(episodes=8, requests=12, environments=4, epochs=2, minibatches=2)
TINY_SET = replace(TINY, architecture="set")
ARCHITECTURES: tuple[Architecture, ...] = ("factorised", "flat", "set")


def tiny(architecture: Architecture, **changes: Any) -> Trainer:
    torch.set_num_threads(1)
    world = drlm_world(3, 60)
    return Trainer(
        [world],
        replace(TINY, architecture=architecture, **changes),
        Traffic(rates=(1.0, 2.0), preferences=0.3, down_ratio=0.3),
    )


def test_advantages_equal_the_discounted_sum_of_errors_and_bootstrap_the_last_value() -> None:
    rewards = np.array([[1.0], [2.0], [3.0]])
    values = np.array([[0.5], [0.25], [0.125], [4.0]])
    found = generalised_advantages(rewards, values, discount=0.9, gae=0.8)
    errors = [1.0 + 0.9 * 0.25 - 0.5, 2.0 + 0.9 * 0.125 - 0.25, 3.0 + 0.9 * 4.0 - 0.125]
    expected = [sum(0.72 ** (j - t) * errors[j] for j in range(t, 3)) for t in range(3)]
    np.testing.assert_allclose(found[:, 0], expected)


def test_full_lambda_gives_returns_less_values() -> None:
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(5, 3)), rng.normal(size=(6, 3))
    found = generalised_advantages(rewards, values, discount=0.9, gae=1.0)
    returns = sum(0.9**k * rewards[k] for k in range(5)) + 0.9**5 * values[5]
    np.testing.assert_allclose(found[0], returns - values[0])


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 12), st.integers(0, 2**32 - 1))
def test_masked_entries_have_no_probability_no_entropy_and_no_gradient(n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    mask = torch.as_tensor(rng.random((3, n)) < 0.5)
    mask[:, 0] = True
    logits = torch.tensor(rng.normal(size=(3, n)) * 5.0, requires_grad=True)
    logs = masked_log_probabilities(logits, mask)
    probabilities = logs.exp()
    assert float(probabilities[~mask].sum().detach()) == 0.0
    np.testing.assert_allclose(probabilities.sum(dim=1).detach().numpy(), 1.0, rtol=1e-6)
    entropy = masked_entropy(logs, mask)
    assert bool((entropy >= -1e-9).all())
    assert bool((entropy <= torch.log(mask.sum(dim=1).double()) + 1e-6).all())
    (entropy.sum() + logs[:, 0].sum()).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert float(logits.grad[~mask].abs().sum()) == 0.0


def test_clipped_loss_stops_rewarding_a_ratio_beyond_the_clip() -> None:
    ones = torch.ones(1)
    inside = clipped_policy_loss(torch.log(ones * 1.1), torch.zeros(1), ones, 0.2)
    outside = clipped_policy_loss(torch.log(ones * 3.0), torch.zeros(1), ones, 0.2)
    worse = clipped_policy_loss(torch.log(ones * 3.0), torch.zeros(1), -ones, 0.2)
    assert float(inside) == pytest.approx(-1.1)
    assert float(outside) == pytest.approx(-1.2)
    assert float(worse) == pytest.approx(3.0)  # the pessimistic side is not cut


def test_explained_variance_is_one_for_the_truth_and_zero_for_the_mean() -> None:
    found = np.array([1.0, 2.0, 4.0])
    assert explained_variance(found, found) == 1.0
    assert explained_variance(np.full(3, found.mean()), found) == pytest.approx(0.0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_numpy_chooses_as_torch_does(architecture: Architecture) -> None:
    trainer = tiny(architecture)
    trainer.advance()
    artifact = artifact_of(trainer, "test")
    network: Any = trainer.network
    environment = VectorEnvironment(
        trainer._environments[0].world, 1, np.random.default_rng(5), Traffic(down_ratio=0.4)
    )
    for _ in range(25):
        seen = environment.layout_observation()
        if architecture == "set":
            candidates, nodes = environment.candidates()
            features, reward = candidate_features(candidates)
            reward32 = reward.astype(np.float32)
            observation = {"features": features, "mask": candidates.mask, "reward": reward32}
            ours = set_logits(artifact.weights, features, candidates.mask, reward32)
            theirs, _ = network.logits({k: torch.as_tensor(v) for k, v in observation.items()})
            there = candidates.mask
            np.testing.assert_allclose(
                ours[there], theirs.detach().numpy()[there], rtol=1e-3, atol=1e-4
            )
            pair = int(ours[0].argmax())
            model, node = environment.pair_model[pair], nodes[0, pair]
        else:
            assert artifact.layout is not None
            names = ("vector", "mask", "reward", "node", "log_seconds")
            tensors = {name: torch.as_tensor(getattr(seen, name)) for name in names}
            theirs = network.act(tensors, lambda logs: logs).numpy()[0]
            if architecture == "flat":
                model, node = flat_choice(artifact.weights, seen)
            else:
                model, node = factorised_choice(artifact.weights, artifact.layout, seen)
            assert (model, node) == tuple(theirs)
        assert seen.mask[0, model, node]
        environment.step(np.array([model]), np.array([node]), np.zeros(1))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_resumed_training_equals_uninterrupted_training(
    architecture: Architecture, tmp_path: Path
) -> None:
    whole = tiny(architecture)
    whole.train()
    first = tiny(architecture)
    first.advance()
    first.save(tmp_path / "checkpoint.pt")
    second = tiny(architecture)
    second.load(tmp_path / "checkpoint.pt")
    second.train()
    assert second.curve == whole.curve
    for name, values in whole.network.state_dict().items():
        assert torch.equal(values, second.network.state_dict()[name]), name
    assert not list(tmp_path.glob("*.partial"))


def test_curve_can_be_read_while_training_goes_on(tmp_path: Path) -> None:
    rows: list[int] = []

    def look(curve: Curve) -> None:
        path = tmp_path / "new" / "curve.csv"
        rows.append(len(path.read_text().splitlines()) - 1 if path.exists() else 0)

    trainer = tiny("set", episodes=12)
    trainer.train(look, tmp_path / "checkpoint.pt", tmp_path / "new" / "curve.csv", every=1)
    assert rows == [0, 1, 2]
    assert len((tmp_path / "new" / "curve.csv").read_text().splitlines()) == 1 + 3
    assert (tmp_path / "checkpoint.pt").exists()


def test_checkpoint_of_other_settings_is_refused_by_name(tmp_path: Path) -> None:
    first = tiny("set")
    first.advance()
    first.save(tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match="another discount"):
        tiny("set", discount=0.5).load(tmp_path / "checkpoint.pt")
    fleets = [drlm_world(3, 60)]
    with pytest.raises(ValueError, match="another down_ratio, preferences"):
        Trainer(fleets, TINY_SET, Traffic(rates=(1.0, 2.0))).load(tmp_path / "checkpoint.pt")


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 1000), architecture=st.sampled_from(ARCHITECTURES))
def test_no_sampled_action_is_ever_masked(seed: int, architecture: Architecture) -> None:
    trainer = tiny(architecture, seed=seed, requests=3, environments=3)
    # The environment refuses a query for a node that lacks the model or is away.
    stored, actions, *_ = trainer._rollout()
    for observation, action in zip(stored, actions, strict=True):
        log, _, _ = trainer.network.judge(observation, action)
        assert bool((log > -1e4).all())


def test_training_learns_and_beats_random_by_far(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    world = drlm_world(1, 80)
    trainer = Trainer(
        [world],
        TrainingSettings(
            architecture="set", episodes=32, requests=30, environments=8, reward_gain=30.0
        ),
        Traffic(rates=(1.0, 1.0)),
    )
    trainer.train()
    export(trainer, tmp_path / "policy", "test")
    policy = LearnedPolicy("ppo-set", load_policy(tmp_path / "policy"))
    learned = judge(policy, world, 30, 1.0, 2)
    by_chance = judge(policy_named("random"), world, 30, 1.0, 2)
    assert learned.fallback_ratio < 0.5
    assert learned.reward > by_chance.reward + 0.2
    assert learned.waiting_seconds < by_chance.waiting_seconds


def test_training_without_the_greedy_start_raises_the_reward() -> None:
    torch.set_num_threads(1)
    trainer = Trainer(
        [strange_world(4, queries=80)],
        TrainingSettings(
            architecture="set",
            episodes=96,
            requests=20,
            environments=16,
            learning_rate=4e-3,
            reward_gain=0.0,
            entropy=0.005,
        ),
    )
    trainer.train()
    assert trainer.curve[-1].reward > trainer.curve[0].reward + 0.05


@pytest.mark.parametrize("architecture", ["factorised", "flat"])
def test_policy_of_a_fleet_refuses_several(architecture: Architecture) -> None:
    with pytest.raises(ValueError, match="one fleet"):
        Trainer(
            [strange_world(0, 10), strange_world(1, 10)], replace(TINY, architecture=architecture)
        )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_served_policy_takes_its_fleet_with_nodes_away_and_leaves_strangers_to_the_fall_back(
    architecture: Architecture, tmp_path: Path
) -> None:
    # Enough to have seen most of what the inputs can be.
    trainer = tiny(architecture, episodes=32, requests=30, environments=8)
    trainer.train()
    export(trainer, tmp_path / "policy", "test")
    policy = LearnedPolicy("ppo", load_policy(tmp_path / "policy"))
    world = drlm_world(3, 60)
    known = judge(policy, world, 10, 1.0, 1, down_ratio=0.3)
    assert known.fallback_ratio <= 0.05
    stranger = problem_of(
        VectorEnvironment(strange_world(5, queries=10), 1, np.random.default_rng(0))
    )
    decision = policy.decide(stranger, np.random.default_rng(0), Budget())
    if architecture != "set":
        assert "not trained on" in decision.fallback_reason
        assert decision.fallbacks == {FallbackCause.UNKNOWN_FLEET: 1}
    assert stranger.feasible[0, decision.assignment[0]]


def test_serving_sees_of_a_kind_without_nodes_what_training_saw() -> None:
    world = drlm_world(3, 60)
    trainer = tiny("factorised")
    trainer.advance()
    policy = artifact_of(trainer, "test")
    environment = VectorEnvironment(world, 1, np.random.default_rng(1))
    for kind in range(world.layout.kinds):
        environment.up[:] = world.layout.kind_of_node != kind
        seen = environment.layout_observation().vector[0]
        # Trained on nothing but this, it takes nothing else.
        served = LearnedPolicy("ppo", replace(policy, lowest=seen, highest=seen))
        decision = served.decide(problem_of(environment), np.random.default_rng(0), Budget())
        assert decision.fallback_reason == ""


def test_serving_sees_what_training_saw() -> None:
    """The shortlist of a problem has the features of the environment's candidates."""
    environment = VectorEnvironment(strange_world(2, 30), 1, np.random.default_rng(1))
    rng = np.random.default_rng(2)
    for _ in range(30):
        trained, nodes = environment.candidates()
        problem = problem_of(environment)
        served, destinations = candidates_of(problem, 0, problem.backlog_seconds)
        ours, _ = candidate_features(served)
        theirs, _ = candidate_features(trained)
        order_ours = np.lexsort(ours[0].T.round(4))
        order_theirs = np.lexsort(theirs[0].T.round(4))
        np.testing.assert_allclose(ours[0][order_ours], theirs[0][order_theirs], atol=2e-4)
        assert destinations.size == environment.pairs
        pair = int(rng.integers(environment.pairs))
        environment.step(environment.pair_model[[pair]], nodes[0, [pair]], np.zeros(1))
