"""The passes before rows are written: how many lines there are, and which ids a vocabulary keeps."""

from collections.abc import Sequence
from typing import Any

from dlrm_scale.data.preprocess.passes import PassProgress, Workers
from dlrm_scale.data.preprocess.staging import Staging
from dlrm_scale.data.source.bad_rows import BadRow, BadRowLimit
from dlrm_scale.data.source.compressed import open_bytes
from dlrm_scale.data.source.inputs import InputFile
from dlrm_scale.data.source.line_blocks import count_lines
from dlrm_scale.data.source.raw_block import RawBlock
from dlrm_scale.data.source.row_sources import ReadOptions, open_rows
from dlrm_scale.data.vocabulary.id_counts import FileIdCounts
from dlrm_scale.data.vocabulary.merged_counts import MergedCounts
from dlrm_scale.schema import CATEGORY_COLUMNS

__all__ = ["count_block", "count_ids", "count_lines_of_files", "counts_file", "merged_counts"]


def counts_file(index: int) -> str:
    """Name, in the staging folder, of the id counts of an input file."""
    return f"counts-{index:05d}.bin"


def merged_counts(files: int, staging: Staging, memory_bytes: int) -> list[MergedCounts]:
    """Return the counts of each column over all input files.

    Args:
        files: how many there are.
        staging: where their counts are.
        memory_bytes: for merging those of one column.
    """
    paths = [staging.where(counts_file(index)) for index in range(files)]
    return [MergedCounts(paths, column, memory_bytes=memory_bytes) for column in range(len(CATEGORY_COLUMNS))]


def count_lines_of_files(files: Sequence[InputFile], *, jobs: int, progress: PassProgress) -> list[int]:
    """Count the lines of each text file.

    Raises:
        DataError: a file is cut off or damaged.
    """

    def work(index: int) -> int:
        with open_bytes(files[index].path) as source:
            return count_lines(source, on_read=lambda: progress.tick(index, source.position_bytes))

    with Workers(jobs, len(files)) as workers:
        return workers.over_files(work, progress)


def count_block(counts: FileIdCounts, block: RawBlock, rows: int) -> None:
    """Count the ids of a block's first rows."""
    if rows == 0:
        return
    # Blocks begin at different columns, so that threads seldom wait for one another's counters.
    columns = len(CATEGORY_COLUMNS)
    for column in ((block.first_line + step) % columns for step in range(columns)):
        bags = block.bags.get(column)
        if bags is not None:
            counts.add_ids(column, bags.values[: bags.offsets[rows]])
        else:
            counts.add(column, block.categories[column, :rows], block.missing[:rows])


def count_ids(
    files: Sequence[InputFile],
    training_lines: Sequence[int | None],
    staging: Staging,
    options: ReadOptions,
    *,
    jobs: int,
    memory_bytes: int,
    progress: PassProgress,
) -> None:
    """Count the ids of training rows of every file that isn't counted yet, into a file of counts for each.

    All rows are parsed, the held-out ones too, so that a bad row is found before anything is written.

    Args:
        files: the input.
        training_lines: lines at the start of each file that train; None for all.
        staging: where the counts go.
        options: how rows are read.
        jobs: threads.
        memory_bytes: memory for the counts of a file.
        progress: told after each piece.

    Raises:
        DataError: a file is cut off or damaged, or has too many bad rows.
        DatasetError: counts can't be written.
    """
    limit = BadRowLimit(options.max_bad_rows)

    def count_file(index: int, workers: Workers) -> None:
        name = counts_file(index)
        note = staging.finished(name)
        if note is not None and staging.holds(name):
            limit.add_earlier(files[index].path, note["bad_rows"])
            progress.skip(index, files[index].size_bytes, rows=note["rows"], bad_rows=note["bad_rows"])
            return
        done = {"rows": 0, "bad_rows": 0}
        counts = FileIdCounts(staging.path / name, memory_bytes=memory_bytes)
        try:
            with open_rows(files[index], options) as source:

                def work(piece: Any) -> tuple[int, Sequence[BadRow]]:
                    block = source.parse(piece)
                    count_block(counts, block, block.training_rows(training_lines[index]))
                    return block.rows, block.bad_rows

                def consume(result: tuple[int, Sequence[BadRow]]) -> None:
                    rows, bad_rows = result
                    for bad in bad_rows:
                        limit.add(bad)
                    done["rows"] += rows
                    done["bad_rows"] += len(bad_rows)
                    progress.tick(index, source.position_bytes, rows=rows, bad_rows=len(bad_rows))

                workers.over_pieces(source.pieces(), work, consume)
                progress.tick(index, files[index].size_bytes)
            files[index].check_unchanged()
            counts.close()
        except BaseException:
            counts.abort()
            raise
        staging.finish(name, done)

    with Workers(jobs, len(files)) as workers:
        workers.over_files(lambda index: count_file(index, workers), progress)
