"""The quality predictor of a running controller: prompts in, estimates out, outcomes learned.

Everything here blocks and is called from threads; `request_manager` keeps it off the event loop.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from controller.config import QualitySettings
from controller.domain.cluster import Destination
from controller.domain.request import InferenceRequest
from controller.quality.embedding import (
    CachedEmbedding,
    EmbeddingBackend,
    EmbeddingUnavailableError,
    OnnxEmbedding,
    default_folder,
)
from controller.quality.files import QualityFolder
from controller.quality.index_build import StoreBounds
from controller.quality.neighbour_lengths import LengthPrior, answer_lengths
from controller.quality.neighbours import NeighbourTarget, Shrinkage, Source, shrunk_quality
from controller.quality.store import QualityRecord, prompt_digest
from controller.routing.answer_tokens import FleetAnswerLengths, lengths_of
from controller.routing.problem import FloatArray, IntArray

_COMPACT_AFTER: Final = 5000
"""Journal records that a start may have to read one by one."""

_NO_LIMIT_TOKENS: Final = 8192.0
"""Longer than the answers of small models get; the curve of lengths ends here."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one finished request teaches.

    Attributes:
        score_ratio: 0 to 1; None when nobody judged the answer.
        output_tokens: None when the length says nothing, such as after a cancel.
        was_cut: `output_tokens` are those that the request's limit allowed; it would have been
            longer.
    """

    text: str
    destination: str
    model: str
    score_ratio: float | None
    output_tokens: int | None
    was_cut: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """What profiled prompts say about a batch.

    Attributes:
        quality: float64[R, D], 0 to 1.
        output_tokens: float64[R, D]; mean within each request's max_tokens.
        median_tokens: float64[R, D]; the same for the median.
        quality_source: int64[R, D]; see `source_label`.
        quality_count: int64[R, D]; neighbours or scores behind each quality, 0 for a prior.
    """

    quality: FloatArray
    output_tokens: FloatArray
    median_tokens: FloatArray
    quality_source: IntArray
    quality_count: IntArray


def source_label(code: int) -> str:
    """In words, such as "neighbours" or "prior"."""
    return Source(code).label


def destination_key(node_id: str, model: str) -> str:
    """The name under which a destination's outcomes are kept."""
    return f"{node_id}/{model}"


@dataclass(frozen=True, slots=True)
class QualityRetention:
    """What bounds the quality store.

    Attributes:
        max_prompts: those that were silent longest go first.
        days: how long a prompt is kept after its last outcome.
    """

    max_prompts: int = 1_000_000
    days: float = math.inf

    def bounds(self, now: float) -> StoreBounds:
        """What a store may hold at this time, seconds since 1970."""
        return StoreBounds(self.max_prompts, now - 86_400 * self.days)


class QualityPredictor:
    """Estimates from profiled prompts; safe to call from several threads.

    Args:
        backend: embeds prompts.
        folder: the store and the files that keep it.
        retention: what `maintain` lets the store keep.
    """

    def __init__(
        self,
        backend: EmbeddingBackend,
        folder: QualityFolder,
        retention: QualityRetention | None = None,
    ) -> None:
        self._backend = CachedEmbedding(backend)
        self._folder = folder
        self._retention = retention or QualityRetention()
        self._shrinkage = Shrinkage()

    @property
    def profiled_prompts(self) -> int:
        """Prompts that something is known about."""
        return len(self._folder.store)

    def predict(
        self,
        requests: Sequence[InferenceRequest],
        destinations: Sequence[Destination],
        own: FleetAnswerLengths | None = None,
    ) -> Predictions | None:
        """Estimate a batch; None while nothing has been profiled, so nothing is embedded for it.

        Args:
            requests: R.
            destinations: D.
            own: how long the destinations' own answers got; None reads it from them.
        """
        store = self._folder.store
        if not len(store):
            return None
        targets = [
            NeighbourTarget(
                destination_key(destination.node_id, destination.model),
                destination.model,
                destination.mean_quality_ratio,
            )
            for destination in destinations
        ]
        texts = [request.text for request in requests]
        evidence = store.evidence(
            self._backend.embed(texts),
            targets,
            self._shrinkage.neighbours,
            [prompt_digest(text) for text in texts],
        )
        quality = shrunk_quality(evidence, self._shrinkage)
        limits = np.array([request.sampling.max_tokens for request in requests], dtype=np.float64)
        lengths = answer_lengths(
            evidence,
            limits,
            length_prior(lengths_of(destinations) if own is None else own, limits),
            self._shrinkage,
        )
        return Predictions(
            quality.value, lengths.mean, lengths.median, quality.source, quality.count
        )

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """float32[n, 384]; prompts that were embedded lately are remembered."""
        return self._backend.embed(texts)

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """Keep what finished requests taught, on disk before this returns.

        Raises:
            QualityFilesError: it cannot be written.
        """
        embeddings = self._backend.embed([outcome.text for outcome in outcomes])
        self._folder.append(
            [
                QualityRecord(
                    prompt_digest(outcome.text),
                    embedding,
                    outcome.destination,
                    outcome.model,
                    outcome.score_ratio,
                    outcome.output_tokens,
                    outcome.was_cut,
                )
                for outcome, embedding in zip(outcomes, embeddings, strict=True)
            ]
        )

    def maintain(self) -> int:
        """Drop what is not to be kept, build the index that a grown store needs, tidy the files.

        Blocks for minutes in a store of a million prompts; estimates go on meanwhile, with the
        index in use. Does nothing while the store is small and young.

        Returns:
            how many prompts were dropped.

        Raises:
            QualityFilesError: it cannot be written.
        """
        store = self._folder.store
        build = store.index_build(bounds=self._retention.bounds(time.time()))
        if build is not None:
            build.run()
            store.adopt(build)
        if build is not None or self._folder.journal_records > _COMPACT_AFTER:
            self._folder.compact()
        return 0 if build is None else build.dropped_prompts

    def close(self) -> None:
        """Close the files."""
        self._folder.close()


def length_prior(own: FleetAnswerLengths, limits: FloatArray) -> LengthPrior:
    """What the destinations' own latest answers say about lengths.

    Args:
        own: of D destinations.
        limits: float64[R]; greatest answer length of each request.
    """
    unlimited = np.append(limits, _NO_LIMIT_TOKENS)
    means, medians = own.within(unlimited)
    return LengthPrior(means[:-1], medians[:-1], means[-1])


def open_embedding(settings: QualitySettings) -> EmbeddingBackend:
    """The embedding model of the settings.

    Raises:
        EmbeddingUnavailableError: it is not there; the text says how to make it.
    """
    own = Path(settings.embedding_dir).expanduser() if settings.embedding_dir else None
    return OnnxEmbedding(own or default_folder())


def open_quality_predictor(settings: QualitySettings, data_dir: Path) -> QualityPredictor:
    """The predictor with the embedding model of the settings and the store in the data directory.

    Raises:
        EmbeddingUnavailableError: there is no embedding model; the text says how to make one.
        QualityFilesError: the store is damaged or in use.
    """
    if not settings.is_enabled:
        raise EmbeddingUnavailableError("it is switched off in the settings")
    backend = open_embedding(settings)
    folder = data_dir / "quality"
    store = QualityFolder(folder, backend.dimension, embedding_model=backend.model)
    retention = QualityRetention(settings.max_prompts, settings.keep_days or math.inf)
    return QualityPredictor(backend, store, retention)
