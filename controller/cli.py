"""The command `edge-controller`: serving's commands, and the lab's under `lab`."""

import click

from controller import __version__
from controller.commands.lazy import LazyGroup, Place

_LAB = ("demo", "profile", "fit", "train", "simulate", "experiment", "problem", "solve", "quality")


@click.group(
    cls=LazyGroup,
    places={
        "serve": Place(
            "controller.commands.serve:serve", "Run the controller until SIGTERM or Ctrl-C."
        ),
        "route": Place("controller.commands.requests:route", "Decide where a batch would go."),
        "infer": Place("controller.commands.requests:infer", "Answer one prompt."),
        "explain": Place(
            "controller.commands.requests:explain", "Explain why a request went where it went."
        ),
        "feedback": Place(
            "controller.commands.requests:feedback",
            "Score a finished answer, from 0 (wrong) to 1 (right).",
        ),
        "nodes": Place(
            "controller.commands.operation:nodes", "List the nodes; drain, undrain or forget one."
        ),
        "models": Place(
            "controller.commands.models:models",
            "List the models of every node; load, unload, pin or unpin one.",
        ),
        "calibrate": Place(
            "controller.commands.calibrate:calibrate",
            "Measure the speed of a node's models again, or of every node's.",
        ),
        "policy": Place(
            "controller.commands.operation:policy",
            "Show the policy in force; `policy set` changes it.",
        ),
        "embedding": Place(
            "controller.commands.embedding:embedding", "Export the model that embeds prompts."
        ),
        "storage": Place(
            "controller.commands.storage:storage",
            "Check, repair or export what the controller keeps.",
        ),
        "lab": Place(
            "controller.lab.commands.group:lab",
            "Measure models, fit predictors, train policies, run experiments and benchmarks.",
        ),
    },
    moved={name: f"lab {name}" for name in (*_LAB, "bench")},
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="edge-controller")
def main() -> None:
    """Route LLM requests over a fleet of edge agents."""


if __name__ == "__main__":
    main()
