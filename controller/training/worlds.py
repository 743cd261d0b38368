"""Made-up fleets: the one of DRLM's testbed, and strangers to train a general policy on."""

from typing import Final

import numpy as np

from controller.routing.ppo.observation import Layout
from controller.routing.problem import name_key
from controller.training.vector_environment import World

_TABLE_ONE: Final = (
    # family, billions, bits, kinds of nodes; DRLM, Table I
    ("gpt-oss", 20.0, (4,), "JV"),
    ("gemma2", 2.0, (4,), "NRJOV"),
    ("gemma3", 0.27, (4, 16), "NRJOV"),
    ("gemma3", 12.0, (4,), "JV"),
    ("gemma3", 1.0, (3, 4), "NRJOV"),
    ("llama3.1", 8.0, (8, 16), "JV"),
    ("llama3.2", 1.0, (4, 8), "NRJOV"),
    ("llama3.2", 3.0, (2, 3, 4), "RJOV"),
    ("qwen3", 0.6, (4, 8, 16), "JV"),
    ("qwen3", 1.7, (4,), "JV"),
    ("tinyllama", 1.1, (2, 3, 4, 8), "NRJOV"),
    ("mistral", 7.0, (8,), "JV"),
)
_KINDS: Final = {
    # nodes, slots, effective GB/s of decoding, prompt tokens/s of 1 B, watts, USD an hour
    "R": (38, 1, 4.5, 18.0, 7.0, 0.0),
    "N": (6, 1, 11.0, 90.0, 9.0, 0.0),
    "O": (2, 1, 40.0, 500.0, 15.0, 0.0),
    "J": (2, 2, 110.0, 1600.0, 50.0, 0.0),
    "V": (16, 1, 22.0, 130.0, 120.0, 0.2),
}
_LEVELS: Final = (2, 3, 4, 8, 16)
_CLASSES: Final = 6


def paper_world(seed: int = 0, queries: int = 1258) -> World:
    """DRLM's 64 nodes and 23 configurations, with made-up speeds and qualities of that order.

    Speeds follow memory bandwidth over model bytes, qualities rise with size and differ by class.
    For measured ones, use a scenario of `controller.simulator`.
    """
    rng = np.random.default_rng(seed)
    names = "RNOJV"
    models = [
        (family, size, bits, "".join(names[names.index(k)] for k in kinds))
        for family, size, levels, kinds in _TABLE_ONE
        for bits in levels
    ]
    choices = [(family, size) for family, size, _, _ in _TABLE_ONE]
    hosted = np.array([[kind in kinds for kind in names] for _, _, _, kinds in models])
    kinds = [_KINDS[kind] for kind in names]
    return _world(
        rng,
        queries,
        names=[f"{family}-{size:g}b-q{bits}" for family, size, bits, _ in models],
        billions=np.array([size for _, size, _, _ in models]),
        bits=np.array([bits for _, _, bits, _ in models]),
        choice=np.array([choices.index((family, size)) for family, size, _, _ in models]),
        level=np.array([_LEVELS.index(bits) for _, _, bits, _ in models]),
        hosted=hosted,
        counts=np.array([kind[0] for kind in kinds]),
        slots=np.array([kind[1] for kind in kinds]),
        bandwidth=np.array([kind[2] for kind in kinds]),
        prefill=np.array([kind[3] for kind in kinds]),
        watts=np.array([kind[4] for kind in kinds]),
        usd=np.array([kind[5] for kind in kinds]) / 3600.0,
        prefix="node",
    )


def strange_world(seed: int, queries: int = 600) -> World:
    """A fleet drawn at random: 3 to 7 kinds, 6 to 80 nodes, 4 to 24 models."""
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
