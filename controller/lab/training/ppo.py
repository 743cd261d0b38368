"""Proximal policy optimisation of the routing policies, from the networks to the checkpoints.

Three architectures learn with the same loop: `factorised` is DRLM's, with three heads each
conditioned on the earlier choices; `flat` has one softmax over all (model, node) pairs; `set`
scores every candidate with shared weights. `controller.routing.ppo.network` serves them.

Sources: Schulman et al., Proximal Policy Optimization Algorithms, for the objective; DRLM for the
hyperparameters; Huang and Ontanon, A Closer Look at Invalid Action Masking, for why the masks of
the rollout are kept and applied again in the update.
"""

import csv
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from controller.lab.training.vector_environment import Traffic, VectorEnvironment, World
from controller.routing.ppo.network import MASKED
from controller.routing.ppo.observation import (
    CANDIDATE_FEATURES,
    Layout,
    candidate_features,
    vector_size,
)
from controller.routing.problem import FloatArray

Architecture: TypeAlias = Literal["factorised", "flat", "set"]

ENCODER: Final = 128
"""Units of each of the encoder's two layers (DRLM)."""

SET_HIDDEN: Final = 64


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """What a training run does; the defaults are DRLM's where it gives any.

    Attributes:
        episodes: in all; each is one simulation of `requests` queries from empty queues.
        environments: simulations that step together; a rollout is one episode of each.
        learning_rate: of Adam with epsilon 1e-5; falls linearly to a tenth.
        gae: lambda of the generalised advantage estimate.
        entropy: its coefficient; falls linearly to a tenth.
        value: coefficient of the value loss.
        epochs, minibatches: passes over a rollout, and updates a pass.
        max_gradient: norm to which gradients are cut.
        target_divergence: a rollout's remaining epochs are left out above 1.5 times this.
        waiting_weight: of log(1 + seconds really waited), taken off the reward that is learned
            from: DRLM's reward hardly feels a queue while some other node is far slower.
        reward_gain: how strongly the one-step reward enters the logits at first: learning starts
            at a soft greedy-reward policy. 0 keeps it out for good, as DRLM does.
        seed: of everything random.
    """

    architecture: Architecture = "factorised"
    episodes: int = 1000
    requests: int = 100
    environments: int = 16
    learning_rate: float = 3e-4
    discount: float = 0.95
    gae: float = 0.95
    clip: float = 0.2
    entropy: float = 0.02
    value: float = 0.5
    epochs: int = 6
    minibatches: int = 4
    max_gradient: float = 0.5
    target_divergence: float = 0.02
    waiting_weight: float = 0.0
    reward_gain: float = 30.0
    seed: int = 0

    def __post_init__(self) -> None:
        least = min(self.episodes, self.requests, self.environments, self.epochs, self.minibatches)
        if least < 1:
            raise ValueError("episodes, requests, environments, epochs, minibatches: at least 1")
        if not 0.0 <= self.discount <= 1.0 or not 0.0 <= self.gae <= 1.0:
            raise ValueError("discount and gae lie between 0 and 1")


# -- the math -------------------------------------------------------------------------------------


def use_one_thread() -> None:
    """Let torch compute in this thread alone, from now on in the whole process.

    The layers are small: a second thread costs more in waiting than it saves.
    """
    torch.set_num_threads(1)


def generalised_advantages(
    rewards: FloatArray, values: FloatArray, discount: float, gae: float
) -> FloatArray:
    """Generalised advantage estimates, float64[T, B].

    A_t = delta_t + discount * gae * A_{t+1}, delta_t = r_t + discount * V_{t+1} - V_t. An episode
    here ends because its queries are used up, not because the fleet does, so the last value is
    bootstrapped.

    Args:
        rewards: float64[T, B].
        values: float64[T + 1, B].
    """
    advantages = np.zeros_like(rewards)
    carried = np.zeros(rewards.shape[1])
    for t in range(rewards.shape[0] - 1, -1, -1):
        delta = rewards[t] + discount * values[t + 1] - values[t]
        carried = delta + discount * gae * carried
        advantages[t] = carried
    return advantages


