"""Made-up fleets, to train a policy on that serves any."""

from typing import Final

import numpy as np

from controller.lab.training.vector_environment import World
from controller.routing.ppo.observation import Layout
from controller.routing.problem import name_key

STRANGERS: Final = range(100, 106)
"""Seeds of the fleets that a policy for any fleet is trained on."""

_LEVELS: Final = (2, 3, 4, 8, 16)
_CLASSES: Final = 6


def strange_worlds() -> list[World]:
    """The fleets of `STRANGERS`."""
    return [strange_world(seed) for seed in STRANGERS]


def strange_world(seed: int, queries: int = 600) -> World:
    """A fleet drawn at random: 3 to 7 kinds, 6 to 80 nodes, 4 to 24 models.

    Speeds follow memory bandwidth over model bytes; qualities rise with size and differ by class.
    """
    rng = np.random.default_rng(seed)
    kinds, models = int(rng.integers(3, 8)), int(rng.integers(4, 25))
    power = np.sort(np.exp(rng.uniform(np.log(3.0), np.log(250.0), kinds)))
    # As in real fleets, there are more of the slow ones.
    share = rng.dirichlet(np.ones(kinds)) / power**0.4
    nodes = rng.integers(max(kinds, 6), 81)
    counts = np.maximum(1, np.round(share / share.sum() * nodes)).astype(np.int64)
    billions = np.exp(rng.uniform(np.log(0.25), np.log(24.0), models))
    bits = rng.choice(_LEVELS, models, p=(0.1, 0.1, 0.45, 0.25, 0.1))
    gigabytes = billions * bits / 8.0
    room = power * rng.uniform(0.1, 0.6, kinds)
    hosted = (gigabytes[:, None] <= np.maximum(room, 0.5)) & (rng.random((models, kinds)) < 0.85)
    hosted[:, -1] |= ~hosted.any(axis=1)  # every model is somewhere
    for kind in np.flatnonzero(~hosted.any(axis=0)):
        hosted[int(np.argmin(gigabytes)), kind] = True
    is_cloud = rng.random(kinds) < 0.3
    return _world(
        rng,
        queries,
        names=[f"model-{index}" for index in range(models)],
        billions=billions,
        bits=bits,
        choice=np.arange(models),
        level=np.zeros(models, dtype=np.int64),
        hosted=hosted,
        counts=counts,
        slots=rng.choice((1, 1, 2, 4), kinds),
        bandwidth=power,
        prefill=power * rng.uniform(4.0, 15.0, kinds),
        watts=power**0.7 * rng.uniform(1.5, 5.0, kinds),
        usd=np.where(is_cloud, rng.uniform(0.05, 2.0, kinds), 0.0) / 3600.0,
        prefix=f"stranger-{seed}",
    )


def _world(
    rng: np.random.Generator,
    queries: int,
    *,
    names: list[str],
    billions: np.ndarray,
    bits: np.ndarray,
    choice: np.ndarray,
    level: np.ndarray,
    hosted: np.ndarray,
    counts: np.ndarray,
    slots: np.ndarray,
    bandwidth: np.ndarray,
    prefill: np.ndarray,
    watts: np.ndarray,
    usd: np.ndarray,
    prefix: str,
) -> World:
    kind_of_node = np.repeat(np.arange(counts.size), counts)
    layout = Layout(
        model_keys=np.array([name_key(name) for name in names], dtype=np.int64),
        node_keys=np.array(
            [name_key(f"{prefix}-{index}") for index in range(kind_of_node.size)], dtype=np.int64
        ),
        kind_of_node=kind_of_node,
        choice_of_model=choice.astype(np.int64),
        level_of_model=level.astype(np.int64),
        deployed=hosted[:, kind_of_node],
    )
    # Quality: a logistic curve in log size, less at few bits, with each model's own strengths.
    ability = 0.55 * np.log(billions) - 0.9 - 0.5 * np.maximum(0.0, 4.0 - bits)
    ability = ability + rng.normal(0.0, 0.25, ability.size)
    strength = rng.normal(0.0, 0.5, (_CLASSES, ability.size))
    ease = rng.normal(0.6, 0.5, _CLASSES)
    table = 1.0 / (1.0 + np.exp(-(ability + strength + ease[:, None])))  # [classes, M]
    of_class = rng.integers(0, _CLASSES, queries)
    sure = rng.uniform(0.6, 1.0, queries)
    mixture = np.full((queries, _CLASSES), 1.0) * ((1.0 - sure) / (_CLASSES - 1))[:, None]
    mixture[np.arange(queries), of_class] = sure
    prompt = np.exp(rng.normal(4.3, 0.6, queries))
    answer = np.exp(rng.normal(4.2, 0.6, queries))
    wordy = np.exp(rng.normal(0.0, 0.25, ability.size))
    gigabytes = billions * np.maximum(bits, 2) / 8.0 + 0.15
    prefill_seconds = prompt[:, None, None] * billions[:, None] / prefill
    decode_seconds = (answer[:, None] * wordy)[:, :, None] * gigabytes[:, None] / bandwidth
    seconds = np.where(hosted, 0.05 + prefill_seconds + decode_seconds, np.inf)
    return World(
        layout,
        quality=mixture @ table,
        correct=(rng.random((queries, ability.size)) < table[of_class]).astype(np.float64),
        seconds=seconds,
        slots=slots.astype(np.int64),
        watts=watts,
        usd_per_second=usd,
        noise=0.35,
        parameters_billions=billions,
    )
