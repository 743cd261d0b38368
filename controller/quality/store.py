"""Observed quality and answer length of profiled prompts at each destination.

A row is a prompt, a column a destination; a prompt scored again at the same destination updates
its mean. The store holds no prompt text, only its digest and its embedding.

One lock guards the whole store, so that feedback may arrive on one thread while a batch is decided
on another. Building an approximate index takes long and holds the lock only at its two ends.
"""

import hashlib
import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from controller.quality.index_build import IndexBuild, StoreBounds, kept_rows
from controller.quality.neighbour_index import (
    FLAT_UP_TO,
    FlatIndex,
    GraphIndex,
    NeighbourIndex,
)
from controller.quality.neighbour_outcomes import (
    centres,
    filled_from_model,
    gathered,
    own_outcomes,
    with_identical_first,
)
from controller.quality.neighbours import Evidence, NeighbourTarget
from controller.quality.outcome_table import OutcomeTable
from controller.quality.store_contents import (
    UNIT_LENGTH_WITHIN,
    InvalidRecordError,
    StoreContents,
    check_contents,
)

EMBEDDING_DIMENSION: Final = 384
"""Of all-MiniLM-L6-v2."""

_REBUILD_GROWTH: Final = 2.0
"""An approximate index is built again when the prompts have grown this much since."""

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class QualityRecord:
    """What one prompt brought at one destination.

    Attributes:
        prompt_digest: from `prompt_digest`.
        embedding: float32[dimension], length 1.
        destination: name of the destination.
        model: name of its model; equal names at other destinations lend each other outcomes.
        score: 0 to 1; None when nobody judged the answer.
        output_tokens: length of the answer; None when unknown.
        was_cut: a limit ended the answer, so that it is only known to be at least so long.
    """

    prompt_digest: bytes
    embedding: NDArray[np.float32]
    destination: str
    model: str
    score: float | None = None
    output_tokens: int | None = None
    was_cut: bool = False


@dataclass(frozen=True, slots=True)
class ColumnSummary:
    """What is known of one destination.

    Attributes:
        mean_quality_ratio: mean of its prompts' scores; None when none was scored.
        scored_prompts: behind it.
        mean_output_tokens: None when no answer's length is known.
        answered_prompts: behind it.
    """

    destination: str
    model: str
    mean_quality_ratio: float | None
    scored_prompts: int
    mean_output_tokens: float | None
    answered_prompts: int