def masked_log_probabilities(logits: Tensor, mask: Tensor) -> Tensor:
    """Log softmax over the unmasked entries of the last axis; about `MASKED` where masked."""
    return torch.log_softmax(torch.where(mask, logits, torch.full_like(logits, MASKED)), dim=-1)


def masked_entropy(log_probabilities: Tensor, mask: Tensor) -> Tensor:
    """Entropy over the unmasked entries of the last axis, nats."""
    terms = log_probabilities.exp() * log_probabilities
    return -torch.where(mask, terms, torch.zeros_like(terms)).sum(dim=-1)


def clipped_policy_loss(
    log_probability: Tensor, old_log_probability: Tensor, advantages: Tensor, clip: float
) -> Tensor:
    """-E[min(rho A, clip(rho, 1 - eps, 1 + eps) A)], rho the ratio of the probabilities."""
    ratio = (log_probability - old_log_probability).exp()
    cut = ratio.clamp(1.0 - clip, 1.0 + clip)
    return -torch.minimum(ratio * advantages, cut * advantages).mean()


def explained_variance(predicted: FloatArray, found: FloatArray) -> float:
    """1 - Var(found - predicted) / Var(found): 1 is perfect, 0 as good as the mean."""
    variance = float(found.var())
    return 1.0 - float((found - predicted).var()) / variance if variance > 0.0 else 0.0


# -- the networks ---------------------------------------------------------------------------------

Observation: TypeAlias = dict[str, Tensor]


def _layer(inputs: int, outputs: int, gain: float) -> nn.Linear:
    """Orthogonal weights and zero bias; the usual gains are in the implementation notes of PPO."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class _Normalised(nn.Module):
    """Inputs of trained mean and deviation 1, cut at five deviations."""

    input_mean: Tensor
    input_deviation: Tensor

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.register_buffer("input_mean", torch.zeros(inputs))
        self.register_buffer("input_deviation", torch.ones(inputs))

    def standard(self, values: Tensor) -> Tensor:
        return ((values - self.input_mean) / self.input_deviation).clamp(-5.0, 5.0)

    def normalise_by(self, sample: Tensor) -> None:
        """Set mean and deviation from float[samples, inputs]."""
        self.input_mean.copy_(sample.mean(dim=0))
        self.input_deviation.copy_(sample.std(dim=0).clamp_min(0.01))


class SetNetwork(_Normalised):
    """Scores candidates with shared weights; any number of nodes and models."""

    def __init__(self, reward_gain: float) -> None:
        super().__init__(len(CANDIDATE_FEATURES))
        root, hidden = 2**0.5, SET_HIDDEN
        self.candidate = nn.Sequential(
            _layer(len(CANDIDATE_FEATURES), hidden, root),
            nn.ReLU(),
            _layer(hidden, hidden, root),
            nn.ReLU(),
        )
        self.context = _layer(2 * hidden, hidden, root)
        self.score_candidate = _layer(hidden, hidden, root)
        self.score_context = _layer(hidden, hidden, root)
        self.score = _layer(hidden, 1, 0.01)
        self.critic = _layer(hidden, 1, 1.0)
        self.reward_gain = nn.Parameter(torch.tensor(reward_gain), requires_grad=reward_gain > 0)

    def logits(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """float[B, P] and the value, float[B]."""
        mask = observation["mask"]
        hidden = self.candidate(self.standard(observation["features"]))
        there = mask.unsqueeze(-1)
        hidden = hidden * there
        mean = hidden.sum(dim=1) / mask.sum(dim=1, keepdim=True)
        context = torch.relu(self.context(torch.cat([mean, hidden.amax(dim=1)], dim=1)))
        scored = torch.relu(self.score_candidate(hidden) + self.score_context(context).unsqueeze(1))
        logits = self.score(scored).squeeze(-1) + self.reward_gain * observation["reward"]
        return logits, self.critic(context).squeeze(-1)

    def act(self, observation: Observation, noise: Callable[[Tensor], Tensor]) -> Tensor:
        """int64[B, 1]; `noise` turns log probabilities into what the greatest of is drawn."""
        logits, _ = self.logits(observation)
        drawn = noise(masked_log_probabilities(logits, observation["mask"]))
        return torch.where(observation["mask"], drawn, -torch.inf).argmax(dim=1, keepdim=True)

    def judge(self, observation: Observation, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log probability of the action, entropy and value, each float[B]."""
        logits, value = self.logits(observation)
        logs = masked_log_probabilities(logits, observation["mask"])
        entropy = masked_entropy(logs, observation["mask"])
        return logs.gather(1, action).squeeze(1), entropy, value


