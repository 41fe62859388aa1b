"""The pass that writes rows: one Arrow file for each input file, with a note beside it when it is finished."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from dlrm_scale.data.dataset.dataset import Part, PartWriter
from dlrm_scale.data.durable import fsync_file
from dlrm_scale.data.preprocess.column_statistics import FileStatistics
from dlrm_scale.data.preprocess.count_pass import count_block, counts_file
from dlrm_scale.data.preprocess.map_block import MappedBlock, map_block
from dlrm_scale.data.preprocess.passes import PassProgress, Workers
from dlrm_scale.data.preprocess.staging import Staging
from dlrm_scale.data.source.bad_rows import BadRow, BadRowLimit, rejected_line
from dlrm_scale.data.source.inputs import InputFile
from dlrm_scale.data.source.row_sources import ReadOptions, open_rows
from dlrm_scale.data.vocabulary.id_counts import FileIdCounts
from dlrm_scale.data.vocabulary.vocabulary import Vocabulary

__all__ = ["WrittenPart", "part_file", "rejected_part_file", "write_parts"]

WrittenPart = tuple[Part, FileStatistics]


def part_file(index: int) -> str:
    """Name of an Arrow file."""
    return f"part-{index:05d}.arrow"


def rejected_part_file(part: str) -> str:
    """Name, in the staging folder, of the rejected rows of the input file that a part is made of."""
    return f"{part}.rejected.tsv"


def write_parts(
    files: Sequence[InputFile],
    training_lines: Sequence[int | None],
    vocabularies: Sequence[Vocabulary],
    staging: Staging,
    options: ReadOptions,
    *,
    first_part: int,
    multi_hot: Sequence[str],
    jobs: int,
    count_memory_bytes: int | None,
    progress: PassProgress,
) -> list[WrittenPart]:
    """Write the rows of every file that isn't finished yet.

    Args:
        files: the input.
        training_lines: lines at the start of each file that train; None for all.
        vocabularies: C1 to C26.
        staging: where the parts go.
        options: how rows are read.
        first_part: number of the first file's part.
        multi_hot: names of columns with several ids a row.
        jobs: threads.
        count_memory_bytes: count the ids of training rows of a file in so much memory; None: they are counted already.
        progress: told after each piece.

    Raises:
        DataError: a file is cut off, damaged or changed meanwhile, or has too many bad rows.
        DatasetError: a part can't be written.
    """
    limit = BadRowLimit(options.max_bad_rows)

    def write_file(index: int, workers: Workers) -> WrittenPart:
        name, counted = part_file(first_part + index), counts_file(index)
        note = staging.finished(name)
        if note is not None and staging.holds(name) and (count_memory_bytes is None or staging.holds(counted)):
            part, statistics = Part(**note["part"]), FileStatistics.from_json(note["statistics"])
            limit.add_earlier(files[index].path, statistics.bad_rows)
            progress.skip(index, files[index].size_bytes, rows=part.rows, bad_rows=statistics.bad_rows)
            return part, statistics
        statistics = FileStatistics()
        with ExitStack() as stack:
            counts = None
            if count_memory_bytes is not None:
                counts = FileIdCounts(staging.path / counted, memory_bytes=count_memory_bytes)
                stack.callback(counts.abort)
            rejected = stack.enter_context(_RejectedRows(staging.path / rejected_part_file(name)))
            source = stack.enter_context(open_rows(files[index], options))
            writer = stack.enter_context(
                PartWriter(staging.path / name, source=files[index].path.name, multi_hot=multi_hot)
            )

            def work(piece: Any) -> MappedBlock:
                block = source.parse(piece)
                if counts is not None:
                    count_block(counts, block, block.training_rows(training_lines[index]))
                return map_block(block, vocabularies, training_lines[index])

            def consume(mapped: MappedBlock) -> None:
                for bad in mapped.bad_rows:
                    limit.add(bad)
                    rejected.add(bad)
                writer.write(mapped.labels, mapped.dense, mapped.ids, mapped.bags)
                statistics.merge(mapped.statistics)
                progress.tick(index, source.position_bytes, rows=len(mapped.labels), bad_rows=len(mapped.bad_rows))

            workers.over_pieces(source.pieces(), work, consume)
            progress.tick(index, files[index].size_bytes)
            files[index].check_unchanged()
            if counts is not None:
                counts.close()
            part = writer.close()
        staging.finish(name, {"part": asdict(part), "statistics": statistics.to_json()})
        return part, statistics

    with Workers(jobs, len(files)) as workers:
        return workers.over_files(lambda index: write_file(index, workers), progress)


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
