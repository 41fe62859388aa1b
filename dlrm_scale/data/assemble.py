"""From finished parts to the manifest: split ranges, facts about columns, the rejected rows in one file."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dlrm_scale.data.bad_rows import REJECTED_HEADER
from dlrm_scale.data.column_statistics import FileStatistics, category_statistics, integer_statistics
from dlrm_scale.data.dataset import ColumnInfo, DatasetManifest
from dlrm_scale.data.durable import fsync_file
from dlrm_scale.data.split import SplitRule, row_ranges
from dlrm_scale.data.staging import REJECTED_FILE, Staging
from dlrm_scale.data.transforms import DENSE_RULE
from dlrm_scale.data.tsv import FIRST_CATEGORY_BIT
from dlrm_scale.data.vocabulary import VOCABULARY_RULE, Vocabulary, mapping_fingerprint
from dlrm_scale.data.write_pass import RowLookups, WrittenPart, rejected_part_file
from dlrm_scale.errors import DataError

__all__ = ["assemble_manifest", "check_rows", "collect_rejected"]


def check_rows(total: FileStatistics, rule: SplitRule, notes: list[str]) -> None:
    """Refuse an input without rows to train on; note what is odd.

    Raises:
        DataError: no rows, or none that train.
    """
    train, held_out = (int(rows) for rows in total.rows)
    if train + held_out == 0:
        raise DataError("the input holds no good rows", remedy="check the files; see --max-bad-rows for broken ones")
    if train == 0:
        raise DataError(
            f"all {held_out:,} rows are held out by --validation {rule}, none are left to train on",
            remedy="give a smaller fraction, or none",
        )
    if held_out == 0 and rule.kind != "none":
        notes.append(f"--validation {rule} leaves no validation rows")
    if total.padded_rows:
        notes.append(f"{total.padded_rows:,} short rows were padded (--pad-short-rows)")
    if total.bad_rows:
        notes.append(f"{total.bad_rows:,} bad rows were left out; they are in {REJECTED_FILE} with their reasons")


def collect_rejected(files: int, bad_rows: int, staging: Staging) -> list[str]:
    """Join the rejected rows of all files, in order; return the names of the files that were made."""
    if not bad_rows:
        return []
    rejected = staging.path / REJECTED_FILE
    with rejected.open("w", encoding="utf-8") as out:
        out.write(REJECTED_HEADER)
        for index in range(files):
            part = staging.path / rejected_part_file(index)
            if part.exists():
                with part.open(encoding="utf-8") as lines:
                    out.writelines(lines)
    fsync_file(rejected)
    return [REJECTED_FILE]


def assemble_manifest(
    written: Sequence[WrittenPart],
    vocabularies: Sequence[Vocabulary],
    unique_ids: Sequence[int | None],
    lookups: RowLookups | None,
    rule: SplitRule,
    vocabulary_rule: dict[str, object],
) -> DatasetManifest:
    """Describe the dataset.

    Args:
        written: parts in file order.
        vocabularies: C1 to C26.
        unique_ids: distinct ids in training rows by column, None where they weren't counted.
        lookups: lookups of each table row; None where the vocabularies' counts tell them.
        rule: the split.
        vocabulary_rule: how the vocabularies were made.
    """
    total = FileStatistics.total([statistics for _, statistics in written])
    columns = [
        ColumnInfo(
            name=vocabulary.column,
            table_rows=vocabulary.table_rows,
            method=vocabulary.method,
            statistics=category_statistics(
                column,
                total,
                _counted_lookups(column, vocabulary, total) if lookups is None else lookups.counts[column],
                unique_ids=unique_ids[column],
            ),
        )
        for column, vocabulary in enumerate(vocabularies)
    ]
    rows = [int(statistics.rows.sum()) for _, statistics in written]
    names = ("train", "held_out")
    return DatasetManifest(
        parts=tuple(part for part, _ in written),
        columns=tuple(columns),
        transforms={
            "dense": DENSE_RULE,
            "categories": {
                **VOCABULARY_RULE,
                **vocabulary_rule,
                "mapping_fingerprint": mapping_fingerprint(vocabularies),
            },
        },
        split=row_ranges(rule, rows, [int(statistics.rows[0]) for _, statistics in written]),
        statistics={
            "rows": sum(rows),
            "validation_rule": str(rule),
            **{
                name: {
                    "rows": int(total.rows[k]),
                    "positive_rate": int(total.positives[k]) / int(total.rows[k]) if total.rows[k] else None,
                }
                for k, name in enumerate(names)
            },
            "padded_rows": total.padded_rows,
            "bad_rows": total.bad_rows,
            "integers": integer_statistics(total),
        },
    )


def _counted_lookups(column: int, vocabulary: Vocabulary, total: FileStatistics) -> npt.NDArray[np.int64]:
    missing = total.missing[0, FIRST_CATEGORY_BIT + column]
    unknown = total.out_of_vocabulary[0, column]
    return np.concatenate([[missing, unknown], vocabulary.counts]).astype(np.int64)
