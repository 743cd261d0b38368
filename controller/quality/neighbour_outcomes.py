"""What neighbours brought, arranged for the targets of a batch.

Shapes: R requests, K neighbours, C columns of the store, D targets.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from controller.quality.neighbours import Source

FloatArray = NDArray[np.float64]


def with_identical_first(
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


def gathered(values: NDArray[np.float32], rows: NDArray[np.int64]) -> FloatArray:
    """float64[R, K, C] of the rows, NaN where a row is -1."""
    if values.shape[0] == 0:
        return np.full((*rows.shape, values.shape[1]), np.nan)
    taken = values[np.maximum(rows, 0)].astype(np.float64)
    taken[rows < 0] = np.nan
    return taken


def own_outcomes(values: FloatArray, own: Sequence[int]) -> FloatArray:
    """[R, K, C] -> [R, K, D]; NaN for targets without a column."""
    taken = np.full((*values.shape[:2], len(own)), np.nan)
    has_column = [d for d, column in enumerate(own) if column >= 0]
    taken[:, :, has_column] = values[:, :, [own[d] for d in has_column]]
    return taken


def filled_from_model(
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


def centres(
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
