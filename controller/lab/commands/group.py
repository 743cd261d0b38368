"""`edge-controller lab`: all that is done offline."""

import click

from controller.commands.lazy import LazyGroup, Place

_HERE = "controller.lab.commands"


@click.group(
    cls=LazyGroup,
    places={
        "demo": Place(
            f"{_HERE}.demo:demo",
            "Route a batch of questions over three agents with real models on this machine.",
        ),
        "profile": Place(
            f"{_HERE}.profile:profile",
            "Measure how well and how fast each destination answers question sets.",
        ),
        "quality": Place(f"{_HERE}.problem:quality", "Judge the quality estimates."),
        "fit": Place(f"{_HERE}.fit:fit", "Fit classifier, quality, latency and answer length."),
        "train": Place(f"{_HERE}.train:train", "Train routing policies (extra `train`)."),
        "simulate": Place(f"{_HERE}.simulate:simulate", "Simulate a policy on a cluster."),
        "experiment": Place(
            f"{_HERE}.experiment:experiment", "Compare routing policies on a simulated cluster."
        ),
        "problem": Place(
            f"{_HERE}.problem:problem",
            "Make files of one routing decision (docs/problem-format.md).",
        ),
        "solve": Place(f"{_HERE}.problem:solve", "Decide the problem in FILE."),
        "bench": Place(f"{_HERE}.bench:bench", "Measure parts of the controller."),
    },
)
def lab() -> None:
    """Measure models, fit predictors, train policies, run experiments and benchmarks."""
