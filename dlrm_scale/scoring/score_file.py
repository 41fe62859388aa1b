"""The file of scores: Parquet or CSV, a row for each row scored, in order.

row          int64    number of the row among all rows of the input, from 0
source       string   the file that it came from
line         int64    its line in that file (Parquet, .npy and datasets: its row), from 1
label        uint8    only where rows have labels
logit        float32
probability  float32  1 / (1 + exp(-logit))
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dlrm_scale.errors import ConfigError

__all__ = ["RowPlaces", "ScoreFormat", "ScoreWriter", "SourceLines", "score_format"]

ScoreFormat = Literal["parquet", "csv"]

_ENDINGS: dict[str, ScoreFormat] = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv"}


def score_format(path: Path) -> ScoreFormat:
    """Tell the format by the ending of the name.

    Raises:
        ConfigError: it has none that is known.
    """
    format_ = _ENDINGS.get(path.suffix.lower())
    if format_ is None:
        raise ConfigError(
            f"--out {path}: the ending tells no format", remedy="name a file that ends in .parquet or .csv"
        )
    return format_


@dataclass(frozen=True, kw_only=True)
class SourceLines:
    """One file of the input and the lines of its rows.

    Attributes:
        name: of the file.
        rows: good rows in it.
        lines_before: lines before the first row, as a header.
        rejected: lines of bad rows, ascending; they are no rows.
    """

    name: str
    rows: int
    lines_before: int = 0
    rejected: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    def lines(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Line numbers, from 1, of good rows, numbered from 0."""
        lines = rows + 1 + self.lines_before
        # how many bad ones lie before: each pushes the rows after it down by one
        return lines + np.searchsorted(self.rejected - np.arange(len(self.rejected)), lines, side="right")


@dataclass(frozen=True, kw_only=True)
class RowPlaces:
    """Where rows of the input come from.

    Attributes:
        sources: files in the order of their rows.
        ranges: rows of the input that are scored, as ascending (start, end).
    """

    sources: tuple[SourceLines, ...]
    ranges: tuple[tuple[int, int], ...]

    def rows(self, first: int, count: int) -> NDArray[np.int64]:
        """Numbers in the input of scored rows `[first, first + count)`."""
        lengths = np.array([end - start for start, end in self.ranges], np.int64)
        ends = np.cumsum(lengths)
        scored = np.arange(first, first + count)
        at = np.searchsorted(ends, scored, side="right")
        starts = np.array([start for start, _ in self.ranges], np.int64)
        rows: NDArray[np.int64] = starts[at] + scored - (ends - lengths)[at]
        return rows

    def of(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Index of the source, and the line in it, of rows of the input."""
        counts = np.array([source.rows for source in self.sources], np.int64)
        ends = np.cumsum(counts)
        at = np.searchsorted(ends, rows, side="right")
        lines = np.empty_like(rows)
        for index in np.unique(at).tolist():
            inside = at == index
            lines[inside] = self.sources[index].lines(rows[inside] - (ends - counts)[index])
        return at, lines


class ScoreWriter:
    """Writes scores in order; a context manager. The file is durable when it ends well.

    Args:
        path: a new file.
        format: of the file.
        places: where the rows come from.
        labeled: whether there are labels.
    """

    def __init__(self, path: Path, format: ScoreFormat, places: RowPlaces, *, labeled: bool) -> None:
        self._format: ScoreFormat = format
        self._places = places
        self._labeled = labeled
        self._rows = 0
        text: pa.DataType = pa.string()
        if format == "parquet":
            text = pa.dictionary(pa.int32(), pa.string())
        fields = [("row", pa.int64()), ("source", text), ("line", pa.int64())]
        fields += [("label", pa.uint8())] if labeled else []
        self._schema = pa.schema([*fields, ("logit", pa.float32()), ("probability", pa.float32())])
        self._names = pa.array([source.name for source in places.sources], pa.string())
        self._file = path.open("wb")
        self._writer = (
            pq.ParquetWriter(self._file, self._schema, compression="zstd", write_page_checksum=True)
            if format == "parquet"
            else pa_csv.CSVWriter(self._file, self._schema)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._writer.close()
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            # a writer that is left open complains when it is collected
            with suppress(OSError, ValueError, pa.ArrowException):
                self._writer.close()
            with suppress(OSError):
                self._file.close()

    def write(self, logits: NDArray[np.float32], labels: NDArray[np.uint8]) -> None:
        """Append the next rows: logits `[N]` float32, labels `[N]` uint8 (left out where there are none)."""
        rows = self._places.rows(self._rows, len(logits))
        self._rows += len(logits)
        sources, lines = self._places.of(rows)
        source = pa.DictionaryArray.from_arrays(pa.array(sources.astype(np.int32)), self._names)
        if self._format == "csv":
            source = source.dictionary_decode()
        columns: Sequence[pa.Array] = [
            pa.array(rows),
            source,
            pa.array(lines),
            *([pa.array(labels)] if self._labeled else []),
            pa.array(logits),
            pa.array(_probabilities(logits)),
        ]
        self._writer.write_table(pa.Table.from_arrays(columns, schema=self._schema))


def _probabilities(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    z = logits.astype(np.float64)
    decay = np.exp(-np.abs(z))
    probabilities: NDArray[np.float32] = (np.where(z >= 0, 1.0, decay) / (1 + decay)).astype(np.float32)
    return probabilities
