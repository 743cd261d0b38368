"""Observed quality and answer length of profiled prompts at each destination.

A row is a prompt, a column a destination; a prompt scored again at the same destination updates
its mean. The store holds no prompt text, only its digest and its embedding.

One lock guards the whole store, so that feedback may arrive on one thread while a batch is decided
on another. Building an approximate index takes long and holds the lock only at its two ends.
"""

import hashlib
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from controller.predictors.neighbour_index import (
    FLAT_UP_TO,
    FlatIndex,
    GraphIndex,
    NeighbourIndex,
)
from controller.predictors.neighbours import Evidence, Source, Target

EMBEDDING_DIMENSION: Final = 384
"""Of all-MiniLM-L6-v2."""

_UNIT_LENGTH_WITHIN: Final = 1e-2
_REBUILD_GROWTH: Final = 2.0
"""An approximate index is built anew when the prompts have grown this much since."""

FloatArray = NDArray[np.float64]


class InvalidRecordError(ValueError):
    """A record cannot be stored; its text says which field is wrong."""


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


@dataclass(frozen=True, slots=True, eq=False)
class StoreContents:
    """Everything in a store, as arrays: P prompts in order of arrival, C destinations.

    Attributes:
        digests: uint8[P, 16].
        embeddings: float16[P, dimension]; half the memory, and no order of neighbours that matters
            hangs on the rest.
        destinations: names of the columns.
        models: of each column.
        scores: float32[P, C], NaN where not scored.
        score_counts: uint16[P, C]; observations behind each.
        tokens: float32[P, C], NaN where not known.
        token_counts: uint16[P, C]; 0 beside a number means that only answers that were cut off are
            known, the longest of which had so many tokens.
    """

    digests: NDArray[np.uint8]
    embeddings: NDArray[np.float16]
    destinations: tuple[str, ...]
    models: tuple[str, ...]
    scores: NDArray[np.float32]
    score_counts: NDArray[np.uint16]
    tokens: NDArray[np.float32]
    token_counts: NDArray[np.uint16]


