"""Makes the vocabulary files of a dataset: from counted ids, from a rule, or from another dataset."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.data.preprocess.column_statistics import FileStatistics
from dlrm_scale.data.preprocess.memory_plan import MemoryPlan
from dlrm_scale.data.preprocess.options import DEFAULT_THRESHOLD, PreprocessOptions
from dlrm_scale.data.vocabulary.merged_counts import MergedCounts
from dlrm_scale.data.vocabulary.vocabulary import (
    FIRST_ID_ROW,
    Vocabulary,
    frequency_vocabulary,
    given_vocabulary,
    hashed_vocabulary,
    predicted_memory_bytes,
)
from dlrm_scale.data.vocabulary.vocabulary_file import (
    check_mapping,
    load_vocabulary,
    read_counts,
    save_vocabulary,
    stored_vocabulary_bytes,
)
from dlrm_scale.errors import DataError
from dlrm_scale.schema import CATEGORY_COLUMNS

__all__ = [
    "copy_vocabularies",
    "frequency_vocabularies",
    "given_vocabularies",
    "load_checked",
    "rule_vocabularies",
]


def frequency_vocabularies(
    counts: Sequence[MergedCounts], options: PreprocessOptions, plan: MemoryPlan, folder: Path
) -> list[int]:
    """Save a frequency vocabulary of each column, one at a time in memory; return the distinct ids of each.

    Raises:
        DatasetError: they don't fit the memory limit together, or can't be written.
    """
    unique_ids: list[int] = []
    sizes: list[tuple[str, int, int]] = []
    for name, merged in zip(CATEGORY_COLUMNS, counts, strict=True):

        def check(distinct_ids: int, kept_ids: int, name: str = name) -> None:
            unique_ids.append(distinct_ids)
            sizes.append((name, FIRST_ID_ROW + kept_ids, predicted_memory_bytes(kept_ids)))
            plan.check_vocabularies(sizes)

        vocabulary = frequency_vocabulary(
            name,
            merged,
            threshold=options.threshold or DEFAULT_THRESHOLD,
            max_rows=options.rows_of(name),
            on_counted=check,
        )
        save_vocabulary(folder, vocabulary, merged)
    return unique_ids


def rule_vocabularies(options: PreprocessOptions, folder: Path) -> None:
    """Save vocabularies that map ids by a rule (hash, modulo), without having seen any."""
    method = options.vocabulary
    assert method in ("hash", "modulo")
    for column in CATEGORY_COLUMNS:
        rows = options.rows_of(column)
        assert rows is not None
        save_vocabulary(folder, hashed_vocabulary(column, method, rows=rows))


def copy_vocabularies(source: Dataset, folder: Path, plan: MemoryPlan) -> None:
    """Save another dataset's vocabularies, one after another in memory.

    Raises:
        DatasetError: they are absent, damaged or not the dataset's, or don't fit the memory limit together.
    """
    plan.check_vocabularies([(name, *stored_vocabulary_bytes(source.path, name)) for name in CATEGORY_COLUMNS])

    def copied() -> Iterator[Vocabulary]:
        for name in CATEGORY_COLUMNS:
            vocabulary = load_vocabulary(source.path, name)
            save_vocabulary(folder, vocabulary, read_counts(source.path, name))
            yield vocabulary

    check_mapping(source.path, source.manifest.transforms, copied())


def given_vocabularies(total: FileStatistics, options: PreprocessOptions, folder: Path) -> list[Vocabulary]:
    """Save and return vocabularies of ids that are table rows already, when all ids have been seen.

    Args:
        total: sums over all rows.
        options: the rows of the tables; where they don't say, as many as the column's largest id needs.
        folder: where to.

    Raises:
        DataError: an id is beyond them.
    """
    result = []
    for name, largest in zip(CATEGORY_COLUMNS, total.largest_id.tolist(), strict=True):
        rows = options.rows_of(name)
        if rows is not None and largest >= rows:
            raise DataError(
                f"column {name}: id {largest:,} is given, a table of {rows:,} rows has rows 0 to {rows - 1:,}",
                remedy="give more rows with --max-rows-per-table or --max-rows, or leave them out",
            )
        result.append(given_vocabulary(name, rows=rows if rows is not None else max(1, largest + 1)))
        save_vocabulary(folder, result[-1])
    return result


def load_checked(folders: Sequence[Path], plan: MemoryPlan) -> list[Vocabulary]:
    """Load the vocabularies after checking that they fit.

    Args:
        folders: where each column's file is.
        plan: the memory.

    Raises:
        DatasetError: a file is absent or damaged, or they don't fit the memory limit.
    """
    columns = list(zip(folders, CATEGORY_COLUMNS, strict=True))
    plan.check_vocabularies([(name, *stored_vocabulary_bytes(folder, name)) for folder, name in columns])
    return [load_vocabulary(folder, name) for folder, name in columns]
