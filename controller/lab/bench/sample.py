"""Routing problems drawn by seed, with the shape of a real fleet and a real workload.

Nothing here is measured: classes of machines, models and requests are plausible stand-ins, drawn
the same on every machine, so that searches can be compared.
"""

import enum
from dataclasses import dataclass
from typing import Final

import numpy as np

from controller.domain.cluster import (
    Calibration,
    ClusterSnapshot,
    Destination,
    NetworkPath,
    Node,
    NodeKind,
    NodeState,
    PowerProfile,
    TokenPrice,
)
from controller.domain.request import InferenceRequest, Sampling
from controller.ids import ModelName, NodeId, RequestId
from controller.routing.formulation import DEFAULT_WEIGHTS, FormulatedBatch, formulate
from controller.routing.problem import FloatArray, Normalisation


class QueueModel(enum.Enum):
    """What an engine gains from decoding several sequences at once."""

    SERIAL = "serial"
    BATCHED = "batched"


@dataclass(frozen=True, slots=True)
class MachineClass:
    """A kind of machine.

    Attributes:
        bytes_per_second: memory bandwidth that decoding achieves; it bounds tokens per second.
        memory_bytes: for weights.
        batching_gain: saturated over single-sequence decode rate when batched.
        prefill_gain: prefill over decode rate.
        round_trip_seconds: to the controller, centre of the draw.
    """

    name: str
    kind: NodeKind
    bytes_per_second: float
    memory_bytes: float
    idle_watts: float
    max_watts: float
    batching_gain: float
    prefill_gain: float
    slots: int
    round_trip_seconds: float
    link_bits_per_second: float


@dataclass(frozen=True, slots=True)
class ModelClass:
    """A model: its size, what a provider charges for it, and how often it is right."""

    name: str
    family: str
    parameters_billions: float
    bits_per_weight: float
    prompt_usd_per_million: float
    completion_usd_per_million: float
    mean_quality: float

    @property
    def weight_bytes(self) -> float:
        """Size of the file."""
        return self.parameters_billions * 1e9 * self.bits_per_weight / 8.0


MACHINES: Final = (
    MachineClass("pi5", NodeKind.EDGE, 9e9, 6e9, 3.0, 12.0, 1.2, 6.0, 2, 0.006, 3e8),
    MachineClass("orin-nano", NodeKind.EDGE, 55e9, 6e9, 5.0, 20.0, 2.5, 20.0, 4, 0.007, 5e8),
    MachineClass("agx-orin", NodeKind.EDGE, 130e9, 50e9, 15.0, 55.0, 3.5, 25.0, 8, 0.008, 8e8),
    MachineClass("vm", NodeKind.EDGE, 30e9, 24e9, 20.0, 70.0, 1.6, 8.0, 4, 0.015, 2e8),
    MachineClass("gpu", NodeKind.CLOUD, 700e9, 70e9, 80.0, 350.0, 11.0, 40.0, 16, 0.05, 1e8),
)

MODELS: Final = (
    ModelClass("qwen-0.6b", "qwen", 0.6, 4.84, 0.02, 0.04, 0.36),
    ModelClass("gemma-1b", "gemma", 1.0, 4.84, 0.03, 0.05, 0.40),
    ModelClass("llama-1b", "llama", 1.2, 8.5, 0.03, 0.06, 0.41),
    ModelClass("smollm-1.7b", "smollm", 1.7, 4.84, 0.04, 0.08, 0.45),
    ModelClass("llama-3b", "llama", 3.2, 4.84, 0.06, 0.10, 0.54),
    ModelClass("gemma-4b", "gemma", 4.3, 4.84, 0.08, 0.15, 0.58),
    ModelClass("mistral-7b", "mistral", 7.2, 4.84, 0.2, 0.2, 0.57),
    ModelClass("llama-8b", "llama", 8.0, 8.5, 0.2, 0.3, 0.63),
    ModelClass("gemma-12b", "gemma", 12.2, 4.84, 0.3, 0.6, 0.68),
    ModelClass("gpt-oss-20b", "gpt-oss", 20.9, 4.25, 0.5, 1.5, 0.74),
    ModelClass("qwen-32b", "qwen", 32.8, 8.5, 0.9, 2.0, 0.78),
)

DIFFICULTY_DEVIATION: Final = 1.4
"""Of the latent difficulty that all models share: gives the shares of a public router benchmark
in which several, one, or no model is right."""


def sample_fleet(
    rng: np.random.Generator, n_nodes: int, models_per_node: int, queue: QueueModel
) -> ClusterSnapshot:
    """A fleet of machines of all classes with the models that fit each.

    Raises:
        ValueError: fewer than one node or model, or more models a node than there are.
    """
    if n_nodes < 1:
        raise ValueError(f"a fleet needs at least one node, not {n_nodes}")
    if not 1 <= models_per_node <= len(MODELS):
        raise ValueError(f"models per node must be 1 to {len(MODELS)}, not {models_per_node}")
    nodes: list[Node] = []
    destinations: list[Destination] = []
    width = len(str(n_nodes - 1))
    offset = int(rng.integers(len(MACHINES)))
    for index in range(n_nodes):
        machine = MACHINES[(index + offset) % len(MACHINES)]
        node_id = NodeId(f"{machine.name}-{index:0{width}}")
        nodes.append(_sample_node(rng, node_id, machine))
        pace = machine.bytes_per_second * rng.uniform(0.85, 1.15)
        destinations.extend(
            _sample_destination(rng, node_id, machine, model, pace, queue)
            for model in _sample_models(rng, machine, models_per_node)
        )
    nodes.sort(key=lambda node: node.node_id)
    destinations.sort(key=lambda destination: (destination.node_id, destination.model))
    return ClusterSnapshot(tuple(nodes), tuple(destinations))


