"""The record batches that were read last."""

import time
from collections import OrderedDict

from dlrm_scale.data.dataset.dataset import Dataset, Rows

__all__ = ["RecordBatchCache"]


class RecordBatchCache:
    """Keeps a few decoded record batches (1.3 MB each), so that small datasets aren't read once for every stream.

    Args:
        dataset: where they come from.
        capacity: record batches that are kept.

    Attributes:
        fetch_seconds: how long reading took so far.
    """

    def __init__(self, dataset: Dataset, capacity: int = 8) -> None:
        self._dataset = dataset
        self._capacity = capacity
        self.fetch_seconds = 0.0
        self._kept: OrderedDict[tuple[int, int], Rows] = OrderedDict()

    def read(self, part_index: int, record_batch_index: int) -> Rows:
        """Return labels `[n]`, dense features `[13, n]` and ids `[26, n]`; don't write to them.

        Raises:
            DatasetError: as `Dataset.read`.
        """
        key = (part_index, record_batch_index)
        rows = self._kept.get(key)
        if rows is None:
            start = time.perf_counter()
            rows = self._kept[key] = self._dataset.read(part_index, record_batch_index)
            self.fetch_seconds += time.perf_counter() - start
            if len(self._kept) > self._capacity:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
        return rows
