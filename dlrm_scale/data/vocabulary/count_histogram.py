"""How many ids (or table rows) occur how often: all that thresholds and hot-row curves need, in little memory.

n occurrences make at most sqrt(2 n) different counts: 94,000 for the 4.4 billion rows of the 1TB set.
"""

import numpy as np
import numpy.typing as npt

__all__ = ["CountHistogram"]

_SMALL = 1 << 14
"""Counts below are nearly all there are; each has a place of its own."""

_Pairs = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


class CountHistogram:
    """Gathers counts."""

    def __init__(self) -> None:
        self._small = np.zeros(_SMALL, np.int64)
        # Greater counts, ascending, and how many ids have each.
        self._large: _Pairs = (np.empty(0, np.int64), np.empty(0, np.int64))

    def add(self, counts: npt.NDArray[np.int64]) -> None:
        """Add the counts of further ids, [n] int64, at least 0."""
        large = counts >= _SMALL
        if large.any():
            self._add_large(counts[large])
            counts = counts[~large]
        self._small += np.bincount(counts, minlength=_SMALL)

    def _add_large(self, counts: npt.NDArray[np.int64]) -> None:
        values, numbers = np.unique(counts, return_counts=True)
        joined, places = np.unique(np.concatenate([self._large[0], values]), return_inverse=True)
        sums = np.zeros(len(joined), np.int64)
        np.add.at(sums, places, np.concatenate([self._large[1], numbers]))
        self._large = joined, sums

    def copy(self) -> "CountHistogram":
        """Return an independent one."""
        result = CountHistogram()
        result._small, result._large = self._small.copy(), self._large
        return result

    def _pairs(self) -> _Pairs:
        """Return the different counts, ascending, and how many ids have each."""
        small = np.flatnonzero(self._small)
        return np.concatenate([small, self._large[0]]), np.concatenate([self._small[small], self._large[1]])

    @property
    def total(self) -> int:
        """Ids that were added."""
        return int(self._pairs()[1].sum())

    @property
    def occurrences(self) -> int:
        """Sum of their counts."""
        values, numbers = self._pairs()
        return int((values * numbers).sum())

    def at_least(self, count: int) -> int:
        """How many ids have this count or a greater one."""
        values, numbers = self._pairs()
        return int(numbers[values >= count].sum())

    def cut_off(self, most: int) -> tuple[int, int]:
        """Find which ids are the `most` most frequent ones.

        Returns:
            A count c and a number k: all ids with a count above c are, and k of those with count c. (0, 0) where there
            are no more than `most`.
        """
        values, numbers = self._pairs()
        if numbers.sum() <= most:
            return 0, 0
        # Ids with this count or a greater one.
        above = np.cumsum(numbers[::-1])[::-1]
        place = int(np.flatnonzero(above > most)[-1])
        return int(values[place]), int(most - (above[place] - numbers[place]))

    def of_most_frequent(self, ids: int) -> int:
        """Sum of the counts of the `ids` most frequent ids."""
        values, numbers = self._pairs()
        values, numbers = values[::-1], numbers[::-1]
        taken = np.minimum(numbers, np.maximum(0, ids - (np.cumsum(numbers) - numbers)))
        return int((values * taken).sum())
