"""What a simulation is asked, and what is known and true of the answers.

Axes: Q queries, L classes of queries, M configurations and P placed pairs of a cluster, in the
order of `ClusterDescription.models` and `.pairs`.
"""

import hashlib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from controller.lab.simulator.cluster import ClusterDescription
from controller.lab.simulator.scenario import Scenario
from controller.routing.problem import BoolArray, FloatArray, IntArray, name_key
from controller.storage.artifacts import Artifact, ArtifactError, load_artifact, save_artifact

KIND: Final = "simulation-inputs"

HELD_OUT: Final = 0.2
"""Share of the queries that judge policies and never train anything (DRLM)."""


class InputsError(ValueError):
    """The inputs are inconsistent or cannot be read; the text says what to do."""


@dataclass(frozen=True, slots=True, eq=False)
class SimulationInputs:
    """Queries with predictions and truth.

    Attributes:
        source: where they come from, in a sentence.
        classes: L names.
        pairs: P names, configuration and device class: "gemma3-1b-z4@RP".
        query_class: int64[Q].
        class_probabilities: float64[Q, L]; rows sum to 1.
        prompt_tokens: float64[Q].
        is_held_out: bool[Q]; not seen by predictors or policies in training.
        quality: float64[Q, M]; predicted, 0 to 1.
        correct: float64[Q, M]; what the answer scores.
        answer_tokens: float64[Q, M]; expected.
        seconds: float64[Q, P]; predicted inference time at a node of the class.
        first_token_ratio: float64[P]; share of the time that has passed at the first token.
        true_seconds: float64[Q, P] or None; what inference takes, but for noise. None: `seconds`.
        noise: deviation of log(real / true_seconds).

    Raises:
        InputsError: shapes do not agree, or a value is impossible.
    """

    source: str
    classes: tuple[str, ...]
    pairs: tuple[str, ...]
    query_class: IntArray
    class_probabilities: FloatArray
    prompt_tokens: FloatArray
    is_held_out: BoolArray
    quality: FloatArray
    correct: FloatArray
    answer_tokens: FloatArray
    seconds: FloatArray
    first_token_ratio: FloatArray
    true_seconds: FloatArray | None
    noise: float

    def __post_init__(self) -> None:
        queries, models = np.shape(self.quality) if np.ndim(self.quality) == 2 else (0, 0)
        pairs, labels = len(self.pairs), len(self.classes)
        shapes = {
            "query_class": (queries,),
            "class_probabilities": (queries, labels),
            "prompt_tokens": (queries,),
            "is_held_out": (queries,),
            "correct": (queries, models),
            "answer_tokens": (queries, models),
            "seconds": (queries, pairs),
            "first_token_ratio": (pairs,),
            "true_seconds": (queries, pairs),
        }
        for name, shape in shapes.items():
            values = getattr(self, name)
            if values is not None and np.shape(values) != shape:
                raise InputsError(f"{name} has shape {np.shape(values)}; expected {shape}")
        if queries == 0:
            raise InputsError("there is no query")
        for name in ("quality", "correct", "class_probabilities", "first_token_ratio"):
            values = getattr(self, name)
            if not ((values >= 0.0) & (values <= 1.0 + 1e-9)).all():
                raise InputsError(f"{name} lies outside 0 to 1")
        for name in ("seconds", "true_seconds"):
            values = getattr(self, name)
            if values is not None and not ((values > 0.0) & np.isfinite(values)).all():
                raise InputsError(f"{name} must be finite and above 0")
        if not 0.0 <= self.noise < 5.0:
            raise InputsError(f"noise is {self.noise}; a deviation of a logarithm, 0 to 5")
        if self.query_class.min() < 0 or self.query_class.max() >= max(labels, 1):
            raise InputsError("query_class names a class that is not there")

    @property
    def queries(self) -> int:
        """Q."""
        return int(self.quality.shape[0])

    def part(self, chosen: BoolArray) -> "SimulationInputs":
        """Some of the queries, bool[Q]; `part(inputs.is_held_out)` are those to judge with.

        Raises:
            InputsError: none is chosen.
        """
        per_query = {
            name: getattr(self, name)[chosen]
            for name in (
                "query_class",
                "class_probabilities",
                "prompt_tokens",
                "is_held_out",
                "quality",
                "correct",
                "answer_tokens",
                "seconds",
            )
        }
        true = None if self.true_seconds is None else self.true_seconds[chosen]
        return replace(self, **per_query, true_seconds=true)


