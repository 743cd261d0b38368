"""The command `edge-controller`: its commands are in `controller.commands`."""

import click

from controller import __version__
from controller.commands.calibrate import calibrate
from controller.commands.demonstration import demo
from controller.commands.experiment import bench_simulator_command, experiment
from controller.commands.fit import bench_drlm_command, bench_engine_command, fit
from controller.commands.models import models
from controller.commands.operation import nodes, policy
from controller.commands.profile import profile
from controller.commands.requests import explain, feedback, infer, route
from controller.commands.research import bench, embedding, problem, quality, solve
from controller.commands.serve import serve
from controller.commands.simulate import simulate
from controller.commands.storage import bench_events_command, storage
from controller.commands.train import train


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="edge-controller")
def main() -> None:
    """Route LLM requests over a fleet of edge agents."""


for _command in (
    serve,
    route,
    infer,
    explain,
    feedback,
    nodes,
    models,
    calibrate,
    policy,
    profile,
    fit,
    embedding,
    problem,
    solve,
    quality,
    bench,
    storage,
    train,
    simulate,
    experiment,
    demo,
):
    main.add_command(_command)


bench.add_command(bench_events_command)
bench.add_command(bench_simulator_command)
bench.add_command(bench_drlm_command)
bench.add_command(bench_engine_command)


if __name__ == "__main__":
    main()
