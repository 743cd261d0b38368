"""How fast prompts are embedded, how well 8 bits serve, and what it takes in memory."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from controller.bench.store import DESTINATIONS, made_up_contents, sample_embeddings
from controller.predictors.embedding import EmbeddingUnavailableError, OnnxEmbedding
from controller.predictors.neighbour_index import exact_search, overlap_ratio
from controller.predictors.neighbours import Shrinkage, Target, shrunk_quality
from controller.profiler.quality_store import QualityStore

RESIDENT_PROMPTS: Final = 36_497
"""As many as RouterBench has."""

_BATCHES: Final = (1, 8, 30)
_OVERLAP_AT: Final = 10
_QUERY_SHARE: Final = 5
_CHILD_SECONDS: Final = 300.0

_SUBJECTS: Final = (
    "a second-order differential equation|the harmonic oscillator|a rotating frame of reference",
    "the French Revolution|the fall of Constantinople|the silk trade of the Middle Ages",
    "mitochondria in muscle cells|protein folding|gene expression in yeast",
    "a contract without consideration|the duty of care|the burden of proof",
    "supply and demand for wheat|inflation after a war|a central bank's interest rate",
    "a red-black tree|a deadlock between two threads|the travelling salesman problem",
    "covalent bonds in benzene|acid and base titration|the entropy of mixing",
    "memory in early childhood|classical conditioning|a patient with anxiety",
    "the categorical imperative|free will and determinism|utilitarian ethics",
    "tectonic plates under the Pacific|glacial erosion|monsoon winds over India",
    "the sonnets of Shakespeare|magic realism in novels|the voice of an unreliable narrator",
    "a suspension bridge in strong wind|fatigue cracks in steel|a heat exchanger",
)
_TASKS: Final = (
    "Explain {} to a student who has heard of it once, and give one everyday example that shows "
    "why it matters and where a first guess about it goes wrong.",
    "Which of these statements about {} is correct: it is always conserved, it depends on the "
    "observer, it was first described in the last century, or none of them?",
    "Write a short summary of {} in three sentences, then list two open questions that "
    "researchers still argue about and say which one you would study first.",
    "A colleague claims that {} can be understood without any mathematics at all; say whether you "
    "agree, and defend the answer with one argument and one counterexample.",
    "Compare {} with {}, name one thing they share and one in which they differ, and tell how an "
    "expert would notice the difference in practice.",
)


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
        resident_megabytes: memory of a fresh process that serves estimates from a store of
            `RESIDENT_PROMPTS` and has built its index; includes the controller's own code.
        start_seconds: from that process's start to its first estimates, by exact search, before it
            builds the index; includes making up the prompts.
        imports_torch: whether that process ended up with torch in memory.
    """

    milliseconds_1: float
    milliseconds_8: float
    milliseconds_30: float
    neighbour_overlap_ratio: float
    overlap_prompts: int
    resident_megabytes: float
    start_seconds: float
    imports_torch: bool


def bench_embedding(
    folder: Path | None = None,
    *,
    prompts: Sequence[str] | None = None,
    repeats: int = 15,
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
        EmbeddingUnavailableError: there is no model, or a child process could not serve with it.
        ValueError: too few prompts to judge the overlap with.
    """
    served = OnnxEmbedding(folder, threads=threads)
    rng = np.random.default_rng(seed)
    say("timing")
    times = {count: _milliseconds(served, count, repeats, rng) for count in _BATCHES}
    texts = list(dict.fromkeys(prompts if prompts is not None else made_up_prompts(900, rng)))
    say(f"comparing with the float model on {len(texts)} prompts")
    overlap, stored = _overlap(served, OnnxEmbedding(folder, is_int8=False), texts, rng)
    say(f"starting a process that serves from {RESIDENT_PROMPTS} prompts")
    resident = _resident(folder)
    return EmbeddingReport(
        milliseconds_1=times[1],
        milliseconds_8=times[8],
        milliseconds_30=times[30],
        neighbour_overlap_ratio=overlap,
        overlap_prompts=stored,
        resident_megabytes=resident["resident_megabytes"],
        start_seconds=resident["start_seconds"],
        imports_torch=resident["imports_torch"],
    )


def report_as_json(report: EmbeddingReport) -> dict[str, Any]:
    """Plain values."""
    return asdict(report)


def made_up_prompts(count: int, rng: np.random.Generator) -> list[str]:
    """Questions of about 40 tokens about a dozen fields; a few may be alike."""
    subjects = [subject for field in _SUBJECTS for subject in field.split("|")]
    prompts: list[str] = []
    for number in range(count):
        first, second = rng.choice(len(subjects), 2, replace=False)
        task = _TASKS[int(rng.integers(len(_TASKS)))]
        text = task.format(subjects[first], subjects[second])
        prompts.append(f"{text} (case {number + int(rng.integers(10_000))})")
    return prompts


def serve_once(folder: str | None) -> dict[str, Any]:
    """In a fresh process: load everything that serving needs, estimate once, and tell the cost.

    Args:
        folder: of the model; None takes the default.
    """
    import controller.app  # noqa: F401  # what a serving controller has in memory

    rng = np.random.default_rng(0)
    backend = OnnxEmbedding(None if folder is None else Path(folder))
    embeddings = sample_embeddings(RESIDENT_PROMPTS, 0, rng, backend.dimension)[0]
    contents = made_up_contents(embeddings, DESTINATIONS, rng)
    store = QualityStore.from_contents(contents)
    targets = [
        Target(name, model, 0.5)
        for name, model in zip(contents.destinations, contents.models, strict=True)
    ]
    del embeddings, contents
    asked = backend.embed(made_up_prompts(30, rng))
    shrunk_quality(store.evidence(asked, targets, Shrinkage().neighbours))
    serving_at = time.time()
    build = store.index_build()
    if build is not None:
        build.run()
        store.adopt(build)
    del build
    shrunk_quality(store.evidence(asked, targets, Shrinkage().neighbours))
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident_megabytes": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
        "imports_torch": "torch" in sys.modules,
        "serving_at": serving_at,
    }


def _resident(folder: Path | None) -> dict[str, Any]:
    program = (
        "import json, sys; from controller.bench.embedding import serve_once; "
        "print(json.dumps(serve_once(json.loads(sys.argv[1]))))"
    )
    argument = json.dumps(None if folder is None else str(folder))
    started = time.time()  # both processes' clock
    try:
        ended = subprocess.run(
            [sys.executable, "-c", program, argument],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_CHILD_SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired as error:
        raise EmbeddingUnavailableError(
            f"a fresh process did not serve within {_CHILD_SECONDS:g} s"
        ) from error
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise EmbeddingUnavailableError(f"a fresh process could not serve: {last[0]}") from error
    found = json.loads(ended.stdout.splitlines()[-1])
    return {**found, "start_seconds": found["serving_at"] - started}


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