def pair_names(cluster: ClusterDescription) -> tuple[str, ...]:
    """The P names that inputs for this cluster must have."""
    models, devices = cluster.pairs
    return tuple(
        f"{cluster.models[m].configuration.name}@{cluster.devices[d].kind}"
        for m, d in zip(models, devices, strict=True)
    )


def group_seconds(cluster: ClusterDescription, seconds: FloatArray) -> FloatArray:
    """From device classes to groups of nodes, by their speed ratios.

    Args:
        seconds: float64[Q, P].

    Returns:
        float64[Q, M, K]; infinite where a configuration does not stand.
    """
    models, devices = cluster.pairs
    by_class = np.full((seconds.shape[0], len(cluster.models), len(cluster.devices)), np.inf)
    by_class[:, models, devices] = seconds
    device_of_group = [group.device for group in cluster.groups]
    found = by_class[:, :, device_of_group] / cluster.speed_ratios
    return np.where(cluster.hosted[None], found, np.inf)


def scenario_of(cluster: ClusterDescription, inputs: SimulationInputs) -> Scenario:
    """The cluster under these queries, as the simulator runs it.

    Raises:
        InputsError: the inputs were made for other placements.
    """
    expected = pair_names(cluster)
    if inputs.pairs != expected or inputs.quality.shape[1] != len(cluster.models):
        missing = sorted(set(expected) - set(inputs.pairs))
        raise InputsError(
            f"the inputs are not of scenario {cluster.name}: "
            + (f"no times of {', '.join(missing[:3])}" if missing else "the pairs' order differs")
            + "; make them again for this scenario"
        )
    node_of, model_of = cluster.destinations
    group = cluster.group_of_node

    def of_nodes(values: list[float]) -> FloatArray:
        return np.array(values, dtype=np.float64)[group]

    models, devices = cluster.pairs
    first = np.zeros((len(cluster.models), len(cluster.devices)))
    first[models, devices] = inputs.first_token_ratio
    slots = np.array([each.slots for each in cluster.groups], dtype=np.int64)[group]
    true = inputs.true_seconds
    return Scenario(
        node_of=node_of,
        model_of=model_of,
        kind_of_node=group,
        node_keys=np.array([name_key(name) for name in cluster.node_names], dtype=np.int64),
        model_keys=np.array(
            [name_key(model.name) for model in cluster.configurations], dtype=np.int64
        ),
        parameters_billions=np.array([model.billions for model in cluster.configurations]),
        slots=slots,
        watts=of_nodes([each.active_watts / each.slots for each in cluster.groups]),
        usd_per_second=of_nodes(
            [each.usd_per_hour / 3600.0 / each.slots for each in cluster.groups]
        ),
        quality=inputs.quality,
        correct=inputs.correct,
        seconds=group_seconds(cluster, inputs.seconds),
        noise=inputs.noise,
        true_seconds=None if true is None else group_seconds(cluster, true),
        first_token_ratio=first[:, [each.device for each in cluster.groups]],
        idle_watts=of_nodes([each.idle_watts for each in cluster.groups]),
        prompt_tokens=inputs.prompt_tokens,
        answer_tokens=np.median(inputs.answer_tokens, axis=1),
        is_edge=of_nodes([each.usd_per_hour for each in cluster.groups]) == 0.0,
    )


def held_out_scenario(cluster: ClusterDescription, inputs: SimulationInputs) -> Scenario:
    """The cluster under the queries that judge policies.

    Raises:
        InputsError: the inputs were made for other placements, or no query is held out.
    """
    return scenario_of(cluster, inputs.part(inputs.is_held_out))