class IndexBuild:
    """An approximate index on its way; `run` it off the event loop, then let the store adopt it."""

    def __init__(self, vectors: NDArray[np.float16], seed: int) -> None:
        self._vectors = vectors
        self._seed = seed
        self.index: GraphIndex | None = None

    def run(self) -> None:
        """Build; takes about two minutes for a million prompts."""
        self.index = GraphIndex.build(self._vectors, np.random.default_rng(self._seed))


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
        self._scores = _Table()
        self._tokens = _Table()
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
        _check(contents)
        store = cls(contents.embeddings.shape[1], flat_up_to)
        store._rows = {bytes(digest): row for row, digest in enumerate(contents.digests)}
        store._columns = {name: column for column, name in enumerate(contents.destinations)}
        store._models = list(contents.models)
        store._digests = contents.digests.copy()
        store._embeddings = np.ascontiguousarray(contents.embeddings, dtype=np.float16)
        store._scores = _Table.of(contents.scores, contents.score_counts)
        store._tokens = _Table.of(contents.tokens, contents.token_counts)
        # A fixed seed: it only picks which rows are looked at.
        if index is not None and index.agrees_with(store._embeddings, np.random.default_rng(0)):
            store._index = index
            store._built_for = index.size
        elif store._rows:
            store._index = FlatIndex(store._dimension)
            store._index.add(store._embeddings)
        return store

    def contents(self) -> StoreContents:
        """Everything, copied."""
        with self._lock:
            shape = (len(self._rows), len(self._columns))
            return StoreContents(
                digests=self._digests[: shape[0]].copy(),
                embeddings=self._embeddings[: shape[0]].copy(),
                destinations=tuple(self._columns),
                models=tuple(self._models),
                scores=self._scores.means(shape).copy(),
                score_counts=self._scores.counts(shape).copy(),
                tokens=self._tokens.means(shape).copy(),
                token_counts=self._tokens.counts(shape).copy(),
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
        if not abs(length - 1.0) <= _UNIT_LENGTH_WITHIN:
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
                f"not {record.model!r}; name the destination anew when its model changes"
            )

    def add(self, records: Iterable[QualityRecord]) -> None:
        """Take records in, all or none.

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
                self._add(record)
            self._index_new_rows()

    def _add(self, record: QualityRecord) -> None:
        row = self._rows.get(record.prompt_digest)
        if row is None:
            row = len(self._rows)
            self._digests = _with_room(self._digests, row + 1)
            self._embeddings = _with_room(self._embeddings, row + 1)
            self._digests[row] = np.frombuffer(record.prompt_digest, dtype=np.uint8)
            self._embeddings[row] = record.embedding
            self._rows[record.prompt_digest] = row
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

    def index_build(self, seed: int = 0) -> IndexBuild | None:
        """An approximate index to be built, when there are too many prompts for the one in use."""
        with self._lock:
            prompts = len(self._rows)
            if prompts <= self._flat_up_to or prompts < _REBUILD_GROWTH * self._built_for:
                return None
            return IndexBuild(self._embeddings[:prompts].copy(), seed)

    def adopt(self, build: IndexBuild) -> None:
        """Search with a finished index from now on; prompts that came meanwhile are added to it.

        Raises:
            ValueError: the build has not run.
        """
        if build.index is None:
            raise ValueError("the index was not built; call run() first")
        with self._lock:
            self._built_for = build.index.size
            self._index = build.index
            self._index_new_rows()

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
        targets: Sequence[Target],
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
                similarity, rows = _with_identical_first(similarity, rows, known)
                is_identical[:, 0] = np.array(known) >= 0
            shape = (len(self._rows), len(self._columns))
            score_mean, score_count = self._scores.column_means(shape[1])
            token_mean, token_count = self._tokens.column_means(shape[1])
            scores = _gather(self._scores.means(shape), rows)
            tokens = _gather(self._tokens.means(shape), rows)
            is_bound = self._tokens.counts(shape)[np.maximum(rows, 0)] == 0
            own = [self._columns.get(target.destination, -1) for target in targets]
            same_model = [
                [c for c, model in enumerate(self._models) if model == target.model]
                for target in targets
            ]
        found = rows >= 0
        mean, mean_count, mean_source = _centres(
            own, same_model, score_mean, score_count, [t.prior_quality_ratio for t in targets]
        )
        mean_tokens, tokens_count, tokens_source = _centres(
            own, same_model, token_mean, token_count, [math.nan] * len(targets)
        )
        own_scores = _own(scores, own)
        cut_tokens = _own(np.where(is_bound, tokens, np.nan), own)
        tokens = np.where(is_bound, np.nan, tokens)
        own_tokens = _own(tokens, own)
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
            scores=_filled_from_model(own_scores, scores, same_model),
            # One more answer at the mean, so that a single one makes no prompt hard for all.
            difficulty=above_mean / (difficulty_count + 1.0),
            difficulty_count=difficulty_count.astype(np.int64),
            mean=mean,
            mean_count=mean_count,
            mean_source=mean_source,
            tokens=_filled_from_model(own_tokens, tokens, same_model),
            cut_tokens=cut_tokens,
            relative_length=np.where(
                heard_count > 0, ratio.sum(axis=2) / np.maximum(heard_count, 1), np.nan
            ),
            mean_tokens=mean_tokens,
            tokens_count=tokens_count,
            tokens_source=tokens_source,
        )


class _Table:
    """Means and counts of observations by row and column, growing on both axes.

    Where nothing was observed but bounds, the greatest one stands beside a count of 0.
    """

    def __init__(self) -> None:
        self._means = np.full((0, 0), np.nan, dtype=np.float32)
        self._counts = np.zeros((0, 0), dtype=np.uint16)
        self._column_sum = np.zeros(0)
        self._column_count = np.zeros(0, dtype=np.int64)

    @classmethod
    def of(cls, means: NDArray[np.float32], counts: NDArray[np.uint16]) -> "_Table":
        table = cls()
        table._means = means.astype(np.float32)
        table._counts = counts.astype(np.uint16)
        is_observed = counts > 0
        table._column_sum = np.sum(means, axis=0, dtype=np.float64, where=is_observed)
        table._column_count = is_observed.sum(axis=0).astype(np.int64)
        return table

    def observe_at_least(self, row: int, column: int, bound: float, shape: tuple[int, int]) -> None:
        self._make_room(shape)
        if not self._counts[row, column]:
            self._means[row, column] = np.fmax(self._means[row, column], np.float32(bound))

    def observe(self, row: int, column: int, value: float, shape: tuple[int, int]) -> None:
        self._make_room(shape)
        count = int(self._counts[row, column])
        old = float(self._means[row, column]) if count else 0.0
        new = old + (value - old) / (count + 1)
        self._means[row, column] = new
        new = float(self._means[row, column])  # as it was rounded, so that the sums stay true
        # A full counter goes on as a moving average over its last 65,535 observations.
        self._counts[row, column] = min(count + 1, np.iinfo(np.uint16).max - 1)
        self._column_sum[column] += new - old
        self._column_count[column] += count == 0

    def means(self, shape: tuple[int, int]) -> NDArray[np.float32]:
        self._make_room(shape)
        return self._means[: shape[0], : shape[1]]

    def counts(self, shape: tuple[int, int]) -> NDArray[np.uint16]:
        self._make_room(shape)
        return self._counts[: shape[0], : shape[1]]

    def column_means(self, columns: int) -> tuple[FloatArray, NDArray[np.int64]]:
        self._make_room((self._means.shape[0], columns))
        count = self._column_count[:columns]
        return self._column_sum[:columns] / np.maximum(count, 1), count.copy()

    def _make_room(self, shape: tuple[int, int]) -> None:
        rows, columns = self._means.shape
        if shape[0] <= rows and shape[1] <= columns:
            return
        grown = (
            rows if shape[0] <= rows else max(shape[0], 2 * rows, 64),
            columns if shape[1] <= columns else max(shape[1], columns + columns // 2, 8),
        )
        means = np.full(grown, np.nan, dtype=np.float32)
        counts = np.zeros(grown, dtype=np.uint16)
        means[:rows, :columns] = self._means
        counts[:rows, :columns] = self._counts
        self._means, self._counts = means, counts
        extra = grown[1] - columns
        self._column_sum = np.concatenate([self._column_sum, np.zeros(extra)])
        self._column_count = np.concatenate([self._column_count, np.zeros(extra, dtype=np.int64)])


def _with_room(array: NDArray[Any], rows: int) -> NDArray[Any]:
    if rows <= len(array):
        return array
    grown = np.zeros((max(rows, 2 * len(array), 64), *array.shape[1:]), dtype=array.dtype)
    grown[: len(array)] = array
    return grown


def _with_identical_first(
    similarity: NDArray[np.float32], rows: NDArray[np.int64], known: Sequence[int]
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The neighbours with the row of `known` (-1: none) moved to the front, or put there.

    8-bit embeddings of one text differ a little between batches, so that it may not come first,
    and an approximate search may miss it.
    """
    similarity, rows = similarity.copy(), rows.copy()
    for r, row in enumerate(known):
        if row < 0:
            continue
        places = np.flatnonzero(rows[r] == row)
        last = int(places[0]) if len(places) else rows.shape[1] - 1
        rows[r, 1 : last + 1] = rows[r, :last].copy()
        similarity[r, 1 : last + 1] = similarity[r, :last].copy()
        rows[r, 0], similarity[r, 0] = row, 1.0
    return similarity, rows


