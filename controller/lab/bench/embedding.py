"""How fast prompts are embedded, how well 8 bits serve, and what it takes in memory."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from controller.lab.bench.prompts import made_up_prompts
from controller.lab.bench.serving_cost import serving_cost
from controller.quality.embedding import OnnxEmbedding
from controller.quality.neighbour_index import exact_search, overlap_ratio

RESIDENT_PROMPTS: Final = 36_497
"""As many as RouterBench has."""

_BATCHES: Final = (1, 8, 30)
_OVERLAP_AT: Final = 10
_QUERY_SHARE: Final = 5


@dataclass(frozen=True, slots=True)
class EmbeddingReport:
    """What was measured.

    Attributes:
        milliseconds_1: median for one new prompt of about 40 tokens, tokenising included.
        milliseconds_8: for 8.
        milliseconds_30: for 30.
        neighbour_overlap_ratio: share of the 10 nearest prompts by the float model that are also
            found by the served model among the same store, which is embedded in float.
        overlap_prompts: prompts in that store.
        resident_megabytes, peak_megabytes, start_seconds, imports_torch: of `edge-controller serve`
            over `RESIDENT_PROMPTS` profiled prompts; see `ServingCost`.
    """

    milliseconds_1: float
    milliseconds_8: float
    milliseconds_30: float
    neighbour_overlap_ratio: float
    overlap_prompts: int
    resident_megabytes: float
    peak_megabytes: float
    start_seconds: float
    imports_torch: bool


def bench_embedding(
    folder: Path | None = None,
    *,
    prompts: Sequence[str] | None = None,
    repeats: int = 45,
    threads: int | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> EmbeddingReport:
    """Measure the exported model.

    Args:
        folder: of the model; None takes the default.
        prompts: for the overlap; a fifth of them asks, the rest is the store. None makes some up,
            which lie closer to each other than real ones.
        repeats: of each timing, each with prompts not seen before.
        threads: of the served model; None takes as many as there are cores.
        seed: of the made-up prompts and the split.
        say: called with a line before each step.

    Raises:
        EmbeddingUnavailableError: there is no model, or a controller could not serve with it.
        ValueError: too few prompts to judge the overlap with.
    """
    served = OnnxEmbedding(folder, threads=threads)
    rng = np.random.default_rng(seed)
    say("timing")
    times = {count: _milliseconds(served, count, repeats, rng) for count in _BATCHES}
    texts = list(dict.fromkeys(prompts if prompts is not None else made_up_prompts(900, rng)))
    say(f"comparing with the float model on {len(texts)} prompts")
    overlap, stored = _overlap(served, OnnxEmbedding(folder, is_int8=False), texts, rng)
    say(f"starting a controller over {RESIDENT_PROMPTS} profiled prompts")
    cost = serving_cost(served, RESIDENT_PROMPTS, folder)
    return EmbeddingReport(
        milliseconds_1=times[1],
        milliseconds_8=times[8],
        milliseconds_30=times[30],
        neighbour_overlap_ratio=overlap,
        overlap_prompts=stored,
        resident_megabytes=cost.resident_megabytes,
        peak_megabytes=cost.peak_megabytes,
        start_seconds=cost.start_seconds,
        imports_torch=cost.imports_torch,
    )


def report_as_json(report: EmbeddingReport) -> dict[str, Any]:
    """Plain values."""
    return asdict(report)


def _milliseconds(
    backend: OnnxEmbedding, count: int, repeats: int, rng: np.random.Generator
) -> float:
    times: list[float] = []
    for _ in range(repeats + 1):
        texts = made_up_prompts(count, rng)
        started = time.perf_counter()
        backend.embed(texts)
        times.append(time.perf_counter() - started)
    return 1e3 * float(np.median(times[1:]))  # the first one also sets up memory


def _overlap(
    served: OnnxEmbedding, exact: OnnxEmbedding, texts: list[str], rng: np.random.Generator
) -> tuple[float, int]:
    asked = len(texts) // _QUERY_SHARE
    if len(texts) - asked < 2 * _OVERLAP_AT or asked < 1:
        raise ValueError(f"{len(texts)} different prompts are too few to compare neighbours with")
    order = rng.permutation(len(texts))
    queries = [texts[row] for row in order[:asked]]
    store = exact.embed([texts[row] for row in order[asked:]])
    wanted = exact_search(store, exact.embed(queries), _OVERLAP_AT)[1]
    found = exact_search(store, served.embed(queries), _OVERLAP_AT)[1]
    return overlap_ratio(found, wanted), len(store)
