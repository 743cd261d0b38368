"""Means and counts of outcomes by prompt and destination, growing on both axes."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

_MOST_COUNTED: Final = np.iinfo(np.uint16).max - 1
"""A full counter goes on as a moving average over so many observations."""


class OutcomeTable:
    """A table for one kind of outcome, such as scores.

    Where nothing was observed but bounds, the greatest one stands beside a count of 0.
    """

    def __init__(self) -> None:
        self._means = np.full((0, 0), np.nan, dtype=np.float32)
        self._counts = np.zeros((0, 0), dtype=np.uint16)
        self._column_sum = np.zeros(0)
        self._column_count = np.zeros(0, dtype=np.int64)
        self._bound_sum = np.zeros(0)

    @classmethod
    def of(cls, means: NDArray[np.float32], counts: NDArray[np.uint16]) -> "OutcomeTable":
        """A table of these float32[rows, columns] means and uint16[rows, columns] counts."""
        table = cls()
        table._means = means.astype(np.float32)
        table._counts = counts.astype(np.uint16)
        is_observed = counts > 0
        table._column_sum = np.sum(means, axis=0, dtype=np.float64, where=is_observed)
        table._column_count = is_observed.sum(axis=0).astype(np.int64)
        table._bound_sum = np.sum(
            means, axis=0, dtype=np.float64, where=~is_observed & ~np.isnan(means)
        )
        return table

    def observe_at_least(self, row: int, column: int, bound: float, shape: tuple[int, int]) -> None:
        """Take in that an outcome was at least so great; the table has this shape then."""
        self._make_room(shape)
        if not self._counts[row, column]:
            old = self._means[row, column]
            new = np.fmax(old, np.float32(bound))
            self._means[row, column] = new
            self._bound_sum[column] += new - np.nan_to_num(old)

    def observe(self, row: int, column: int, value: float, shape: tuple[int, int]) -> None:
        """Take in an outcome; the table has this shape then."""
        self._make_room(shape)
        count = int(self._counts[row, column])
        old = float(np.nan_to_num(self._means[row, column]))
        if not count:  # a bound, which was none of the outcomes
            self._bound_sum[column] -= old
            old = 0.0
        new = old + (value - old) / (count + 1)
        self._means[row, column] = new
        new = float(self._means[row, column])  # as it was rounded, so that the sums stay true
        self._counts[row, column] = min(count + 1, _MOST_COUNTED)
        self._column_sum[column] += new - old
        self._column_count[column] += count == 0

    def means(self, shape: tuple[int, int]) -> NDArray[np.float32]:
        """float32[shape]; NaN where nothing was observed. A view."""
        self._make_room(shape)
        return self._means[: shape[0], : shape[1]]

    def counts(self, shape: tuple[int, int]) -> NDArray[np.uint16]:
        """uint16[shape]; observations behind each mean. A view."""
        self._make_room(shape)
        return self._counts[: shape[0], : shape[1]]

    def of_rows(self, rows: NDArray[np.int64], columns: int) -> "OutcomeTable":
        """These rows, in this order, as a table of their own."""
        shape = (int(rows.max(initial=-1)) + 1, columns)
        return OutcomeTable.of(self.means(shape)[rows], self.counts(shape)[rows])

    def column_means(self, columns: int) -> tuple[FloatArray, NDArray[np.int64]]:
        """float64[columns] means over the rows that have one, int64[columns] how many those are."""
        self._make_room((self._means.shape[0], columns))
        count = self._column_count[:columns]
        return self._column_sum[:columns] / np.maximum(count, 1), count.copy()

    def column_levels(self, columns: int) -> tuple[FloatArray, NDArray[np.int64]]:
        """Like `column_means`, with the bounds taken in; the counts are the same.

        The likeliest mean of exponential outcomes that were observed, or only seen to go on for so
        long: everything that was seen over the number of those that ended.
        """
        means, count = self.column_means(columns)
        return means + self._bound_sum[:columns] / np.maximum(count, 1), count

    def _make_room(self, shape: tuple[int, int]) -> None:
        rows, columns = self._means.shape
        if shape[0] <= rows and shape[1] <= columns:
            return
        grown = (
            rows if shape[0] <= rows else max(shape[0], rows + rows // 4, 64),
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
        self._bound_sum = np.concatenate([self._bound_sum, np.zeros(extra)])