def _gather(values: NDArray[np.float32], rows: NDArray[np.int64]) -> FloatArray:
    """float64[R, K, C] of the rows, NaN where a row is -1."""
    if values.shape[0] == 0:
        return np.full((*rows.shape, values.shape[1]), np.nan)
    gathered = values[np.maximum(rows, 0)].astype(np.float64)
    gathered[rows < 0] = np.nan
    return gathered


def _own(values: FloatArray, own: Sequence[int]) -> FloatArray:
    """[R, K, C] -> [R, K, D]; NaN for targets without a column."""
    taken = np.full((*values.shape[:2], len(own)), np.nan)
    has_column = [d for d, column in enumerate(own) if column >= 0]
    taken[:, :, has_column] = values[:, :, [own[d] for d in has_column]]
    return taken


def _filled_from_model(
    own_values: FloatArray, values: FloatArray, same_model: Sequence[Sequence[int]]
) -> FloatArray:
    """The target's own values; where they are unknown, the mean over its model elsewhere."""
    filled = own_values.copy()
    for d, columns in enumerate(same_model):
        if not columns:
            continue
        of_model = values[:, :, list(columns)]
        known = ~np.isnan(of_model)
        count = known.sum(axis=2)
        mean = np.where(known, of_model, 0.0).sum(axis=2) / np.maximum(count, 1)
        is_filled = np.isnan(filled[:, :, d]) & (count > 0)
        filled[:, :, d][is_filled] = mean[is_filled]
    return filled


