"""How fast the quality store finds neighbours, and how many of the true ones it finds."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from controller.quality.neighbour_index import exact_search, overlap_ratio
from controller.quality.neighbours import NeighbourTarget, Shrinkage, shrunk_quality
from controller.quality.store import EMBEDDING_DIMENSION, QualityStore
from controller.quality.store_contents import StoreContents

SIZES: Final = (36_497, 1_000_000)
"""RouterBench's prompts, and the size that the store is made for."""

DESTINATIONS: Final = 11
_QUERIES: Final = 30
_RECALL_QUERIES: Final = 300
_RECALL_AT: Final = 10
_PROMPTS_PER_TOPIC: Final = 50
_INTRINSIC_DIMENSION: Final = 64
_SPREAD: Final = 0.75


@dataclass(frozen=True, slots=True)
class StoreRow:
    """One size of the store.

    Attributes:
        lookup_milliseconds: median of finding the 10 nearest of 30 prompts.
        estimate_milliseconds: median of the whole estimate of 30 prompts at 11 destinations.
        recall_at_10: share of the true 10 nearest found.
        build_seconds: for making the store with its index from arrays.
        index: "exact" or "graph".
    """

    prompts: int
    lookup_milliseconds: float
    estimate_milliseconds: float
    recall_at_10: float
    build_seconds: float
    index: str


def bench_store(
    sizes: Sequence[int] = SIZES,
    *,
    repeats: int = 15,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> list[StoreRow]:
    """Measure look-ups in stores of made-up prompts.

    Args:
        sizes: prompts in the store; a million takes some minutes and 5 GB.
        repeats: of each measurement, each with other prompts.
        seed: of the prompts.
        say: called with a line before each size.
    """
    rows: list[StoreRow] = []
    for size in sizes:
        say(f"building a store of {size} prompts")
        rows.append(_measure(size, repeats, np.random.default_rng(seed)))
    return rows


def rows_as_json(rows: Sequence[StoreRow]) -> list[dict[str, Any]]:
    """Plain values."""
    return [asdict(row) for row in rows]


def sample_embeddings(
    count: int, queries: int, rng: np.random.Generator, dimension: int = EMBEDDING_DIMENSION
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Directions that lie about topics, as the embeddings of prompts do.

    The spread and the number of dimensions that matter are chosen so that the nearest neighbours
    are about as similar as those of real prompts; uniformly random directions have no neighbours,
    and no index finds them.

    Returns:
        float32[count, dimension] stored and float32[queries, dimension] asked, length 1.
    """
    inner = min(_INTRINSIC_DIMENSION, dimension)
    basis = np.linalg.qr(rng.standard_normal((dimension, inner)))[0].astype(np.float32)
    topics = max(1, count // _PROMPTS_PER_TOPIC)
    centres = rng.standard_normal((topics, inner), dtype=np.float32)
    vectors = np.empty((count + queries, dimension), dtype=np.float32)
    for start in range(0, len(vectors), 8_192):  # bounds the copies
        part = vectors[start : start + 8_192]
        of_topic = centres[rng.integers(topics, size=len(part))]
        noise = rng.standard_normal((len(part), inner), dtype=np.float32)
        part[:] = (of_topic + np.float32(_SPREAD) * noise) @ basis.T
        part /= np.linalg.norm(part, axis=1, keepdims=True)
    return vectors[:count], vectors[count:]


def made_up_contents(
    embeddings: NDArray[np.float32], destinations: int, rng: np.random.Generator
) -> StoreContents:
    """A store's contents with these embeddings and random outcomes everywhere."""
    prompts = len(embeddings)
    digests = np.zeros((prompts, 16), dtype=np.uint8)
    digests[:, :8] = np.arange(prompts, dtype="<u8")[:, None].view(np.uint8)
    shape = (prompts, destinations)
    names = tuple(f"node-{d}/model-{d}" for d in range(destinations))
    return StoreContents(
        digests=digests,
        embeddings=embeddings.astype(np.float16),
        destinations=names,
        models=tuple(name.partition("/")[2] for name in names),
        scores=rng.integers(2, size=shape).astype(np.float32),
        score_counts=np.ones(shape, dtype=np.uint16),
        tokens=rng.integers(20, 400, size=shape).astype(np.float32),
        token_counts=np.ones(shape, dtype=np.uint16),
    )


def _measure(size: int, repeats: int, rng: np.random.Generator) -> StoreRow:
    asked = max(_RECALL_QUERIES, _QUERIES * repeats)
    embeddings, queries = sample_embeddings(size, asked, rng)
    contents = made_up_contents(embeddings, DESTINATIONS, rng)
    started = time.perf_counter()
    store = QualityStore.from_contents(contents)
    build = store.index_build(seed=1)
    if build is not None:
        build.run()
        store.adopt(build)
    built = time.perf_counter() - started
    targets = [
        NeighbourTarget(name, model, 0.5)
        for name, model in zip(contents.destinations, contents.models, strict=True)
    ]
    neighbours = Shrinkage().neighbours
    lookups: list[float] = []
    estimates: list[float] = []
    for start in range(0, _QUERIES * repeats, _QUERIES):
        batch = queries[start : start + _QUERIES]
        started = time.perf_counter()
        store.nearest(batch, _RECALL_AT)
        between = time.perf_counter()
        shrunk_quality(store.evidence(batch, targets, neighbours))
        estimates.append(time.perf_counter() - between)
        lookups.append(between - started)
    judged = queries[:_RECALL_QUERIES]
    found = store.nearest(judged, _RECALL_AT)[1]
    return StoreRow(
        prompts=size,
        lookup_milliseconds=1e3 * float(np.median(lookups)),
        estimate_milliseconds=1e3 * float(np.median(estimates)),
        recall_at_10=overlap_ratio(found, exact_search(embeddings, judged, _RECALL_AT)[1]),
        build_seconds=built,
        index="exact" if store.recall_at_10 is None else "graph",
    )
