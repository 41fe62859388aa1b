"""From finished parts to the manifest: split ranges, facts about columns, the rejected rows in one file."""

from collections.abc import Callable, Sequence
from typing import Any

from dlrm_scale.data.dataset.dataset import ColumnInfo, DatasetManifest
from dlrm_scale.data.dataset.split import SplitRule, row_ranges
from dlrm_scale.data.durable import fsync_file
from dlrm_scale.data.preprocess.column_statistics import FileStatistics, category_statistics, integer_statistics
from dlrm_scale.data.preprocess.staging import Staging
from dlrm_scale.data.preprocess.transforms import DENSE_RULE, GIVEN_DENSE_RULE
from dlrm_scale.data.preprocess.write_pass import WrittenPart, rejected_part_file
from dlrm_scale.data.source.bad_rows import REJECTED_HEADER
from dlrm_scale.data.vocabulary.id_facts import IdFacts
from dlrm_scale.data.vocabulary.vocabulary import VOCABULARY_RULE, Vocabulary, mapping_fingerprint
from dlrm_scale.errors import DataError

__all__ = ["assemble_manifest", "check_rows", "collect_rejected"]


def check_rows(total: FileStatistics, rule: SplitRule, notes: list[str], *, earlier_rows: int = 0) -> None:
    """Refuse an input without rows to train on; note what is odd.

    Args:
        total: sums over the rows that were read.
        rule: the split.
        notes: for the user; grows.
        earlier_rows: training rows that the dataset has already.

    Raises:
        DataError: no rows, or none that train.
    """
    train, held_out = (int(rows) for rows in total.rows)
    if train + held_out == 0:
        bad = f", {total.bad_rows:,} bad ones were left out" if total.bad_rows else ""
        raise DataError(
            f"the input holds no good rows{bad}",
            remedy="check the files; without --max-bad-rows the first bad row is named with its reason",
        )
    if train + earlier_rows == 0 and rule.kind != "unlabeled":
        raise DataError(
            f"all {held_out:,} rows are held out by --validation {rule}, none are left to train on",
            remedy="give a smaller fraction, or none",
        )
    if held_out == 0 and rule.kind != "none":
        notes.append(f"--validation {rule} leaves no validation rows")
    if total.padded_rows:
        notes.append(f"{total.padded_rows:,} short rows were padded (--pad-short-rows)")


def collect_rejected(parts: Sequence[str], bad_rows: int, staging: Staging, name: str, notes: list[str]) -> list[str]:
    """Join the rejected rows of all files, in order; return the names of the files that were made.

    Args:
        parts: of the files that were read.
        bad_rows: how many there are.
        staging: where they are.
        name: of the file to make.
        notes: for the user; grows.
    """
    if not bad_rows:
        return []
    rejected = staging.path / name
    with rejected.open("w", encoding="utf-8") as out:
        out.write(REJECTED_HEADER)
        for part in parts:
            path = staging.path / rejected_part_file(part)
            if path.exists():
                with path.open(encoding="utf-8") as lines:
                    out.writelines(lines)
    fsync_file(rejected)
    notes.append(f"{bad_rows:,} bad rows were left out; they are in {name} with their reasons")
    return [name]


def assemble_manifest(
    written: Sequence[WrittenPart],
    vocabularies: Sequence[Vocabulary],
    facts_of: Callable[[Vocabulary], IdFacts],
    rule: SplitRule,
    *,
    vocabulary_rule: dict[str, Any],
    multi_hot: Sequence[str],
    text_ids: str | None,
) -> DatasetManifest:
    """Describe the dataset.

    Args:
        written: all parts in order, with their sums.
        vocabularies: C1 to C26.
        facts_of: tells what is known about a column's ids.
        rule: the split.
        vocabulary_rule: how the vocabularies were made.
        multi_hot: names of columns with several ids a row.
        text_ids: how ids stood in the text of the rows, None where there was none.
    """
    files = [statistics for _, statistics in written]
    total = FileStatistics.total(files)
    assert total.ready_rows in (0, int(total.rows.sum())), "dense features of two kinds"
    columns = [
        ColumnInfo(
            name=vocabulary.column,
            table_rows=vocabulary.table_rows,
            method=vocabulary.method,
            statistics=category_statistics(total, vocabulary, facts_of(vocabulary)),
            multi_hot=vocabulary.column in multi_hot,
        )
        for vocabulary in vocabularies
    ]
    rows = [int(statistics.rows.sum()) for statistics in files]
    names = ("train", "held_out")
    labeled = rule.kind != "unlabeled"
    return DatasetManifest(
        parts=tuple(part for part, _ in written),
        columns=tuple(columns),
        transforms={
            "dense": GIVEN_DENSE_RULE if total.ready_rows else DENSE_RULE,
            "categories": {
                **VOCABULARY_RULE,
                "rule": vocabulary_rule,
                "text_ids": text_ids,
                "mapping_fingerprint": mapping_fingerprint(vocabularies),
            },
        },
        split=row_ranges(rule, rows, [int(statistics.rows[0]) for statistics in files]),
        statistics={
            "rows": sum(rows),
            "validation_rule": str(rule),
            "labeled": labeled,
            **{
                name: {
                    "rows": int(total.rows[k]),
                    "positive_rate": (
                        int(total.positives[k]) / int(total.rows[k]) if labeled and total.rows[k] else None
                    ),
                }
                for k, name in enumerate(names)
            },
            "padded_rows": total.padded_rows,
            "bad_rows": total.bad_rows,
            "integers": integer_statistics(total),
            "files": [statistics.to_json() for statistics in files],
        },
    )