def _centres(
    own: Sequence[int],
    same_model: Sequence[Sequence[int]],
    means: FloatArray,
    counts: NDArray[np.int64],
    priors: Sequence[float],
) -> tuple[FloatArray, NDArray[np.int64], NDArray[np.int64]]:
    """For each target its own mean, else its model's, else the prior: value, count, source."""
    value = np.array(priors, dtype=np.float64)
    count = np.zeros(len(own), dtype=np.int64)
    source = np.full(len(own), int(Source.PRIOR), dtype=np.int64)
    for d, (column, columns) in enumerate(zip(own, same_model, strict=True)):
        elsewhere = [c for c in columns if counts[c] > 0]
        if column >= 0 and counts[column] > 0:
            value[d], count[d], source[d] = means[column], counts[column], Source.DESTINATION_MEAN
        elif elsewhere:
            count[d] = counts[elsewhere].sum()
            value[d] = float((means[elsewhere] * counts[elsewhere]).sum() / count[d])
            source[d] = Source.MODEL_MEAN
    return value, count, source


def _check(contents: StoreContents) -> None:
    prompts, columns = len(contents.digests), len(contents.destinations)
    wanted: list[tuple[str, NDArray[Any], tuple[int, ...]]] = [
        ("digests", contents.digests, (prompts, 16)),
        ("scores", contents.scores, (prompts, columns)),
        ("score_counts", contents.score_counts, (prompts, columns)),
        ("tokens", contents.tokens, (prompts, columns)),
        ("token_counts", contents.token_counts, (prompts, columns)),
    ]
    for name, array, shape in wanted:
        if array.shape != shape:
            raise InvalidRecordError(f"{name} has shape {array.shape}; expected {shape}")
    if contents.embeddings.ndim != 2 or len(contents.embeddings) != prompts:
        raise InvalidRecordError(
            f"there are {prompts} prompts and embeddings of shape {contents.embeddings.shape}"
        )
    if len(contents.models) != columns or len(set(contents.destinations)) != columns:
        raise InvalidRecordError("destinations are named twice or lack their models")
    if len({bytes(digest) for digest in contents.digests}) != prompts:
        raise InvalidRecordError("a prompt occurs twice")
    known_scores = contents.scores[~np.isnan(contents.scores)]
    faults: list[tuple[str, Callable[[], bool]]] = [
        ("an embedding is not of length 1", lambda: not _are_unit(contents.embeddings)),
        (
            "a score is not between 0 and 1",
            lambda: bool(((known_scores < 0) | (known_scores > 1)).any()),
        ),
        (
            "scores and their counts differ",
            lambda: _disagree(contents.scores, contents.score_counts),
        ),
        (
            "tokens and their counts differ",
            lambda: bool((np.isnan(contents.tokens) & (contents.token_counts > 0)).any()),
        ),
    ]
    for text, is_at_fault in faults:
        if is_at_fault():
            raise InvalidRecordError(text)


def _are_unit(embeddings: NDArray[Any]) -> bool:
    for start in range(0, len(embeddings), 8_192):  # bounds the copies
        part = embeddings[start : start + 8_192].astype(np.float32)
        lengths = np.sqrt(np.einsum("pd,pd->p", part, part))
        if not (np.abs(lengths - 1.0) <= _UNIT_LENGTH_WITHIN).all():
            return False
    return True


def _disagree(means: NDArray[np.float32], counts: NDArray[np.uint16]) -> bool:
    return bool((np.isnan(means) != (counts == 0)).any())
