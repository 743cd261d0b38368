"""What a simulated cluster is made of: device classes, nodes, models and where they stand.

Axes: M configurations, C device classes, K groups of alike nodes, N nodes, D destinations, which
are (node, configuration) pairs, node after node.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from controller.domain.hardware import DeviceClass, ModelConfiguration
from controller.routing.problem import BoolArray, FloatArray, IntArray

EFFECTIVE_BITS: Final = {2: 3.35, 3: 3.9, 4: 4.85, 5: 5.7, 6: 6.6, 8: 8.5, 16: 16.0}
"""Bits a weight of the usual GGUF files, scales and unquantised parts included."""

_GIB: Final = float(1 << 30)
_USABLE_RATIO: Final = 0.85
_RUNTIME_BYTES: Final = 0.15 * _GIB


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Alike nodes.

    Attributes:
        name: theirs is this, a dash and a number from 0.
        device: index of their class.
        count: how many.
        speed_ratio: their speed over what is predicted for the class.
        memory_gib: of each.
        slots: requests that each serves at once.
        idle_watts, active_watts: of each, with no and with all slots busy.
        usd_per_hour: of each, while it serves.
    """

    name: str
    device: int
    count: int
    speed_ratio: float = 1.0
    memory_gib: float = 4.0
    slots: int = 1
    idle_watts: float = 0.0
    active_watts: float = 10.0
    usd_per_hour: float = 0.0


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A configuration, and the device classes that have it.

    Attributes:
        configuration: family, scale and quantisation.
        active_billions: parameters that a token reads, in billions; fewer than all in a mixture
            of experts.
        devices: indices of classes.
    """

    configuration: ModelConfiguration
    active_billions: float
    devices: tuple[int, ...]

    @property
    def file_bytes(self) -> float:
        """Of the weights' file."""
        return self._bytes(self.configuration.billions)

    @property
    def read_bytes(self) -> float:
        """Of the weights that a token reads."""
        return self._bytes(self.active_billions)

    def _bytes(self, billions: float) -> float:
        bits = self.configuration.quantisation_bits
        return billions * 1e9 * EFFECTIVE_BITS.get(bits, float(bits)) / 8.0


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """A node goes away or comes back.

    Attributes:
        node: its index.
        at_seconds: since the start of the simulation.
        is_up: False: it fails; True: it joins, empty.
    """

    node: int
    at_seconds: float
    is_up: bool


@dataclass(frozen=True)
class ClusterDescription:
    """A cluster; `controller.lab.simulator.scenario_file` reads one from a file.

    Attributes:
        name: of the scenario.
        devices: C classes, as the latency predictor knows them.
        groups: K.
        models: M.
        events: nodes that fail and join.
    """

    name: str
    devices: tuple[DeviceClass, ...]
    groups: tuple[NodeGroup, ...]
    models: tuple[PlacedModel, ...]
    events: tuple[NodeEvent, ...] = ()

    @property
    def configurations(self) -> tuple[ModelConfiguration, ...]:
        """M."""
        return tuple(model.configuration for model in self.models)

    @cached_property
    def pairs(self) -> tuple[IntArray, IntArray]:
        """Configuration and device class of each placed pair, model after model; both int64[P]."""
        placed = [(m, d) for m, model in enumerate(self.models) for d in model.devices]
        both = np.array(placed, dtype=np.int64).reshape(-1, 2)
        return both[:, 0], both[:, 1]

    @cached_property
    def hosted(self) -> BoolArray:
        """bool[M, K]: what is placed on a group's class and fits its nodes' memory.

        A model fits when its file and 0.15 GiB are at most 85 % of the memory.
        """
        found = np.zeros((len(self.models), len(self.groups)), dtype=np.bool_)
        for m, model in enumerate(self.models):
            for k, group in enumerate(self.groups):
                room = _USABLE_RATIO * group.memory_gib * _GIB - _RUNTIME_BYTES
                found[m, k] = group.device in model.devices and model.file_bytes <= room
        return found

    @cached_property
    def group_of_node(self) -> IntArray:
        """int64[N]."""
        return np.repeat(np.arange(len(self.groups)), [group.count for group in self.groups])

    @property
    def node_names(self) -> tuple[str, ...]:
        """N names: "vm-4-0"."""
        return tuple(f"{group.name}-{at}" for group in self.groups for at in range(group.count))

    @cached_property
    def destinations(self) -> tuple[IntArray, IntArray]:
        """Node and configuration of each destination; both int64[D]."""
        node, model = np.nonzero(self.hosted[:, self.group_of_node].T)
        return node, model

    @property
    def speed_ratios(self) -> FloatArray:
        """float64[K]."""
        return np.array([group.speed_ratio for group in self.groups])
