"""The pass that writes rows: one Arrow file for each input file, with a note beside it when it is finished."""

import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from numba import njit

from dlrm_scale.data.bad_rows import BadRow, BadRowLimit, rejected_line
from dlrm_scale.data.column_statistics import FileStatistics
from dlrm_scale.data.compressed import open_bytes
from dlrm_scale.data.dataset import Part, PartWriter
from dlrm_scale.data.durable import fsync_file
from dlrm_scale.data.inputs import InputFile
from dlrm_scale.data.passes import PassProgress, run_over_files
from dlrm_scale.data.staging import Staging
from dlrm_scale.data.transforms import dense_features
from dlrm_scale.data.tsv import read_blocks
from dlrm_scale.data.vocabulary import Vocabulary
from dlrm_scale.schema import CATEGORY_COLUMNS

__all__ = ["RowLookups", "WrittenPart", "part_file", "rejected_part_file", "write_parts"]

WrittenPart = tuple[Part, FileStatistics]


def part_file(index: int) -> str:
    """Name of the Arrow file of an input file."""
    return f"part-{index:05d}.arrow"


def rejected_part_file(index: int) -> str:
    """Name, in the staging folder, of the rejected rows of an input file."""
    return f"part-{index:05d}.rejected.tsv"


@njit(cache=True, nogil=True)
def _add_lookups(rows: Any, lookups: Any) -> None:  # pragma: no cover - compiled
    for i in range(rows.shape[0]):
        lookups[rows[i]] += 1


class RowLookups:
    """How often training rows look up each table row, where no counted vocabulary tells it; threads may share it.

    Attributes:
        counts: for each column [table_rows] int64.
    """

    def __init__(self, vocabularies: Sequence[Vocabulary]) -> None:
        self.counts = [np.zeros(vocabulary.table_rows, np.int64) for vocabulary in vocabularies]
        self._locks = [threading.Lock() for _ in vocabularies]

    def add_part(self, path: Path, training_rows: int) -> None:
        """Add the first `training_rows` rows of a finished part, read back from the page cache."""
        with pa.OSFile(str(path), "rb") as file:
            reader = pa.ipc.open_file(file)
            left = training_rows
            for index in range(reader.num_record_batches):
                if left <= 0:
                    break
                batch = reader.get_batch(index)
                for column, name in enumerate(CATEGORY_COLUMNS):
                    rows = batch.column(name).to_numpy()[:left]
                    with self._locks[column]:
                        _add_lookups(rows, self.counts[column])
                left -= batch.num_rows


def write_parts(
    files: Sequence[InputFile],
    training_lines: Sequence[int | None],
    vocabularies: Sequence[Vocabulary],
    staging: Staging,
    *,
    pad_short_rows: bool,
    max_bad_rows: int,
    jobs: int,
    progress: PassProgress,
    lookups: RowLookups | None,
) -> list[WrittenPart]:
    """Write the rows of every file that isn't finished yet.

    Args:
        files: the input.
        training_lines: lines at the start of each file that train; None for all.
        vocabularies: C1 to C26.
        staging: where the parts go.
        pad_short_rows: see `read_blocks`.
        max_bad_rows: bad rows, over all files, that are left out before it is an error.
        jobs: threads.
        progress: told after each block.
        lookups: counts the lookups of training rows; None where they are known.

    Raises:
        DataError: a file is cut off, damaged or changed meanwhile, or has too many bad rows.
        DatasetError: a part can't be written.
    """
    limit = BadRowLimit(max_bad_rows)

    def work(index: int) -> WrittenPart:
        name = part_file(index)
        note = staging.finished(name)
        if note is not None and staging.holds(name):
            part, statistics = Part(**note["part"]), FileStatistics.from_json(note["statistics"])
            limit.add_earlier(files[index].path, statistics.bad_rows)
            progress.tick(index, files[index].size_bytes, rows=part.rows, bad_rows=statistics.bad_rows)
        else:
            part, statistics = _write_part(
                index, files[index], training_lines[index], vocabularies, staging, pad_short_rows, limit, progress
            )
            staging.finish(name, {"part": asdict(part), "statistics": statistics.to_json()})
        if lookups is not None:
            lookups.add_part(staging.where(name), int(statistics.rows[0]))
        return part, statistics

    return run_over_files(work, len(files), jobs=jobs, progress=progress)


def _write_part(
    index: int,
    file: InputFile,
    training_lines: int | None,
    vocabularies: Sequence[Vocabulary],
    staging: Staging,
    pad_short_rows: bool,
    limit: BadRowLimit,
    progress: PassProgress,
) -> WrittenPart:
    statistics = FileStatistics()
    rejected = _RejectedRows(staging.path / rejected_part_file(index))
    told_bad_rows = 0

    def on_bad_row(bad: BadRow) -> None:
        limit.add(bad)
        statistics.bad_rows += 1
        rejected.add(bad)

    with (
        rejected,
        open_bytes(file.path) as source,
        PartWriter(staging.path / part_file(index), source=file.path.name) as writer,
    ):
        for block in read_blocks(source, on_bad_row=on_bad_row, pad_short_rows=pad_short_rows):
            ids: npt.NDArray[np.int32] = np.empty(block.categories.shape, np.int32)
            for column, vocabulary in enumerate(vocabularies):
                vocabulary.map(block.categories[column], block.missing, ids[column])
            writer.write(block.labels, dense_features(block.integers), ids)
            statistics.add(block, ids, block.training_rows(training_lines))
            progress.tick(index, source.position_bytes, rows=block.rows, bad_rows=statistics.bad_rows - told_bad_rows)
            told_bad_rows = statistics.bad_rows
        progress.tick(index, source.position_bytes, bad_rows=statistics.bad_rows - told_bad_rows)
        file.check_unchanged()
        part = writer.close()
    return part, statistics


class _RejectedRows:
    """Writes rejected rows as they come; makes no file without one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._out: IO[str] | None = None
        path.unlink(missing_ok=True)

    def add(self, bad: BadRow) -> None:
        if self._out is None:
            self._out = self._path.open("w", encoding="utf-8")
        self._out.write(rejected_line(bad))

    def __enter__(self) -> "_RejectedRows":
        return self

    def __exit__(self, *error: object) -> None:
        if self._out is not None:
            self._out.close()
            fsync_file(self._path)
