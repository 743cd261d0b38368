"""The whole of `edge-controller experiment drlm`: inputs, training, runs, files."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from controller.experiments.contenders import LEARNED_POLICIES, Contender, trained
from controller.experiments.drlm import (
    Design,
    ExperimentError,
    Results,
    Setting,
    run_experiment,
)
from controller.experiments.figures import draw_figures
from controller.experiments.learning import train_policies
from controller.experiments.report import write_report
from controller.simulator.inputs import (
    inputs_digest,
    load_inputs,
    save_inputs,
    scenario_of,
    synthetic_inputs,
)
from controller.simulator.scenario_file import read_scenario

INPUTS_FOLDER: Final = "inputs"

Progress = Callable[[str, int, int, str], None]
"""Called with a stage, how much of it is done, of how much, and a word on what was done last."""


@dataclass(frozen=True, slots=True)
class Study:
    """What an experiment is asked to do.

    Attributes:
        out: folder that gets everything; run again with it to go on where a run was stopped.
        contenders: whom to compare.
        design: loads and runs.
        scenario: name or path of the cluster.
        inputs: folder of simulation inputs; None makes synthetic ones of seed 0.
        artifacts: folder of learned policies; None trains them.
        episodes: of the training, by policy; one that is not there is not trained.
        jobs: processes.
        has_figures: whether to draw.
    """

    out: Path
    contenders: Sequence[Contender]
    design: Design
    scenario: str = "drlm"
    inputs: Path | None = None
    artifacts: Path | None = None
    episodes: tuple[tuple[str, int], ...] = ()
    jobs: int = 1
    has_figures: bool = True


def conduct(
    study: Study, progress: Progress = lambda stage, done, total, what: None
) -> tuple[Results, list[Path]]:
    """Run it; the results, and the files written.

    Raises:
        ExperimentError: a given folder holds no learned policy, or a process died.
        ScenarioError, InputsError, WorkloadError: what is given cannot be used.
        TrainingMissing, FiguresMissing: an extra is not installed; the latter only after the
            tables are written.
        OSError: a file cannot be read or written.
    """
    cluster = read_scenario(study.scenario)
    given = load_inputs(study.inputs) if study.inputs else synthetic_inputs(cluster)
    scenario_of(cluster, given)  # so that what does not fit is said before anything is trained
    study.out.mkdir(parents=True, exist_ok=True)
    folder = study.out / INPUTS_FOLDER
    save_inputs(given, folder)
    inputs = load_inputs(folder)  # as the workers will read them: rounded
    asked = [
        name for name in LEARNED_POLICIES if name in {each.policy for each in study.contenders}
    ]
    artifacts, curves = study.artifacts, study.artifacts
    contenders = tuple(study.contenders)
    if artifacts is not None:
        contenders = trained(contenders, artifacts)
        if asked and not any(each.policy in LEARNED_POLICIES for each in contenders):
            raise ExperimentError(
                f"{artifacts}: holds neither a readable `ppo` nor a readable `ppo-set`; name the "
                "--out of `edge-controller train`"
            )
    elif asked:
        episodes: dict[str, int] = {name: count for name, count in study.episodes if name in asked}
        # Of other inputs, or hardly trained ones, are other policies.
        said = "-".join(str(count) for count in sorted(set(episodes.values())))
        artifacts = study.out / "policies" / f"{inputs_digest(inputs)[:8]}-{said}"
        curves = artifacts
        artifacts.mkdir(parents=True, exist_ok=True)
        train_policies(
            cluster,
            inputs,
            artifacts,
            episodes,
            study.design.seed,
            lambda name, done, total, reward: progress(
                f"train {name}", done, total, f"reward {reward:.4f}"
            ),
        )
        contenders = trained(contenders, artifacts)
    if not contenders:
        raise ExperimentError(
            "nothing is left to compare: the chosen policies are not trained by --quick; leave it "
            "out, or give --artifacts"
        )
    results = run_experiment(
        Setting(study.scenario, folder, artifacts),
        contenders,
        study.design,
        study.out / "parts",
        study.jobs,
        lambda done, total, what: progress("compare", done, total, what),
    )
    written = write_report(results, study.out)
    if study.has_figures:
        written += draw_figures(results, study.out / "figures", curves)
    return results, written


def usable_cores() -> int:
    """How many processes can run at once here."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
