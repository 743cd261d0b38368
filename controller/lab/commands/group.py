"""`edge-controller lab`: all that is done offline."""

import click

from controller.commands.lazy import LazyGroup

_HERE = "controller.lab.commands"


@click.group(
    cls=LazyGroup,
    places={
        "demo": f"{_HERE}.demo:demo",
        "profile": f"{_HERE}.profile:profile",
        "quality": f"{_HERE}.problem:quality",
        "fit": f"{_HERE}.fit:fit",
        "train": f"{_HERE}.train:train",
        "simulate": f"{_HERE}.simulate:simulate",
        "experiment": f"{_HERE}.experiment:experiment",
        "problem": f"{_HERE}.problem:problem",
        "solve": f"{_HERE}.problem:solve",
        "bench": f"{_HERE}.bench:bench",
    },
)
def lab() -> None:
    """Measure models, fit predictors, train policies, run experiments and benchmarks."""
