"""Where policies are compared, in a form that other processes can be told."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from controller.lab.simulator.cluster import ClusterDescription
from controller.lab.simulator.inputs import (
    SimulationInputs,
    held_out_scenario,
    inputs_for,
    load_inputs,
    save_inputs,
    scenario_of,
)
from controller.lab.simulator.scenario import Scenario
from controller.lab.simulator.scenario_file import read_scenario

_INPUTS: Final = "inputs"


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """A cluster, what it is asked, and who learned to route there.

    Attributes:
        scenario: name or path of the cluster.
        inputs_folder: as `save_inputs` wrote it; its held-out queries arrive.
        artifacts: folder of learned policies; None: there are none.
    """

    scenario: str
    inputs_folder: Path
    artifacts: Path | None

    def open(self) -> tuple[ClusterDescription, SimulationInputs, Scenario]:
        """The cluster, all inputs, and the scenario of the held-out ones.

        Raises:
            ScenarioError, InputsError: they cannot be read or do not fit each other.
        """
        cluster = read_scenario(self.scenario)
        inputs = load_inputs(self.inputs_folder)
        return cluster, inputs, held_out_scenario(cluster, inputs)


def settle(out: Path, scenario: str, inputs: Path | None, artifacts: Path | None) -> Setting:
    """Put what an experiment is run on beside its results.

    Args:
        out: folder of the results; made if absent.
        scenario: name or path of the cluster.
        inputs: folder of simulation inputs; None makes synthetic ones of seed 0.
        artifacts: folder of learned policies.

    Raises:
        ScenarioError, InputsError: they cannot be read or written, or do not fit each other.
        OSError: the folder cannot be made.
    """
    cluster = read_scenario(scenario)
    given = inputs_for(cluster, inputs)
    scenario_of(cluster, given)  # so that what does not fit is said before anything is trained
    out.mkdir(parents=True, exist_ok=True)
    save_inputs(given, out / _INPUTS)
    return Setting(scenario, out / _INPUTS, artifacts)