class _Encoded(_Normalised):
    def __init__(self, layout: Layout, reward_gain: float) -> None:
        super().__init__(vector_size(layout))
        root = 2**0.5
        self.encoder = nn.Sequential(
            _layer(vector_size(layout), ENCODER, root),
            nn.Tanh(),
            _layer(ENCODER, ENCODER, root),
            nn.Tanh(),
        )
        self.critic = _layer(ENCODER, 1, 1.0)
        self.reward_gains = nn.Parameter(
            torch.full((3,), reward_gain), requires_grad=reward_gain > 0
        )


class FlatNetwork(_Encoded):
    """One softmax over every (model, node) pair, for comparison."""

    def __init__(self, layout: Layout, reward_gain: float) -> None:
        super().__init__(layout, reward_gain)
        self.pair = _layer(ENCODER, layout.deployed.size, 0.01)

    def _logs(self, observation: Observation) -> tuple[Tensor, Tensor, Tensor]:
        encoded = self.encoder(self.standard(observation["vector"]))
        mask = observation["mask"].flatten(1)
        logits = self.pair(encoded) + self.reward_gains[0] * observation["reward"].flatten(1)
        return masked_log_probabilities(logits, mask), mask, self.critic(encoded).squeeze(-1)

    def act(self, observation: Observation, noise: Callable[[Tensor], Tensor]) -> Tensor:
        """int64[B, 2]; model and node."""
        logs, mask, _ = self._logs(observation)
        pair = torch.where(mask, noise(logs), -torch.inf).argmax(dim=1)
        nodes = observation["mask"].shape[2]
        return torch.stack([pair // nodes, pair % nodes], dim=1)

    def judge(self, observation: Observation, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log probability of the action, entropy and value, each float[B]."""
        logs, mask, value = self._logs(observation)
        pair = action[:, 0] * observation["mask"].shape[2] + action[:, 1]
        return logs.gather(1, pair[:, None]).squeeze(1), masked_entropy(logs, mask), value


class FactorisedNetwork(_Encoded):
    """DRLM's: pi(f, p) pi(z | f, p) pi(e | f, p, z) over one encoder.

    Ours: the node's head adds a pointer, one small network over each node's own numbers, so that
    what is learned of one node holds for all.
    """

    table: Tensor
    kind_of_node: Tensor
    choice_of_model: Tensor
    level_of_model: Tensor

    def __init__(self, layout: Layout, reward_gain: float) -> None:
        super().__init__(layout, reward_gain)
        self.choices, self.levels = layout.choices, layout.levels
        self.choice = _layer(ENCODER, self.choices, 0.01)
        self.level = _layer(ENCODER + self.choices, self.levels, 0.01)
        self.node = _layer(ENCODER + self.choices + self.levels, int(layout.node_keys.size), 0.01)
        self.pointer = nn.Sequential(_layer(4, 32, 1.0), nn.Tanh(), _layer(32, 1, 0.01))
        for name, values in (
            ("table", layout.model_table),
            ("kind_of_node", layout.kind_of_node),
            ("choice_of_model", layout.choice_of_model),
            ("level_of_model", layout.level_of_model),
        ):
            self.register_buffer(name, torch.as_tensor(values), persistent=False)

    def _choices(self, observation: Observation) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Encoded state, allowed bool[B, choices, levels], best rewards there, choice logits."""
        encoded = self.encoder(self.standard(observation["vector"]))
        mask = observation["mask"]
        servable = mask.any(dim=2)
        best = torch.where(mask, observation["reward"], -1.0).amax(dim=2)
        held = self.table >= 0
        allowed = servable[:, self.table.clamp_min(0)] & held
        reward = torch.where(allowed, best[:, self.table.clamp_min(0)], -1.0)
        logits = self.choice(encoded) + self.reward_gains[0] * reward.amax(dim=2)
        return encoded, allowed, reward, logits

    def _levels(
        self, encoded: Tensor, allowed: Tensor, reward: Tensor, choice: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        each = torch.arange(choice.shape[0])
        one = nn.functional.one_hot(choice, self.choices).to(encoded.dtype)
        logits = self.level(torch.cat([encoded, one], dim=1))
        return one, logits + self.reward_gains[1] * reward[each, choice], allowed[each, choice]

    def _nodes(
        self, encoded: Tensor, one: Tensor, level: Tensor, model: Tensor, observation: Observation
    ) -> tuple[Tensor, Tensor]:
        each = torch.arange(model.shape[0])
        other = nn.functional.one_hot(level, self.levels).to(encoded.dtype)
        reward = observation["reward"][each, model]
        pointed = torch.cat(
            [
                observation["node"],
                observation["log_seconds"][each, model][:, self.kind_of_node].unsqueeze(-1),
                reward.unsqueeze(-1),
            ],
            dim=2,
        )
        logits = self.node(torch.cat([encoded, one, other], dim=1))
        logits = logits + self.pointer(pointed).squeeze(-1) + self.reward_gains[2] * reward
        return logits, observation["mask"][each, model]

    def act(self, observation: Observation, noise: Callable[[Tensor], Tensor]) -> Tensor:
        """int64[B, 2]; model and node."""

        def draw(logits: Tensor, mask: Tensor) -> Tensor:
            drawn = noise(masked_log_probabilities(logits, mask))
            return torch.where(mask, drawn, -torch.inf).argmax(dim=1)

        encoded, allowed, reward, logits = self._choices(observation)
        choice = draw(logits, allowed.any(dim=2))
        one, logits, mask = self._levels(encoded, allowed, reward, choice)
        level = draw(logits, mask)
        model = self.table[choice, level]
        logits, mask = self._nodes(encoded, one, level, model, observation)
        return torch.stack([model, draw(logits, mask)], dim=1)

    def judge(self, observation: Observation, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log probability (the sum of the heads'), entropy on the path taken, value."""
        encoded, allowed, reward, logits = self._choices(observation)
        model, node = action[:, 0], action[:, 1]
        choice, level = self.choice_of_model[model], self.level_of_model[model]
        total, entropy = torch.zeros(model.shape[0]), torch.zeros(model.shape[0])
        parts = [(logits, allowed.any(dim=2), choice)]
        one, logits, mask = self._levels(encoded, allowed, reward, choice)
        parts.append((logits, mask, level))
        parts.append((*self._nodes(encoded, one, level, model, observation), node))
        for logits, mask, chosen in parts:
            logs = masked_log_probabilities(logits, mask)
            total = total + logs.gather(1, chosen[:, None]).squeeze(1)
            entropy = entropy + masked_entropy(logs, mask)
        return total, entropy, self.critic(encoded).squeeze(-1)


Network: TypeAlias = SetNetwork | FlatNetwork | FactorisedNetwork

_Target: TypeAlias = Callable[[Any], tuple[Any, Any, Any]]
"""From the actions of one environment to models, nodes and one-step rewards, each [B]."""


# -- the loop -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Curve:
    """One rollout of a training run; the columns of its CSV file."""

    episodes: int
    reward: float
    quality: float
    waiting_seconds: float
    policy_loss: float
    value_loss: float
    entropy: float
    divergence: float
    clipped_ratio: float
    explained_variance: float


class Trainer:
    """A training run that can be stopped after any rollout and goes on exactly there.

    Args:
        worlds: fleets to train on; more than one only for `set`. The simulations are shared out.
        traffic: what the episodes are like.

    Raises:
        ValueError: a factorised or flat policy was to learn more than one fleet.
    """

    def __init__(
        self,
        worlds: Sequence[World],
        settings: TrainingSettings,
        traffic: Traffic | None = None,
    ) -> None:
        if settings.architecture != "set" and len(worlds) != 1:
            raise ValueError(f"a {settings.architecture} policy learns one fleet, not several")
        self.settings, self.layout = settings, worlds[0].layout
        self.traffic = traffic or Traffic()
        seeds = np.random.SeedSequence(settings.seed).spawn(len(worlds) + 1)
        self._rng = np.random.default_rng(seeds[0])
        shares = np.full(len(worlds), settings.environments // len(worlds))
        shares[: settings.environments % len(worlds)] += 1
        self._environments = [
            VectorEnvironment(world, int(share), np.random.default_rng(seed), self.traffic)
            for world, share, seed in zip(worlds, shares, seeds[1:], strict=True)
            if share
        ]
        torch.manual_seed(settings.seed)
        self.network: Network
        if settings.architecture == "set":
            self.network = SetNetwork(settings.reward_gain)
        elif settings.architecture == "flat":
            self.network = FlatNetwork(self.layout, settings.reward_gain)
        else:
            self.network = FactorisedNetwork(self.layout, settings.reward_gain)
        learned = [part for part in self.network.parameters() if part.requires_grad]
        self._optimiser = torch.optim.Adam(learned, lr=settings.learning_rate, eps=1e-5)
        self.curve: list[Curve] = []
        self.lowest: NDArray[np.float32] | None = None
        self.highest: NDArray[np.float32] | None = None

    @property
    def episodes(self) -> int:
        """Finished so far."""
        return self.curve[-1].episodes if self.curve else 0

    @property
    def is_finished(self) -> bool:
        """Whether all episodes are done."""
        return self.episodes >= self.settings.episodes

    def train(
        self,
        report: Callable[[Curve], None] | None = None,
        checkpoint: Path | None = None,
        curve: Path | None = None,
        every: int = 10,
    ) -> None:
        """Train to the end; files are written every so many rollouts, and at the end.

        Args:
            report: called after each rollout.
            checkpoint: to go on from.
            curve: CSV, to look at while training goes on.
            every: rollouts between two writings.

        Raises:
            OSError: a file cannot be written.
        """
        while not self.is_finished:
            point = self.advance()
            if report is not None:
                report(point)
            if len(self.curve) % every == 0:
                self._keep(checkpoint, curve)
        self._keep(checkpoint, curve)

    def _keep(self, checkpoint: Path | None, curve: Path | None) -> None:
        if checkpoint is not None:
            self.save(checkpoint)
        if curve is not None:
            self.write_curve(curve)

    def advance(self) -> Curve:
        """One rollout and its updates."""
        s = self.settings
        progress = self.episodes / s.episodes
        for group in self._optimiser.param_groups:
            group["lr"] = s.learning_rate * (1.0 - 0.9 * progress)
        for environment in self._environments:
            environment.reset()
        if not self.curve:
            self._measure_inputs()
        stored, actions, rewards, values, logs, quality, waiting = self._rollout()
        advantages = generalised_advantages(rewards, values, s.discount, s.gae)
        returns = advantages + values[:-1]
        figures = self._update(
            {name: torch.cat([step[name] for step in stored]) for name in stored[0]},
            torch.cat(actions),
            torch.cat(logs),
            torch.as_tensor(advantages.ravel(), dtype=torch.float32),
            torch.as_tensor(returns.ravel(), dtype=torch.float32),
            s.entropy * (1.0 - 0.9 * progress),
        )
        curve = Curve(
            self.episodes + s.environments,
            float(rewards.mean()),
            quality,
            waiting,
            *[*figures, explained_variance(values[:-1], returns)],
        )
        self.curve.append(curve)
        return curve

    def _rollout(
        self,
    ) -> tuple[list[Observation], list[Tensor], FloatArray, FloatArray, list[Tensor], float, float]:
        s = self.settings
        stored, actions, logs = [], [], []
        rewards, values = np.zeros((s.requests, s.environments)), []
        right, waited = 0.0, 0.0
        for t in range(s.requests):
            observation, targets = self._observe()
            with torch.no_grad():
                action = self.network.act(observation, self._gumbel)
                log, _, value = self.network.judge(observation, action)
            stored.append(observation)
            actions.append(action)
            logs.append(log)
            values.append(value.numpy().astype(np.float64))
            reward, waiting, correct = self._step(targets, action)
            rewards[t] = reward - s.waiting_weight * np.log1p(waiting)
            right += float(correct.sum())
            waited += float(waiting.sum())
        with torch.no_grad():
            observation, _ = self._observe()
            action = self.network.act(observation, lambda logs: logs)
            values.append(self.network.judge(observation, action)[2].numpy().astype(np.float64))
        steps = s.requests * s.environments
        return stored, actions, rewards, np.stack(values), logs, right / steps, waited / steps

    def _update(
        self,
        observation: Observation,
        action: Tensor,
        old_log: Tensor,
        advantages: Tensor,
        returns: Tensor,
        entropy_weight: float,
    ) -> list[float]:
        """Passes over a rollout; means of losses, entropy, divergence and the clipped share."""
        s = self.settings
        count = action.shape[0]
        found: list[list[float]] = []
        for _ in range(s.epochs):
            order = torch.as_tensor(self._rng.permutation(count))
            for part in torch.tensor_split(order, min(s.minibatches, count)):
                seen = {name: values[part] for name, values in observation.items()}
                log, entropy, value = self.network.judge(seen, action[part])
                gained = advantages[part]
                gained = (gained - gained.mean()) / (gained.std(unbiased=False) + 1e-8)
                policy_loss = clipped_policy_loss(log, old_log[part], gained, s.clip)
                value_loss = 0.5 * (value - returns[part]).square().mean()
                loss = policy_loss + s.value * value_loss - entropy_weight * entropy.mean()
                self._optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
                nn.utils.clip_grad_norm_(self.network.parameters(), s.max_gradient)
                self._optimiser.step()
                with torch.no_grad():
                    difference = log - old_log[part]
                    divergence = (difference.exp() - 1.0 - difference).mean()
                    clipped = ((difference.exp() - 1.0).abs() > s.clip).float().mean()
                parts = (policy_loss, value_loss, entropy.mean(), divergence, clipped)
                found.append([float(part.detach()) for part in parts])
            if found[-1][3] > 1.5 * s.target_divergence:
                break
        return [float(mean) for mean in np.mean(found, axis=0)]

    def _gumbel(self, log_probabilities: Tensor) -> Tensor:
        noise = self._rng.gumbel(size=tuple(log_probabilities.shape))
        return log_probabilities + torch.as_tensor(noise, dtype=torch.float32)

    def _observe(self) -> tuple[Observation, list[_Target]]:
        """The simulations' states, and what turns actions into models, nodes and rewards."""
        if self.settings.architecture != "set":
            (environment,) = self._environments
            seen = environment.layout_observation()
            self._widen(seen.vector)
            each = np.arange(environment.size)

            def of_pair(action: Any) -> tuple[Any, Any, Any]:
                return action[:, 0], action[:, 1], seen.reward[each, action[:, 0], action[:, 1]]

            names = ("vector", "mask", "reward", "node", "log_seconds")
            return {name: torch.as_tensor(getattr(seen, name)) for name in names}, [of_pair]
        most = max(environment.pairs for environment in self._environments)
        size = self.settings.environments
        features = np.zeros((size, most, len(CANDIDATE_FEATURES)), dtype=np.float32)
        rewards = np.zeros((size, most), dtype=np.float32)
        masks = np.zeros((size, most), dtype=np.bool_)
        targets: list[_Target] = []
        start = 0
        for environment in self._environments:
            rows, pairs = slice(start, start + environment.size), environment.pairs
            candidates, nodes = environment.candidates()
            feature, reward = candidate_features(candidates)
            features[rows, :pairs], rewards[rows, :pairs] = feature, reward
            masks[rows, :pairs] = candidates.mask
            targets.append(_of_candidate(environment, nodes, reward))
            start += environment.size
        self._widen(features[masks])
        return {
            "features": torch.as_tensor(features),
            "reward": torch.as_tensor(rewards),
            "mask": torch.as_tensor(masks),
        }, targets

    def _step(
        self, targets: Sequence[_Target], action: Tensor
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Act in every simulation; one-step reward, seconds waited and score, each float64[B]."""
        found, start = [], 0
        for environment, chosen_by in zip(self._environments, targets, strict=True):
            rows = slice(start, start + environment.size)
            found.append(environment.step(*chosen_by(action[rows].numpy())))
            start += environment.size
        return (
            np.concatenate([each.reward for each in found]),
            np.concatenate([each.waiting for each in found]),
            np.concatenate([each.correct for each in found]),
        )

    def _widen(self, seen: NDArray[np.float32]) -> None:
        """Take float32[samples, inputs] into the range that serving trusts."""
        low, high = seen.min(axis=0), seen.max(axis=0)
        self.lowest = low if self.lowest is None else np.minimum(self.lowest, low)
        self.highest = high if self.highest is None else np.maximum(self.highest, high)

    def _measure_inputs(self) -> None:
        """Normalise by an episode of the untrained policy.

        Fixed from then on, so that what a weight means does not move under the optimiser.
        """
        sample = []
        for _ in range(self.settings.requests):
            observation, targets = self._observe()
            if "features" in observation:
                sample.append(observation["features"][observation["mask"]])
            else:
                sample.append(observation["vector"])
            with torch.no_grad():
                self._step(targets, self.network.act(observation, self._gumbel))
        seen = torch.cat(sample)
        self.network.normalise_by(seen)
        for environment in self._environments:
            environment.reset()

    def save(self, path: Path) -> None:
        """Write a checkpoint; a crash leaves the old one or the new one, never half of it."""
        state = {
            "settings": asdict(self.settings),
            "traffic": asdict(self.traffic),
            "network": self.network.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "environments": [
                {
                    name: value if isinstance(value, str) else torch.as_tensor(value)
                    for name, value in environment.state().items()
                }
                for environment in self._environments
            ],
            "rng": json.dumps(self._rng.bit_generator.state),
            "curve": [asdict(point) for point in self.curve],
            "lowest": None if self.lowest is None else torch.as_tensor(self.lowest),
            "highest": None if self.highest is None else torch.as_tensor(self.highest),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint of a run with the same settings, traffic and worlds.

        Raises:
            ValueError: it was made with other settings or traffic; the error names them.
        """
        state = torch.load(path, weights_only=True)
        now = asdict(self.settings) | asdict(self.traffic)
        then = state["settings"] | state.get("traffic", {})
        other = sorted(name for name in now if name != "episodes" and now[name] != then.get(name))
        if other:
            raise ValueError(
                f"{path}: was made with another {', '.join(other)}; give the same, or start again "
                "in another folder"
            )
        self.network.load_state_dict(state["network"])
        self._optimiser.load_state_dict(state["optimiser"])
        for environment, saved in zip(self._environments, state["environments"], strict=True):
            environment.restore(
                {
                    name: value if isinstance(value, str) else value.numpy()
                    for name, value in saved.items()
                }
            )
        self._rng.bit_generator.state = json.loads(state["rng"])
        self.curve = [Curve(**point) for point in state["curve"]]
        self.lowest = None if state["lowest"] is None else state["lowest"].numpy()
        self.highest = None if state["highest"] is None else state["highest"].numpy()

    def write_curve(self, path: Path) -> None:
        """The curve as CSV, a row a rollout."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(Curve.__dataclass_fields__))
            writer.writeheader()
            writer.writerows(asdict(point) for point in self.curve)


def _of_candidate(environment: VectorEnvironment, nodes: Any, reward: Any) -> _Target:
    each = np.arange(environment.size)

    def of(action: Any) -> tuple[Any, Any, Any]:
        pair = action[:, 0]
        return environment.pair_model[pair], nodes[each, pair], reward[each, pair]

    return of
