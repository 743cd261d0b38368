"""`edge-controller lab bench`: what parts of the controller cost and reach."""

import click

from controller.commands.lazy import LazyGroup, Place

_HERE = "controller.lab.commands"


@click.group(
    cls=LazyGroup,
    places={
        "simulator": Place(
            f"{_HERE}.experiment:bench_simulator_command",
            "Measure how many queries a second the cluster simulator routes.",
        ),
        "drlm": Place(
            f"{_HERE}.fit:bench_drlm_command",
            "Measure the time of DRLM's decision on one query, by section, on one core.",
        ),
        "engine": Place(
            f"{_HERE}.fit:bench_engine_command",
            "Measure models under several thread limits, for `edge-controller lab fit`.",
        ),
        "routing": Place(
            f"{_HERE}.bench_decisions:routing",
            "Measure every policy's J, its gap to the best known and to the bound, and its time.",
        ),
        "budget": Place(
            f"{_HERE}.bench_decisions:budget",
            "Measure how well `memetic` keeps its time budget on a busy machine.",
        ),
        "embedding": Place(
            f"{_HERE}.bench_quality:embedding",
            "Measure the embedding: time, memory, and agreement of int8 with float.",
        ),
        "store": Place(
            f"{_HERE}.bench_quality:store",
            "Measure look-ups in the quality store: time and recall.",
        ),
        "predictions": Place(
            f"{_HERE}.bench_predictions:predictions",
            "Compare predicted with real completion times on three agents with real models.",
        ),
        "events": Place(
            f"{_HERE}.bench_events:events",
            "Measure how many events per second profiler and database take during decisions.",
        ),
    },
)
def bench() -> None:
    """Measure parts of the controller."""