def _sample_node(rng: np.random.Generator, node_id: NodeId, machine: MachineClass) -> Node:
    backlog = float(rng.exponential(1.5)) if rng.random() < 0.5 else 0.0
    return Node(
        node_id=node_id,
        kind=machine.kind,
        state=NodeState.READY,
        power=PowerProfile(machine.idle_watts, machine.max_watts),
        network=NetworkPath(
            round_trip_seconds=machine.round_trip_seconds * float(rng.uniform(0.7, 1.5)),
            receive_bits_per_second=machine.link_bits_per_second,
            transmit_bits_per_second=machine.link_bits_per_second,
        ),
        backlog_seconds=backlog,
        inflight_requests=int(backlog > 0.0),
    )


def _sample_models(rng: np.random.Generator, machine: MachineClass, count: int) -> list[ModelClass]:
    """Different models, those that fit before those that would have to be swapped in."""
    fitting = [model for model in MODELS if model.weight_bytes <= machine.memory_bytes]
    others = [model for model in MODELS if model.weight_bytes > machine.memory_bytes]
    chosen = [fitting[i] for i in rng.permutation(len(fitting))]
    return (chosen + others)[:count]


def _sample_destination(
    rng: np.random.Generator,
    node_id: NodeId,
    machine: MachineClass,
    model: ModelClass,
    bytes_per_second: float,
    queue: QueueModel,
) -> Destination:
    decode = bytes_per_second / model.weight_bytes
    batched = queue is QueueModel.BATCHED
    gain = machine.batching_gain * float(rng.uniform(0.8, 1.2)) if batched else 1.0
    in_cloud = machine.kind is NodeKind.CLOUD
    return Destination(
        node_id=node_id,
        model=ModelName(model.name),
        family=model.family,
        parameters_billions=model.parameters_billions,
        quantisation=f"{model.bits_per_weight:g} bits",
        context_tokens=8192,
        slots=machine.slots if batched else 1,
        has_chat_template=True,
        calibration=Calibration(
            prefill_tokens_per_second=decode * machine.prefill_gain,
            decode_tokens_per_second=decode,
            saturated_decode_tokens_per_second=decode * max(1.0, gain),
            utilisation_ratio=float(rng.uniform(0.75, 0.95)),
        ),
        price=TokenPrice(
            model.prompt_usd_per_million * 1e-6, model.completion_usd_per_million * 1e-6
        )
        if in_cloud
        else TokenPrice(),
        mean_quality_ratio=model.mean_quality,
        quality_source="sampled",
        quality_count=0,
        characters_per_token=4.0,
    )


def sample_batch(
    rng: np.random.Generator,
    n_requests: int,
    snapshot: ClusterSnapshot,
    weights: tuple[float, float, float, float] = DEFAULT_WEIGHTS,
    normalisation: Normalisation = Normalisation.PAYOFF,
) -> FormulatedBatch:
    """A batch of mixed lengths and difficulties, formulated over a fleet.

    Predicted quality is logistic in the model's mean and the request's own difficulty, with a
    deviation of each model's own: no model is the best one for every request.

    Raises:
        EmptyBatch: fewer than one request.
    """
    prompt_tokens = np.clip(rng.lognormal(np.log(120.0), 0.7, n_requests), 8.0, 2000.0)
    answer_tokens = np.clip(rng.lognormal(np.log(110.0), 0.7, n_requests), 2.0, 800.0)
    requests = [
        InferenceRequest(
            request_id=RequestId(f"sampled-{index}"),
            prompt="x" * int(4.0 * tokens),
            sampling=Sampling(max_tokens=800),
        )
        for index, tokens in enumerate(prompt_tokens)
    ]
    models = sorted({destination.model for destination in snapshot.destinations})
    column = np.array([models.index(d.model) for d in snapshot.destinations], dtype=np.int64)
    mean = np.array([d.mean_quality_ratio for d in snapshot.destinations])
    difficulty = rng.normal(0.0, DIFFICULTY_DEVIATION, n_requests)[:, None]
    taste = rng.normal(0.0, 0.5, (n_requests, len(models)))[:, column]
    verbosity = np.exp(rng.normal(0.0, 0.15, len(models)))[column]
    quality = _logistic(1.2 * _logit(mean) + difficulty + taste)
    return formulate(
        requests,
        snapshot,
        weights,
        normalisation,
        quality=quality,
        output_tokens=answer_tokens[:, None] * verbosity,
    )


def sample_problem(
    n_requests: int,
    n_nodes: int,
    models_per_node: int,
    queue: QueueModel,
    seed: int,
    weights: tuple[float, float, float, float] = DEFAULT_WEIGHTS,
    normalisation: Normalisation = Normalisation.PAYOFF,
) -> FormulatedBatch:
    """A fleet and a batch by seed; `.problem` is what `save_problem` writes.

    Raises:
        EmptyBatch: fewer than one request.
        ValueError: fewer than one node or model, or more models a node than there are.
    """
    rng = np.random.default_rng(seed)
    snapshot = sample_fleet(rng, n_nodes, models_per_node, queue)
    return sample_batch(rng, n_requests, snapshot, weights, normalisation)


def _logit(ratio: FloatArray) -> FloatArray:
    return np.asarray(np.log(ratio / (1.0 - ratio)))


def _logistic(value: FloatArray) -> FloatArray:
    return np.asarray(1.0 / (1.0 + np.exp(-value)))
