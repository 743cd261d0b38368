"""Forward passes over exported weights, in NumPy: a controller needs no torch.

`controller.lab.training.ppo` has the same networks in torch, and a test compares the two.
"""

from collections.abc import Mapping
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from controller.routing.ppo.observation import Float32Array, Layout, LayoutObservation

Weights: TypeAlias = Mapping[str, Float32Array]

MASKED: Final = -1e8
"""Logit of what may not be chosen: its probability is 0, and gradients stay finite."""


_ROWS: Final = 32
"""Rows of one product. NumPy's BLAS shares larger ones out among threads, which gains nothing here
and, on a machine that is busy otherwise, makes a decision wait for a thread that is not running."""


def dense(weights: Weights, name: str, values: Float32Array) -> Float32Array:
    """One linear layer, `name.weight` [out, in] and `name.bias` [out]."""
    transposed, bias = weights[f"{name}.weight"].T, weights[f"{name}.bias"]
    rows = values.reshape(-1, values.shape[-1])
    found = np.empty((rows.shape[0], bias.size), dtype=np.float32)
    for start in range(0, rows.shape[0], _ROWS):
        part = slice(start, start + _ROWS)
        np.matmul(rows[part], transposed, out=found[part])
    found += bias
    return found.reshape(*values.shape[:-1], bias.size)


def normalised(weights: Weights, values: Float32Array) -> Float32Array:
    """Inputs less their trained mean, over their trained deviation, cut to five deviations."""
    standard = (values - weights["input_mean"]) / weights["input_deviation"]
    return np.asarray(np.clip(standard, -5.0, 5.0), dtype=np.float32)


def set_logits(
    weights: Weights, features: Float32Array, mask: NDArray[np.bool_], reward: Float32Array
) -> Float32Array:
    """Score of each candidate, float32[B, P]; `MASKED` where masked.

    Each candidate passes the same network; the mean and the maximum over the set are everybody's
    context (Deep Sets); one-step reward times a learned gain is added, so that learning starts at
    the greedy policy.

    Args:
        weights: of a `set` artifact.
        features: float32[B, P, F].
        mask: bool[B, P]; at least one True a row.
        reward: float32[B, P].
    """
    hidden = _relu(dense(weights, "candidate.0", normalised(weights, features)))
    hidden = _relu(dense(weights, "candidate.2", hidden))  # [B, P, H]
    there = mask[:, :, None]
    mean = np.where(there, hidden, 0.0).sum(axis=1) / mask.sum(axis=1)[:, None]
    most = np.where(there, hidden, 0.0).max(axis=1)  # ReLU: nothing is below 0
    context = _relu(dense(weights, "context", np.concatenate([mean, most], axis=1)))
    scored = _relu(
        dense(weights, "score_candidate", hidden)
        + dense(weights, "score_context", context)[:, None]
    )
    logits = dense(weights, "score", scored)[..., 0] + weights["reward_gain"] * reward
    return np.asarray(np.where(mask, logits, MASKED), dtype=np.float32)


def factorised_choice(
    weights: Weights, layout: Layout, observation: LayoutObservation
) -> tuple[int, int]:
    """The likeliest (family, scale), then its likeliest quantisation, then node: (model, node).

    For one decision, B = 1. Each head is masked to what has a feasible continuation.

    Source: DRLM, Eq. 2.
    """
    encoded = encode(weights, observation.vector)
    table = layout.model_table
    best_of_model = np.where(observation.mask, observation.reward, -1.0).max(axis=2)[0]  # [M]
    servable = observation.mask[0].any(axis=1)  # [M]
    allowed = np.where(table >= 0, servable[table], False)  # [choices, levels]
    gains = weights["reward_gains"]

    reward = np.where(allowed, best_of_model[table], -1.0)
    logits = dense(weights, "choice", encoded)[0] + gains[0] * reward.max(axis=1)
    choice = int(np.argmax(np.where(allowed.any(axis=1), logits, MASKED)))

    one_choice = np.eye(layout.choices, dtype=np.float32)[[choice]]
    logits = dense(weights, "level", np.concatenate([encoded, one_choice], axis=1))[0]
    logits = logits + gains[1] * reward[choice]
    level = int(np.argmax(np.where(allowed[choice], logits, MASKED)))
    model = int(table[choice, level])

    one_level = np.eye(layout.levels, dtype=np.float32)[[level]]
    logits = dense(weights, "node", np.concatenate([encoded, one_choice, one_level], axis=1))[0]
    pointed = np.concatenate(
        [
            observation.node[0],
            observation.log_seconds[0, model][layout.kind_of_node][:, None],
            observation.reward[0, model][:, None],
        ],
        axis=1,
    )  # [N, 4]
    pointer = dense(weights, "pointer.2", np.tanh(dense(weights, "pointer.0", pointed)))[:, 0]
    logits = logits + pointer + gains[2] * observation.reward[0, model]
    return model, int(np.argmax(np.where(observation.mask[0, model], logits, MASKED)))


def flat_choice(weights: Weights, observation: LayoutObservation) -> tuple[int, int]:
    """The likeliest pair under one softmax over all (model, node) pairs; B = 1."""
    _, models, nodes = observation.mask.shape
    logits = dense(weights, "pair", encode(weights, observation.vector))[0].reshape(models, nodes)
    logits = logits + weights["reward_gains"][0] * observation.reward[0]
    best = int(np.argmax(np.where(observation.mask[0], logits, MASKED)))
    return best // nodes, best % nodes


def encode(weights: Weights, vector: Float32Array) -> Float32Array:
    """The shared encoder: two layers of 128 with tanh."""
    hidden = np.tanh(dense(weights, "encoder.0", normalised(weights, vector)))
    return np.asarray(np.tanh(dense(weights, "encoder.2", hidden)))


def _relu(values: Float32Array) -> Float32Array:
    return np.maximum(values, 0.0)