def inputs_for(cluster: ClusterDescription, folder: Path | None = None) -> SimulationInputs:
    """Those in the folder; synthetic ones of seed 0 without.

    Raises:
        InputsError: the folder cannot be read.
    """
    return synthetic_inputs(cluster) if folder is None else load_inputs(folder)


# -- files ----------------------------------------------------------------------------------------


def save_inputs(inputs: SimulationInputs, folder: Path) -> None:
    """Write an artifact folder, numbers as float32; one that is there is replaced as a whole.

    Raises:
        InputsError: the folder cannot be written.
    """
    arrays: dict[str, Any] = {}
    details: dict[str, Any] = {}
    for part in fields(inputs):
        value = getattr(inputs, part.name)
        if isinstance(value, np.ndarray):
            arrays[part.name] = value.astype(np.float32) if value.dtype.kind == "f" else value
        elif value is not None:
            details[part.name] = value
    try:
        save_artifact(folder, Artifact(KIND, arrays, details=details))
    except ArtifactError as error:
        raise InputsError(str(error)) from error


def load_inputs(folder: Path) -> SimulationInputs:
    """Read a folder that `save_inputs` wrote, its hashes checked.

    Raises:
        InputsError: the folder is absent, altered, of another schema or kind, or inconsistent.
    """
    try:
        found = load_artifact(folder, KIND)
    except ArtifactError as error:
        raise InputsError(str(error)) from error
    try:
        arrays: dict[str, Any] = {
            name: value.astype(np.float64) if value.dtype.kind == "f" else value
            for name, value in found.arrays.items()
        }
        return SimulationInputs(
            **{"true_seconds": None, **arrays},
            source=str(found.details["source"]),
            classes=tuple(found.details["classes"]),
            pairs=tuple(found.details["pairs"]),
            noise=float(found.details["noise"]),
        )
    except InputsError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise InputsError(f"{folder} is inconsistent ({error}); make it again") from error


def inputs_digest(inputs: SimulationInputs) -> str:
    """SHA-256 of everything in them, hexadecimal: equal inputs, equal digests."""
    found = hashlib.sha256()
    for part in fields(inputs):
        value = getattr(inputs, part.name)
        found.update(part.name.encode())
        if isinstance(value, np.ndarray):
            found.update(np.ascontiguousarray(value).tobytes())
        else:
            found.update(repr(value).encode())
    return found.hexdigest()


# -- synthetic ------------------------------------------------------------------------------------

CLASSES: Final = ("biology", "commonsense", "geography", "history", "mathematics", "truthfulness")

_SPEEDS: Final = {
    # Fitted on published rows of llama.cpp and Ollama: bytes of weights read in a second, seconds a
    # token besides, reading over writing speed. Another class is taken for a VM.
    "RP": (3.5e9, 0.02, 1.5),
    "NJN": (4.2e9, 0.01, 20.0),
    "JON": (52e9, 0.008, 20.0),
    "JOA": (105e9, 0.004, 20.0),
    "VM": (16.8e9, 0.005, 4.0),
}
_OVERHEAD_SECONDS: Final = 0.1
_PROMPT_TOKENS: Final = (110.0, 60.0, 70.0, 330.0, 60.0, 20.0)
_ANSWER_TOKENS: Final = (90.0, 60.0, 80.0, 110.0, 210.0, 80.0)
_GUESSED: Final = (0.25, 0.2, 0.25, 0.25, 0.05, 0.2)
_TALKATIVE: Final = {"gpt-oss": 2.0, "qwen3": 2.5, "tinyllama": 1.2, "mistral": 0.9}
_NOISE: Final = 0.35
"""Of times against predictions: an R2 of about 0.9 on the log scale here."""

_DIFFICULTY: Final = 1.4
"""Deviation of how hard a query is for every model, in logits; from RouterBench's outcomes."""


