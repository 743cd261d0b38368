"""The whole of `edge-controller lab experiment drlm`: inputs, training, runs, files."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from controller.lab.experiments.comparison_setting import Setting, settle
from controller.lab.experiments.contenders import (
    LEARNED_POLICIES,
    SUBJECTS,
    Contender,
    trained,
    training_folder,
)
from controller.lab.experiments.drlm import Design, Results, run_experiment
from controller.lab.experiments.drlm_report import write_report
from controller.lab.experiments.figures import draw_figures
from controller.lab.experiments.learning import train_policies
from controller.lab.experiments.run_pool import FOLDER, ExperimentError
from controller.lab.simulator.inputs import inputs_digest

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
        training_seeds: of further trainings of `SUBJECTS`, which are compared, too.
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
    training_seeds: tuple[int, ...] = ()
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
    setting = settle(study.out, study.scenario, study.inputs, study.artifacts)
    contenders = _with_further_trainings(study.contenders, study.training_seeds)
    is_asked = any(each.policy in LEARNED_POLICIES for each in contenders)
    if study.artifacts is None and is_asked:
        setting = replace(setting, artifacts=_train(study, setting, contenders, progress))
    found = trained(contenders, setting.artifacts)
    if study.artifacts is not None:
        _refuse_missing(study.artifacts, contenders, found)
    if not found:
        raise ExperimentError(
            "nothing is left to compare: the chosen policies are not trained by --quick; leave it "
            "out, or give --artifacts"
        )
    results = run_experiment(
        setting,
        found,
        study.design,
        study.out / FOLDER,
        study.jobs,
        lambda done, total, what: progress("compare", done, total, what),
    )
    written = write_report(results, study.out)
    if study.has_figures:
        written += draw_figures(results, study.out / "figures", setting.artifacts)
    return results, written


def _with_further_trainings(
    contenders: Sequence[Contender], seeds: Sequence[int]
) -> tuple[Contender, ...]:
    subjects = [each for each in contenders if each.policy in SUBJECTS]
    again = [each.trained_again(seed) for seed in seeds for each in subjects]
    return (*contenders, *again)


def _refuse_missing(
    artifacts: Path, asked: Sequence[Contender], found: Sequence[Contender]
) -> None:
    """A given folder may lack some policies, but not all, and none of a further training."""
    further = [each.label for each in asked if each.training_seed is not None and each not in found]
    if further:
        raise ExperimentError(
            f"{artifacts}: has no {', '.join(further)}; leave --artifacts out to train"
        )
    wanted, there = (any(e.policy in LEARNED_POLICIES for e in each) for each in (asked, found))
    if wanted and not there:
        raise ExperimentError(
            f"{artifacts}: holds neither a readable `ppo` nor a readable `ppo-set`; name the --out "
            "of `edge-controller lab train`"
        )


def _train(
    study: Study, setting: Setting, contenders: Sequence[Contender], progress: Progress
) -> Path:
    """The folder of the policies that the contenders need."""
    cluster, inputs, _ = setting.open()  # as the workers read them: rounded
    asked = {each.policy for each in contenders}
    episodes: dict[str, int] = {name: count for name, count in study.episodes if name in asked}
    # Of other inputs, or hardly trained ones, are other policies; fewer contenders are no others.
    said = "-".join(str(count) for count in sorted({count for _, count in study.episodes}))
    artifacts = study.out / "policies" / f"{inputs_digest(inputs)[:8]}-{said}"
    for seed in (None, *study.training_seeds):
        folder = training_folder(artifacts, seed)
        folder.mkdir(parents=True, exist_ok=True)
        again = "" if seed is None else f" (training {seed})"

        def report(name: str, done: int, total: int, reward: float, again: str = again) -> None:
            progress(f"train {name}{again}", done, total, f"reward {reward:.4f}")

        train_policies(
            cluster,
            inputs,
            folder,
            {name: n for name, n in episodes.items() if seed is None or name in SUBJECTS},
            study.design.seed if seed is None else seed,
            report,
        )
    return artifacts


def usable_cores() -> int:
    """How many processes can run at once here."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
