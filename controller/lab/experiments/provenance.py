"""What an experiment was made with: plain values for its results."""

import os
import platform
from importlib import metadata
from typing import Any

from controller import __version__
from controller.lab.simulator.cluster import ClusterDescription
from controller.lab.simulator.inputs import SimulationInputs, inputs_digest


def origin_of(cluster: ClusterDescription, inputs: SimulationInputs) -> dict[str, Any]:
    """Versions, the machine, and the simulated setting."""
    return {
        "versions": {
            "pointsman": __version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("numpy", "numba")},
        },
        "machine": {
            "system": platform.system(),
            "architecture": platform.machine(),
            "cores": os.cpu_count(),
        },
        "setting": {
            "scenario": cluster.name,
            "nodes": int(cluster.group_of_node.size),
            "configurations": len(cluster.models),
            "pairs_with_classes": len(inputs.pairs),
            "destinations": int(cluster.destinations[0].size),
            "inputs": inputs.source,
            "inputs_sha256": inputs_digest(inputs),
            "queries": inputs.queries,
            "held_out_queries": int(inputs.is_held_out.sum()),
        },
    }
