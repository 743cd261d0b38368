"""A fleet to train on, from a simulated cluster and its queries."""

import numpy as np

from controller.lab.simulator.cluster import ClusterDescription
from controller.lab.simulator.inputs import InputsError, SimulationInputs, group_seconds, pair_names
from controller.lab.training.vector_environment import World
from controller.routing.ppo.observation import Layout
from controller.routing.problem import name_key


def world_of(cluster: ClusterDescription, inputs: SimulationInputs) -> World:
    """The cluster under the queries that are not held out.

    A configuration's family and scale is a choice of the first head, its quantisation one of the
    second; groups of alike nodes are the kinds. Real times are `true_seconds` on average as far
    from the predicted ones as in the inputs, or `noise` where these have none.

    Raises:
        InputsError: the inputs are of other placements, or all queries are held out.
    """
    if inputs.pairs != pair_names(cluster):
        raise InputsError(f"the inputs are not of scenario {cluster.name}; make them again")
    known = inputs.part(~inputs.is_held_out)
    configurations = cluster.configurations
    scales = list(dict.fromkeys(model.scale_name for model in configurations))
    levels = sorted({model.quantisation_bits for model in configurations})
    group = cluster.group_of_node
    layout = Layout(
        model_keys=np.array([name_key(model.name) for model in configurations], dtype=np.int64),
        node_keys=np.array([name_key(name) for name in cluster.node_names], dtype=np.int64),
        kind_of_node=group.astype(np.int64),
        choice_of_model=np.array([scales.index(model.scale_name) for model in configurations]),
        level_of_model=np.array(
            [levels.index(model.quantisation_bits) for model in configurations]
        ),
        deployed=cluster.hosted[:, group],
    )
    noise = known.noise
    if known.true_seconds is not None:
        noise = float(np.hypot(noise, np.std(np.log(known.true_seconds / known.seconds))))
    return World(
        layout,
        quality=known.quality,
        correct=known.correct,
        seconds=group_seconds(cluster, known.seconds),
        slots=np.array([each.slots for each in cluster.groups], dtype=np.int64),
        watts=np.array([each.active_watts / each.slots for each in cluster.groups]),
        usd_per_second=np.array(
            [each.usd_per_hour / 3600.0 / each.slots for each in cluster.groups]
        ),
        noise=noise,
        parameters_billions=np.array([model.billions for model in configurations]),
    )
