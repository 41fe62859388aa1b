"""The first batch in the middle of an epoch of 4.4 billion rows: a position is computed, nothing before it is read."""

from pathlib import Path

import numpy as np
import pytest

from dlrm_scale.config import DataConfig
from dlrm_scale.data.dataset.dataset import (
    ROWS_PER_RECORD_BATCH,
    ColumnInfo,
    Dataset,
    DatasetManifest,
    Part,
    RowRange,
    Rows,
)
from dlrm_scale.data.loading.loader import TrainLoader
from dlrm_scale.data.source.raw_block import Bags
from dlrm_scale.schema import CATEGORY_COLUMNS

# Days of the 1TB set are this uneven; the last is validation.
PART_ROWS = [195_841_983 - 1_234_567 * (day % 7) for day in range(24)]
TRAINING_ROWS = sum(PART_ROWS[:-1])


class TerabyteDataset(Dataset):
    """Makes record batches when they are read: C1 and C2 hold a row's number, bags of C3 its last digit."""

    def __init__(self, multi_hot: tuple[str, ...] = ()) -> None:
        split = {
            "train": (RowRange(start=0, end=TRAINING_ROWS),),
            "validation": (RowRange(start=TRAINING_ROWS, end=sum(PART_ROWS)),),
            "test": (),
        }
        self.path = Path("terabyte")
        self.manifest = DatasetManifest(
            parts=tuple(
                Part(file=f"part-{day:05d}.arrow", rows=rows, size_bytes=0, xxh3_128="", source="")
                for day, rows in enumerate(PART_ROWS)
            ),
            columns=tuple(
                ColumnInfo(name=name, table_rows=1 << 17, method="hash", statistics={}, multi_hot=name in multi_hot)
                for name in CATEGORY_COLUMNS
            ),
            transforms={},
            split=split,
            statistics={},
            fingerprint="4.4e9",
        )
        self.multi_hot = multi_hot
        self.starts = np.concatenate([[0], np.cumsum(PART_ROWS)])
        self.reads: list[tuple[int, int]] = []

    def read(self, part_index: int, record_batch_index: int) -> Rows:
        """Make the rows."""
        self.reads.append((part_index, record_batch_index))
        first = record_batch_index * ROWS_PER_RECORD_BATCH
        numbers = np.arange(first, min(first + ROWS_PER_RECORD_BATCH, PART_ROWS[part_index])) + self.starts[part_index]
        ids = np.zeros((26, len(numbers)), np.int32)
        ids[0], ids[1] = numbers >> 16, numbers & 0xFFFF
        lengths = (numbers % 10).astype(np.int32)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        bags = {name: Bags(values=np.repeat(lengths, lengths), offsets=offsets) for name in self.multi_hot}
        return Rows((numbers % 2).astype(np.uint8), np.zeros((13, len(numbers)), np.float32), ids, bags)


@pytest.mark.parametrize("multi_hot", [(), ("C3",)])
@pytest.mark.parametrize(("batch_size", "ranks", "position"), [(65_536, 2, 0.66), (2_048, 1, 0.999_999)])
def test_a_resume_anywhere_in_a_terabyte_reads_only_its_windows(
    multi_hot: tuple[str, ...], batch_size: int, ranks: int, position: float
) -> None:
    config = DataConfig(batch_size=batch_size)
    probe = TrainLoader(TerabyteDataset(), config, rank=0, ranks=1, epochs=2)
    step = int(probe.steps_per_epoch * position)
    at = {"epoch": 1, "step_in_epoch": step, "stream_rows_consumed": step * probe.order.rows_per_step}
    cursor = {**probe.start.to_json(), **at}
    assert probe.steps_per_epoch == -(-TRAINING_ROWS // batch_size)

    dataset = TerabyteDataset(multi_hot)
    loader = TrainLoader(dataset, config, rank=ranks - 1, ranks=ranks, epochs=2, cursor=cursor)
    batch = next(loader)
    loader.close()
    # A window of 16,384 rows touches at most four record batches, and the thread may be a window ahead in each stream.
    streams = loader.order.streams // ranks
    assert streams <= len(dataset.reads) <= streams * 8
    c1, c2 = (batch.sparse_features[name].values().numpy() for name in ("C1", "C2"))
    rows = (c1 << 16) + c2
    assert np.array_equal(rows, loader.row_numbers(1, step))
    assert len(np.unique(rows)) == batch_size // ranks
    assert rows.max() < TRAINING_ROWS
    assert np.array_equal(batch.labels, rows % 2)
    if multi_hot:
        c3 = batch.sparse_features["C3"]
        assert np.array_equal(c3.lengths(), rows % 10)
        assert np.array_equal(c3.values(), np.repeat(rows % 10, rows % 10))
