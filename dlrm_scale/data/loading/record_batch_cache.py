"""The record batches that were read last."""

import threading
import time
from collections import OrderedDict

from dlrm_scale.data.dataset.dataset import Dataset, Rows

__all__ = ["RecordBatchCache"]


class RecordBatchCache:
    """Keeps a few decoded record batches (1.3 MB each), so that small datasets aren't read once for every stream.

    Threads may share it and read at the same time; two that want the same one at that moment both read it.

    Args:
        dataset: where they come from.
        capacity: record batches that are kept.

    Attributes:
        fetch_seconds: how long reading took so far, all threads together.
    """

    def __init__(self, dataset: Dataset, capacity: int = 8) -> None:
        self._dataset = dataset
        self._capacity = capacity
        self.fetch_seconds = 0.0
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[int, int], Rows] = OrderedDict()

    def read(self, part_index: int, record_batch_index: int) -> Rows:
        """Return labels `[n]`, dense features `[13, n]` and ids `[26, n]`; don't write to them.

        Raises:
            DatasetError: as `Dataset.read`.
        """
        key = (part_index, record_batch_index)
        with self._lock:
            rows = self._kept.get(key)
            if rows is not None:
                self._kept.move_to_end(key)
                return rows
        start = time.perf_counter()
        rows = self._dataset.read(part_index, record_batch_index)
        seconds = time.perf_counter() - start
        with self._lock:
            self.fetch_seconds += seconds
            self._kept[key] = rows
            self._kept.move_to_end(key)
            if len(self._kept) > self._capacity:
                self._kept.popitem(last=False)
        return rows