def synthetic_inputs(
    cluster: ClusterDescription, seed: int = 0, queries: int = 1258
) -> SimulationInputs:
    """Made-up queries for any cluster, with speeds as published; no file is read.

    An answer is right with probability g + (1 - g) logistic(ability - difficulty): g is what
    guessing brings in the class, ability rises with the log of the size, is lower at few bits,
    and each model has strengths by class of its own. The
    predicted quality is the share of right answers in the class among the queries that are not
    held out, weighed by the class probabilities: what DRLM's table would give. Seconds are bytes
    read over bandwidth, a token at a time, and the reading of the prompt.

    Args:
        seed: of everything random; the same seed gives the same inputs.
        queries: Q, at least 30.

    Raises:
        InputsError: too few queries.
    """
    if queries < 30:
        raise InputsError(f"{queries} queries; at least 30, five a class")
    rng = np.random.default_rng(seed)
    labels, models = len(CLASSES), len(cluster.models)
    of_class = rng.permutation(np.arange(queries) % labels)
    prompt = np.array(_PROMPT_TOKENS)[of_class] * np.exp(rng.normal(0.0, 0.5, queries))
    talk = np.array([_TALKATIVE.get(m.family, 1.0) for m in cluster.configurations])
    length = np.array(_ANSWER_TOKENS)[of_class] * np.exp(rng.normal(0.0, 0.4, queries))
    answer = np.maximum(1.0, length[:, None] * talk)

    billions = np.array([model.billions for model in cluster.configurations])
    bits = np.array([model.quantisation_bits for model in cluster.configurations])
    scales = [model.scale_name for model in cluster.configurations]
    scale_of = np.array([sorted(set(scales)).index(name) for name in scales])
    loss = np.interp(bits, (2, 3, 4, 8), (0.9, 0.35, 0.12, 0.0))
    strength = rng.normal(0.0, 0.35, (labels, int(scale_of.max()) + 1))[:, scale_of]
    ability = 0.63 * np.log(billions) - 2.1 - loss + strength  # [L, M]
    difficulty = rng.normal(0.0, _DIFFICULTY, queries)
    guess = np.array(_GUESSED)[of_class, None]
    chance = guess + (1.0 - guess) / (1.0 + np.exp(difficulty[:, None] - ability[of_class]))
    # One draw a scale: quantising a model changes few of its answers.
    luck = rng.random((queries, int(scale_of.max()) + 1))[:, scale_of]
    correct = (luck < chance).astype(np.float64)

    sure = rng.beta(6.0, 1.0, queries)
    probabilities = np.full((queries, labels), 1.0) * ((1.0 - sure) / (labels - 1))[:, None]
    seen = np.where(rng.random(queries) < 0.93, of_class, rng.integers(0, labels, queries))
    probabilities[np.arange(queries), seen] = sure
    probabilities /= probabilities.sum(axis=1, keepdims=True)

    is_held_out = np.zeros(queries, dtype=np.bool_)
    is_held_out[rng.permutation(queries)[: max(1, round(HELD_OUT * queries))]] = True
    table = np.empty((labels, models))
    for label in range(labels):
        known = correct[(of_class == label) & ~is_held_out]
        table[label] = (known.sum(axis=0) + 1.0) / (known.shape[0] + 2.0)

    placed, device = cluster.pairs
    speeds = [_SPEEDS.get(each.kind, _SPEEDS["VM"]) for each in cluster.devices]
    read = np.array([model.read_bytes for model in cluster.models])
    token = np.array(
        [read[m] / speeds[d][0] + speeds[d][1] for m, d in zip(placed, device, strict=True)]
    )
    reading = token / np.array([speeds[d][2] for d in device])
    first = _OVERHEAD_SECONDS + prompt[:, None] * reading
    seconds = first + answer[:, placed] * token
    return SimulationInputs(
        source=f"synthetic, seed {seed}: published device speeds, made-up qualities and lengths",
        classes=CLASSES,
        pairs=pair_names(cluster),
        query_class=of_class.astype(np.int64),
        class_probabilities=probabilities,
        prompt_tokens=prompt,
        is_held_out=is_held_out,
        quality=probabilities @ table,
        correct=correct,
        answer_tokens=answer,
        seconds=seconds,
        first_token_ratio=(first / seconds).mean(axis=0),
        true_seconds=None,
        noise=_NOISE,
    )
