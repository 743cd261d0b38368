"""Predicted against measured completion times of batches on a real local fleet.

The fleet is the demonstration's: a controller and three agents with real models, as processes of
this machine, each agent held to a share of one core. Bursts of prompts of very different lengths
are routed; some rounds come before those that are judged, so that the profiler has seen the fleet
at work. Nothing here tells the controller anything: what it predicted is in each account.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
from rich.console import Console

from controller.client import Client
from controller.lab.bench.bursts import Round
from controller.lab.demo.run import DemoOptions, running_fleet
from controller.lab.offline.report import spearman
from pointsman.v1 import admin_pb2, router_pb2, types_pb2

ERROR_TARGET_RATIO: Final = 0.2
RANK_TARGET: Final = 0.8

_ANSWER_SECONDS: Final = 300.0
_WEIGHTS: Final = types_pb2.ObjectiveWeights(quality=0.1, cost=0.1, energy=0.1, time=0.7)
"""Mostly time, so that every node gets its share and queues stay short."""

_FOLLOWS_AFTER_SECONDS: Final = 0.4


@dataclass(frozen=True, slots=True)
class Observation:
    """One finished request; seconds from the close of its window."""

    round_index: int
    batch_id: str
    node_id: str
    model: str
    predicted_seconds: float
    measured_seconds: float
    prompt_tokens: int
    completion_tokens: int

    @property
    def error_ratio(self) -> float:
        """Signed: above 0 when it was predicted later than it came."""
        return (self.predicted_seconds - self.measured_seconds) / self.measured_seconds


@dataclass(frozen=True, slots=True)
class PredictionReport:
    """How good the predictions were; batches are judged by their last answer.

    Attributes:
        median_error_ratio: of |predicted - measured| / measured, request by request.
        p90_error_ratio: nine of ten requests are better.
        median_bias_ratio: of the signed error.
        rank_correlation: Spearman's, between predicted and measured; None for fewer than 3.
    """

    requests: int
    failed_requests: int
    batches: int
    median_error_ratio: float
    p90_error_ratio: float
    median_bias_ratio: float
    rank_correlation: float | None
    makespan_median_error_ratio: float
    median_measured_seconds: float
    by_node: dict[str, float]

    @property
    def is_good(self) -> bool:
        """Whether both targets are met."""
        return (
            self.median_error_ratio <= ERROR_TARGET_RATIO
            and self.rank_correlation is not None
            and self.rank_correlation >= RANK_TARGET
        )


def judged(observations: Sequence[Observation], failed_requests: int = 0) -> PredictionReport:
    """Judge predictions.

    Raises:
        ValueError: there is nothing to judge.
    """
    if not observations:
        raise ValueError("no request finished, so nothing can be judged")
    predicted = np.array([one.predicted_seconds for one in observations])
    measured = np.array([one.measured_seconds for one in observations])
    errors = np.array([one.error_ratio for one in observations])
    batches: dict[str, list[Observation]] = {}
    nodes: dict[str, list[float]] = {}
    for one in observations:
        batches.setdefault(one.batch_id, []).append(one)
        nodes.setdefault(one.node_id, []).append(abs(one.error_ratio))
    ends = np.array(
        [
            (max(o.predicted_seconds for o in batch), max(o.measured_seconds for o in batch))
            for batch in batches.values()
        ]
    )
    return PredictionReport(
        requests=len(observations),
        failed_requests=failed_requests,
        batches=len(batches),
        median_error_ratio=float(np.median(np.abs(errors))),
        p90_error_ratio=float(np.quantile(np.abs(errors), 0.9)),
        median_bias_ratio=float(np.median(errors)),
        rank_correlation=rank_correlation(predicted, measured),
        makespan_median_error_ratio=float(np.median(np.abs(ends[:, 0] - ends[:, 1]) / ends[:, 1])),
        median_measured_seconds=float(np.median(measured)),
        by_node={name: float(np.median(found)) for name, found in sorted(nodes.items())},
    )


def rank_correlation(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> float | None:
    """Spearman's rho with mean ranks for ties; None for fewer than 3, or when one is constant."""
    return spearman(first, second) if len(first) >= 3 else None


async def bench_predictions(
    cache: Path,
    rounds: Sequence[Round],
    warm_up_rounds: int,
    policy: str,
    console: Console,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[PredictionReport, list[Observation]]:
    """Measure on a fleet of this machine.

    Args:
        cache: where the models are kept.
        rounds: what is sent; the next one goes when all of the last are answered.
        warm_up_rounds: so many of them, the first ones, are not judged.
        say: told how it goes.

    Raises:
        DemoError: the fleet could not be started.
        ValueError: nothing was answered.
    """
    observations: list[Observation] = []
    failed = 0
    async with running_fleet(DemoOptions(cache, learns=True), console) as fleet:
        await fleet.client.admin.SetPolicy(
            admin_pb2.SetPolicyRequest(policy=policy, weights=_WEIGHTS), timeout=10
        )
        for index, both in enumerate(rounds):
            sent = [asyncio.create_task(_ask(fleet.client, index, one)) for one in both.burst]
            if both.follower:
                await asyncio.sleep(_FOLLOWS_AFTER_SECONDS)
                sent += [
                    asyncio.create_task(_ask(fleet.client, index, one)) for one in both.follower
                ]
            answers = await asyncio.gather(*sent)
            done = [one for one in answers if one is not None]
            if index >= warm_up_rounds:
                observations += done
                failed += len(answers) - len(done)
            say(f"round {index + 1} of {len(rounds)}: {len(done)} of {len(answers)} answered")
    return judged(observations, failed), observations


async def _ask(
    client: Client, round_index: int, request: types_pb2.InferenceRequest
) -> Observation | None:
    stream = client.router.Infer(router_pb2.InferRequest(request=request), timeout=_ANSWER_SECONDS)
    try:
        async for event in stream:
            if event.WhichOneof("event") == "account":
                account = event.account
                return Observation(
                    round_index,
                    account.batch_id,
                    account.node_id,
                    account.model,
                    account.predicted_finish_seconds,
                    account.measured_finish_seconds,
                    account.usage.prompt_tokens,
                    account.usage.completion_tokens,
                )
    except grpc.aio.AioRpcError:
        return None
    return None


def report_as_json(
    report: PredictionReport, observations: Sequence[Observation]
) -> dict[str, object]:
    """One stable object: the figures, the targets, and every observation."""
    return {
        **asdict(report),
        "is_good": report.is_good,
        "targets": {"median_error_ratio": ERROR_TARGET_RATIO, "rank_correlation": RANK_TARGET},
        "observations": [asdict(one) for one in observations],
    }
