"""The passes before rows are written: how many lines there are, and which ids a vocabulary keeps."""

from collections.abc import Sequence

from dlrm_scale.data.bad_rows import BadRow, BadRowLimit
from dlrm_scale.data.compressed import open_bytes
from dlrm_scale.data.id_counts import IdCounter
from dlrm_scale.data.inputs import InputFile
from dlrm_scale.data.passes import PassProgress, run_over_files
from dlrm_scale.data.tsv import FIRST_CATEGORY_BIT, count_lines, read_blocks
from dlrm_scale.schema import CATEGORY_COLUMNS

__all__ = ["count_ids", "count_lines_of_files"]


def count_lines_of_files(files: Sequence[InputFile], *, jobs: int, progress: PassProgress) -> list[int]:
    """Count the lines of each file.

    Raises:
        DataError: a file is cut off or damaged.
    """

    def work(index: int) -> int:
        with open_bytes(files[index].path) as source:
            return count_lines(source, on_read=lambda: progress.tick(index, source.position_bytes))

    return run_over_files(work, len(files), jobs=jobs, progress=progress)


def count_ids(
    files: Sequence[InputFile],
    training_lines: Sequence[int | None],
    *,
    pad_short_rows: bool,
    max_bad_rows: int,
    jobs: int,
    progress: PassProgress,
) -> list[IdCounter]:
    """Count the ids of training rows, one counter a category column.

    All rows are parsed, the held-out ones too, so that a bad row is found before anything is written.

    Args:
        files: the input.
        training_lines: lines at the start of each file that train; None for all.
        pad_short_rows: see `read_blocks`.
        max_bad_rows: bad rows that are left out before it is an error.
        jobs: threads.
        progress: told after each block.

    Raises:
        DataError: a file is cut off or damaged, or has too many bad rows.
    """
    counters = [IdCounter() for _ in CATEGORY_COLUMNS]
    limit = BadRowLimit(max_bad_rows)

    def work(index: int) -> None:
        bad_rows = 0

        def on_bad_row(bad: BadRow) -> None:
            nonlocal bad_rows
            bad_rows += 1
            limit.add(bad)

        with open_bytes(files[index].path) as source:
            for block in read_blocks(source, on_bad_row=on_bad_row, pad_short_rows=pad_short_rows):
                n = block.training_rows(training_lines[index])
                # Threads begin at different columns, so that they seldom wait for one another's counters.
                for step in range(len(counters) if n else 0):
                    column = (step + index) % len(counters)
                    counters[column].add(block.categories[column, :n], block.missing[:n], FIRST_CATEGORY_BIT + column)
                progress.tick(index, source.position_bytes, rows=block.rows, bad_rows=bad_rows)
                bad_rows = 0
            progress.tick(index, source.position_bytes, bad_rows=bad_rows)

    run_over_files(work, len(files), jobs=jobs, progress=progress)
    return counters
