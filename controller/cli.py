"""The command `edge-controller`: serving's commands, and the lab's under `lab`."""

import click

from controller import __version__
from controller.commands.lazy import LazyGroup

_LAB = ("demo", "profile", "fit", "train", "simulate", "experiment", "problem", "solve", "quality")


@click.group(
    cls=LazyGroup,
    places={
        "serve": "controller.commands.serve:serve",
        "route": "controller.commands.requests:route",
        "infer": "controller.commands.requests:infer",
        "explain": "controller.commands.requests:explain",
        "feedback": "controller.commands.requests:feedback",
        "nodes": "controller.commands.operation:nodes",
        "models": "controller.commands.models:models",
        "calibrate": "controller.commands.calibrate:calibrate",
        "policy": "controller.commands.operation:policy",
        "embedding": "controller.commands.embedding:embedding",
        "storage": "controller.commands.storage:storage",
        "lab": "controller.lab.commands.group:lab",
    },
    moved={name: f"lab {name}" for name in (*_LAB, "bench")},
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="edge-controller")
def main() -> None:
    """Route LLM requests over a fleet of edge agents."""


if __name__ == "__main__":
    main()
