"""Small datasets made without the preprocessor."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dlrm_scale.data.dataset.dataset import ColumnInfo, Dataset, DatasetManifest, PartWriter, RowRange, write_manifest
from dlrm_scale.data.source.raw_block import Bags
from dlrm_scale.schema import CATEGORY_COLUMNS, INTEGER_COLUMNS

__all__ = ["bags_of", "make_dataset", "row_numbers"]

ROWS_LIMIT = 1 << 24  # row / ROWS_LIMIT is exact in float32 and harmless as a feature


def make_dataset(
    path: Path,
    rows: int | Sequence[int],
    table_rows: int | Sequence[int] = 50,
    seed: int = 0,
    split: Mapping[str, Sequence[tuple[int, int]]] | None = None,
    multi_hot: Mapping[str, int] | None = None,
    skew: int = 3,
) -> Dataset:
    """Write and open a dataset whose first dense feature holds the number of the row (see `row_numbers`).

    The other features are random; a label depends on them, so that a model can learn something.

    Args:
        path: the folder; made if absent.
        rows: rows of each part, or of the only part.
        table_rows: rows of each table, or of every table.
        seed: of the features.
        split: ranges by split; all rows are training rows by default.
        multi_hot: columns with bags of 0 to that many ids, repeated ones among them.
        skew: exponent of the ids' power law; 1 makes all ids equally frequent.
    """
    multi_hot = {} if multi_hot is None else multi_hot
    path.mkdir(parents=True, exist_ok=True)
    rows_per_part = [rows] if isinstance(rows, int) else list(rows)
    tables = [table_rows] * len(CATEGORY_COLUMNS) if isinstance(table_rows, int) else list(table_rows)
    random = np.random.Generator(np.random.Philox(seed))
    effects = [random.standard_normal(n) for n in tables]
    parts, start = [], 0
    for index, n in enumerate(rows_per_part):
        numbers = np.arange(start, start + n)
        dense = random.random((len(INTEGER_COLUMNS), n), np.float32)
        dense[0] = numbers / ROWS_LIMIT
        # Power-law ids, as in click logs: row 0 is the hottest.
        ids = np.stack([(t * random.random(n) ** skew).astype(np.int32) for t in tables])
        bags = {}
        for name, largest in multi_hot.items():
            lengths = random.integers(0, largest + 1, n)
            values = (tables[CATEGORY_COLUMNS.index(name)] * random.random(lengths.sum()) ** skew).astype(np.int32)
            bags[name] = Bags(values=values, offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        score = np.zeros(n)
        for name, effect, column in zip(CATEGORY_COLUMNS, effects, ids, strict=True):
            score += _bag_sums(effect, bags[name]) if name in bags else effect[column]
        score /= len(tables) ** 0.5
        labels = (random.random(n) < 1 / (1 + np.exp(1 - score))).astype(np.uint8)
        with PartWriter(path / f"part-{index:05d}.arrow", source=f"day_{index}", multi_hot=multi_hot) as writer:
            writer.write(labels, dense, ids, bags)
            parts.append(writer.close())
        start += n
    given = {"train": [(0, start)]} if split is None else split
    write_manifest(
        path,
        DatasetManifest(
            parts=tuple(parts),
            columns=tuple(
                ColumnInfo(name=name, table_rows=n, method="modulo", statistics={}, multi_hot=name in multi_hot)
                for name, n in zip(CATEGORY_COLUMNS, tables, strict=True)
            ),
            transforms={"seed": seed},
            split={
                name: tuple(RowRange(start=a, end=z) for a, z in given.get(name, ()))
                for name in ("train", "validation", "test")
            },
            statistics={},
        ),
    )
    return Dataset.open(path)


def row_numbers(dense: object) -> npt.NDArray[np.int64]:
    """Rows of the dataset, `[n]` int64, from dense features `[n, 13]` of `make_dataset`."""
    values = np.asarray(dense)
    return (values[:, 0] * ROWS_LIMIT).astype(np.int64)


def bags_of(bags: Bags) -> list[list[int]]:
    """Ids of each row."""
    return [bags.values[a:z].tolist() for a, z in pairwise(bags.offsets)]


def _bag_sums(effect: npt.NDArray[np.float64], bags: Bags) -> npt.NDArray[np.float64]:
    rows = np.repeat(np.arange(len(bags.offsets) - 1), np.diff(bags.offsets))
    return np.bincount(rows, weights=effect[bags.values], minlength=len(bags.offsets) - 1)