def prompt_digest(text: str) -> bytes:
    """16 bytes that stand for a prompt's exact text."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class QualityStore:
    """Profiled prompts and what each destination made of them.

    Args:
        dimension: of the embeddings.
        flat_up_to: prompts up to which the search is exact.
    """

    def __init__(self, dimension: int = EMBEDDING_DIMENSION, flat_up_to: int = FLAT_UP_TO) -> None:
        self._dimension = dimension
        self._flat_up_to = flat_up_to
        self._lock = threading.RLock()
        self._rows: dict[bytes, int] = {}
        self._columns: dict[str, int] = {}
        self._models: list[str] = []
        self._digests = np.zeros((0, 16), dtype=np.uint8)
        self._embeddings = np.zeros((0, dimension), dtype=np.float16)
        self._seen_times = np.zeros(0)
        self._scores = OutcomeTable()
        self._tokens = OutcomeTable()
        self._index: NeighbourIndex | None = None
        self._built_for = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def dimension(self) -> int:
        """Of the embeddings."""
        return self._dimension

    @property
    def indexed_prompts(self) -> int:
        """Prompts that the index holds; equal to the length unless something is broken."""
        return self._index.size if self._index is not None else 0

    @property
    def recall_at_10(self) -> float | None:
        """Measured recall of the index; None while the search is exact."""
        return self._index.recall_at_10 if self._index is not None else None

    @classmethod
    def from_contents(
        cls,
        contents: StoreContents,
        flat_up_to: int = FLAT_UP_TO,
        index: GraphIndex | None = None,
    ) -> "QualityStore":
        """A store of these contents, searched exactly until `index_build` gives a faster index.

        Args:
            contents: as `contents` gave them.
            flat_up_to: as above.
            index: kept from before; used when it holds just these embeddings, else ignored.

        Raises:
            InvalidRecordError: the arrays do not fit together, or hold what no record can.
        """
        check_contents(contents)
        store = cls(contents.embeddings.shape[1], flat_up_to)
        store._rows = {bytes(digest): row for row, digest in enumerate(contents.digests)}
        store._columns = {name: column for column, name in enumerate(contents.destinations)}
        store._models = list(contents.models)
        store._digests = contents.digests.copy()
        store._embeddings = np.ascontiguousarray(contents.embeddings, dtype=np.float16)
        store._seen_times = (
            np.full(len(contents.digests), np.inf)
            if contents.seen_times is None
            else contents.seen_times.astype(np.float64)
        )
        store._scores = OutcomeTable.of(contents.scores, contents.score_counts)
        store._tokens = OutcomeTable.of(contents.tokens, contents.token_counts)
        # A fixed seed: it only picks which rows are looked at.
        if index is not None and index.agrees_with(store._embeddings, np.random.default_rng(0)):
            store._index = index
            store._built_for = index.size
        elif store._rows:
            store._index = FlatIndex(store._dimension)
            store._index.add(store._embeddings)
        return store

    def contents(self) -> StoreContents:
        """Everything as it is now; what later outcomes may change is copied."""
        with self._lock:
            shape = (len(self._rows), len(self._columns))
            return StoreContents(
                digests=self._digests[: shape[0]],  # a row is never written twice
                embeddings=self._embeddings[: shape[0]],
                destinations=tuple(self._columns),
                models=tuple(self._models),
                scores=self._scores.means(shape).copy(),
                score_counts=self._scores.counts(shape).copy(),
                tokens=self._tokens.means(shape).copy(),
                token_counts=self._tokens.counts(shape).copy(),
                seen_times=self._seen_times[: shape[0]].copy(),
            )

    def check(self, record: QualityRecord) -> None:
        """Nothing when the record can be stored.

        Raises:
            InvalidRecordError: it cannot.
        """
        embedding = np.asarray(record.embedding)
        if len(record.prompt_digest) != 16:
            raise InvalidRecordError("a prompt's digest has 16 bytes; use prompt_digest")
        if embedding.shape != (self._dimension,):
            raise InvalidRecordError(
                f"the embedding has shape {embedding.shape}; this store takes ({self._dimension},)"
            )
        length = float(np.linalg.norm(embedding.astype(np.float64)))
        if not abs(length - 1.0) <= UNIT_LENGTH_WITHIN:
            raise InvalidRecordError(f"the embedding has length {length:g}; normalise it to 1")
        if not record.destination or not record.model:
            raise InvalidRecordError("a record names its destination and its model")
        if record.score is None and record.output_tokens is None:
            raise InvalidRecordError("a record has a score, output tokens, or both")
        if record.score is not None and not 0.0 <= record.score <= 1.0:
            raise InvalidRecordError(f"a score lies between 0 and 1, not {record.score!r}")
        if record.output_tokens is not None and record.output_tokens < 0:
            raise InvalidRecordError(f"output tokens cannot be {record.output_tokens}")
        known = self._columns.get(record.destination)
        if known is not None and self._models[known] != record.model:
            raise InvalidRecordError(
                f"{record.destination!r} was profiled with model {self._models[known]!r}, "
                f"not {record.model!r}; give the destination another name when its model changes"
            )

    def add(self, records: Iterable[QualityRecord], seen_time: float = math.inf) -> None:
        """Take records in, all or none.

        Args:
            records: in any order.
            seen_time: when the outcomes came, seconds since 1970; infinite ones never age.

        Raises:
            InvalidRecordError: a record cannot be stored; nothing was taken in.
        """
        records = list(records)
        with self._lock:
            models: dict[str, str] = {}
            for record in records:
                self.check(record)
                if models.setdefault(record.destination, record.model) != record.model:
                    raise InvalidRecordError(
                        f"these records give {record.destination!r} two models"
                    )
            for record in records:
                self._add(record, seen_time)
            self._index_new_rows()

    def _add(self, record: QualityRecord, seen_time: float) -> None:
        row = self._rows.get(record.prompt_digest)
        if row is None:
            row = len(self._rows)
            self._digests = _with_room(self._digests, row + 1)
            self._embeddings = _with_room(self._embeddings, row + 1)
            self._seen_times = _with_room(self._seen_times, row + 1)
            self._digests[row] = np.frombuffer(record.prompt_digest, dtype=np.uint8)
            self._embeddings[row] = record.embedding
            self._rows[record.prompt_digest] = row
        self._seen_times[row] = seen_time
        column = self._columns.get(record.destination)
        if column is None:
            column = len(self._columns)
            self._columns[record.destination] = column
            self._models.append(record.model)
        shape = (len(self._rows), len(self._columns))
        if record.score is not None:
            self._scores.observe(row, column, record.score, shape)
        if record.output_tokens is not None:
            if record.was_cut:
                self._tokens.observe_at_least(row, column, record.output_tokens, shape)
            else:
                self._tokens.observe(row, column, record.output_tokens, shape)

    def _index_new_rows(self) -> None:
        if self._index is None:
            if not self._rows:
                return
            self._index = FlatIndex(self._dimension)
        missing = self._embeddings[self._index.size : len(self._rows)]
        if len(missing):
            self._index.add(missing)

    def index_build(self, seed: int = 0, bounds: StoreBounds | None = None) -> IndexBuild | None:
        """An index to be built: for want of a fast one, or since prompts have to go.

        Args:
            seed: of the index.
            bounds: None keeps every prompt.
        """
        with self._lock:
            prompts = len(self._rows)
            seen_times = self._seen_times[:prompts].copy()
            rows = kept_rows(seen_times, bounds)
            is_graph = len(rows) > self._flat_up_to
            if len(rows) < prompts:
                return IndexBuild(self._embeddings[rows], rows, seen_times, is_graph, seed)
            if not is_graph or prompts < _REBUILD_GROWTH * self._built_for:
                return None
            # Not copied: a row is never written twice.
            return IndexBuild(self._embeddings[:prompts], rows, seen_times, is_graph, seed)

    def adopt(self, build: IndexBuild) -> None:
        """Search with a finished index from now on, and hold no more than it was built for.

        Prompts that came or were heard of again meanwhile stay, and are added to it.

        Raises:
            ValueError: the build has not run, or the store has dropped prompts since it began.
        """
        if build.index is None:
            raise ValueError("the index was not built; call run() first")
        with self._lock:
            if len(self._rows) < build.seen_rows:
                raise ValueError("prompts were dropped since the index was begun; build it again")
            if build.dropped_prompts:
                self._keep_only(build)
            self._index = build.index
            self._built_for = build.index.size if isinstance(build.index, GraphIndex) else 0
            self._index_new_rows()

    def _keep_only(self, build: IndexBuild) -> None:
        is_kept = np.ones(len(self._rows), dtype=np.bool_)
        is_kept[: build.seen_rows] = build.is_heard_again(self._seen_times)
        is_kept[build.rows] = False  # they come first, in the order of the index
        order = np.concatenate([build.rows, np.flatnonzero(is_kept)])
        self._digests = self._digests[order]
        self._embeddings = self._embeddings[order]
        self._seen_times = self._seen_times[order]
        self._scores = self._scores.of_rows(order, len(self._columns))
        self._tokens = self._tokens.of_rows(order, len(self._columns))
        self._rows = {bytes(digest): row for row, digest in enumerate(self._digests)}

    def save_index(self, folder: Path) -> tuple[str, ...]:
        """Write the approximate index into a folder; returns the files' names, none if exact.

        Raises:
            OSError: they cannot be written.
        """
        with self._lock:
            return self._index.save(folder) if isinstance(self._index, GraphIndex) else ()

    def columns(self) -> tuple[ColumnSummary, ...]:
        """What is known of each destination, in order of arrival."""
        with self._lock:
            score_mean, score_count = self._scores.column_means(len(self._columns))
            token_mean, token_count = self._tokens.column_means(len(self._columns))
            return tuple(
                ColumnSummary(
                    destination=name,
                    model=self._models[c],
                    mean_quality_ratio=float(score_mean[c]) if score_count[c] else None,
                    scored_prompts=int(score_count[c]),
                    mean_output_tokens=float(token_mean[c]) if token_count[c] else None,
                    answered_prompts=int(token_count[c]),
                )
                for name, c in self._columns.items()
            )

    def nearest(
        self, embeddings: NDArray[np.float32], neighbours: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Similarities float32[R, K] and rows int64[R, K] of the nearest prompts; -1 is none."""
        with self._lock:
            if self._index is None:
                empty = (len(embeddings), 0)
                return np.empty(empty, dtype=np.float32), np.empty(empty, dtype=np.int64)
            known = self._embeddings[: self._index.size]
            return self._index.search(embeddings, neighbours, known)

    def evidence(
        self,
        embeddings: NDArray[np.float32],
        targets: Sequence[NeighbourTarget],
        neighbours: int,
        digests: Sequence[bytes] | None = None,
    ) -> Evidence:
        """What the nearest prompts say about each request at each target.

        Args:
            embeddings: float32[R, dimension], length 1.
            targets: D destinations.
            neighbours: K; fewer when the store has fewer prompts.
            digests: of the requests' prompts; a stored prompt of the same text is then the first
                neighbour, of similarity 1, and marked as identical.
        """
        with self._lock:
            similarity, rows = self.nearest(embeddings, neighbours)
            is_identical = np.zeros(rows.shape, dtype=np.bool_)
            if digests is not None and rows.shape[1] > 0:
                known = [self._rows.get(digest, -1) for digest in digests]
                similarity, rows = with_identical_first(similarity, rows, known)
                is_identical[:, 0] = np.array(known) >= 0
            shape = (len(self._rows), len(self._columns))
            score_mean, score_count = self._scores.column_means(shape[1])
            token_mean, token_count = self._tokens.column_levels(shape[1])
            scores = gathered(self._scores.means(shape), rows)
            tokens = gathered(self._tokens.means(shape), rows)
            is_bound = self._tokens.counts(shape)[np.maximum(rows, 0)] == 0
            own = [self._columns.get(target.destination, -1) for target in targets]
            same_model = [
                [c for c, model in enumerate(self._models) if model == target.model]
                for target in targets
            ]
        found = rows >= 0
        mean, mean_count, mean_source = centres(
            own, same_model, score_mean, score_count, [t.prior_quality_ratio for t in targets]
        )
        mean_tokens, tokens_count, tokens_source = centres(
            own, same_model, token_mean, token_count, [math.nan] * len(targets)
        )
        own_scores = own_outcomes(scores, own)
        cut_tokens = own_outcomes(np.where(is_bound, tokens, np.nan), own)
        tokens = np.where(is_bound, np.nan, tokens)
        own_tokens = own_outcomes(tokens, own)
        rated = ~np.isnan(scores)
        difficulty_count = rated.sum(axis=2)
        above_mean = np.where(rated, scores - score_mean, 0.0).sum(axis=2)
        heard = ~np.isnan(tokens) & (token_mean > 0.0)
        heard_count = heard.sum(axis=2)
        ratio = np.where(heard, tokens / np.where(token_mean > 0.0, token_mean, 1.0), 0.0)
        return Evidence(
            similarity=np.where(found, similarity, 0.0).astype(np.float64),
            is_identical=is_identical,
            own_scores=own_scores,
            scores=filled_from_model(own_scores, scores, same_model),
            # One more answer at the mean, so that a single one makes no prompt hard for all.
            difficulty=above_mean / (difficulty_count + 1.0),
            difficulty_count=difficulty_count.astype(np.int64),
            mean=mean,
            mean_count=mean_count,
            mean_source=mean_source,
            tokens=filled_from_model(own_tokens, tokens, same_model),
            cut_tokens=cut_tokens,
            relative_length=np.where(
                heard_count > 0, ratio.sum(axis=2) / np.maximum(heard_count, 1), np.nan
            ),
            mean_tokens=mean_tokens,
            tokens_count=tokens_count,
            tokens_source=tokens_source,
        )


def _with_room(array: NDArray[Any], rows: int) -> NDArray[Any]:
    if rows <= len(array):
        return array
    room = max(rows, len(array) + len(array) // 4, 64)
    grown = np.zeros((room, *array.shape[1:]), dtype=array.dtype)
    grown[: len(array)] = array
    return grown
