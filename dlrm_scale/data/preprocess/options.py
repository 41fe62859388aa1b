"""What `preprocess` is asked to make, and which wishes contradict one another."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dlrm_scale.data.source.inputs import InputFormat
from dlrm_scale.data.source.text_layout import CRITEO_LAYOUT, TextLayout
from dlrm_scale.data.vocabulary.vocabulary import FIRST_ID_ROW, Method
from dlrm_scale.errors import ConfigError
from dlrm_scale.schema import CATEGORY_COLUMNS, RAW_COLUMNS

__all__ = ["DEFAULT_THRESHOLD", "PreprocessOptions"]

DEFAULT_THRESHOLD = 2
"""An id seen once can't be told from noise: its row would memorise one label. Such ids are most of the distinct ones
and few of the lookups, so that leaving them out shrinks tables most where it costs least."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreprocessOptions:
    """What to make of the input.

    Attributes:
        vocabulary: how ids become rows; None is frequency, or given for .npy files.
        threshold: frequency: occurrences in training rows that an id needs for a row of its own; None is
            `DEFAULT_THRESHOLD`.
        max_rows_per_table: rows of a table at most (frequency) or exactly (hash, modulo, given); rows 0 and 1 count.
        max_rows: the same for single columns, by name.
        vocabulary_from: folder of a dataset whose vocabularies are taken instead of making new ones. The folder that
            is written to: the input is added to it as new days.
        validation: last-file, a fraction, or none; None chooses by the number of files.
        layout: the fields of text.
        columns: Parquet: our column names to the file's, where they differ.
        max_bad_rows: bad rows that go to `rejected.tsv` before it is an error.
        jobs: threads that compute at a time.
        memory_limit_bytes: what the process may use; None: counts may use half of what is free, up to 2 GiB.
        force: replace a dataset that was made from something else.
    """

    vocabulary: Method | None = None
    threshold: int | None = None
    max_rows_per_table: int | None = None
    max_rows: Mapping[str, int] = field(default_factory=dict)
    vocabulary_from: Path | None = None
    validation: str | None = None
    layout: TextLayout = CRITEO_LAYOUT
    columns: Mapping[str, str] = field(default_factory=dict)
    max_bad_rows: int = 0
    jobs: int = 1
    memory_limit_bytes: int | None = None
    force: bool = False

    def check(self) -> None:
        """Check what can be told without the input.

        Raises:
            ConfigError: a value is out of range or contradicts another.
        """
        for name, least in (("threshold", 1), ("max_bad_rows", 0), ("jobs", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
        self.layout.check()
        for name in self.columns:
            if name not in RAW_COLUMNS:
                raise ConfigError(
                    f"--column {name}={self.columns[name]}: there is no column {name!r}",
                    remedy="name label, I1 to I13 or C1 to C26 before the equals sign",
                )
        for name in self.max_rows:
            if name not in CATEGORY_COLUMNS:
                raise ConfigError(
                    f"--max-rows {name}={self.max_rows[name]}: there is no category column {name!r}",
                    remedy="name C1 to C26 before the equals sign",
                )
        if self.vocabulary_from is not None:
            for name in ("vocabulary", "threshold", "max_rows_per_table", "max_rows"):
                if getattr(self, name) not in (None, {}):
                    raise ConfigError(
                        f"--{name.replace('_', '-')} contradicts --vocabulary-from, which takes the mapping as it is",
                        remedy="leave one of them out",
                    )

    def check_for(self, format: InputFormat) -> None:
        """Check what depends on the format of the input.

        Raises:
            ConfigError: an option is about another format, or the vocabulary can't be made of this input.
        """
        if format != "text" and self.layout != CRITEO_LAYOUT:
            raise ConfigError(
                "--delimiter, --header, --id-column, --unlabeled, --decimal-ids, --multi-hot and --pad-short-rows are "
                f"about text, the input is {'Parquet' if format == 'parquet' else '.npy files'}",
                remedy="leave them out",
            )
        if format != "parquet" and self.columns:
            raise ConfigError("--column names columns of Parquet files, the input holds none", remedy="leave it out")
        if self.vocabulary_from is not None:
            return
        method = self.method(format)
        self._check_rows(method)
        if method == "given" and format == "text":
            raise ConfigError(
                "--vocabulary given is for .npy and Parquet files, whose ids are table rows already",
                remedy="choose frequency, hash or modulo",
            )
        if self.threshold is not None and method != "frequency":
            raise ConfigError(f"--threshold has no meaning with --vocabulary {method}", remedy="leave it out")
        if not self.layout.labeled and method == "frequency":
            raise ConfigError(
                "--unlabeled rows don't train, and a frequency vocabulary counts the ids of training rows",
                remedy="map them as the model's dataset does: --vocabulary-from DATASET",
            )

    def method(self, format: InputFormat) -> Method:
        """Return how ids become rows, unless `vocabulary_from` says it."""
        return self.vocabulary or ("given" if format == "npy" else "frequency")

    def rows_of(self, column: str) -> int | None:
        """Return the rows of a column's table, at most or exactly; None: as many as its ids need."""
        return self.max_rows.get(column, self.max_rows_per_table)

    def _check_rows(self, method: Method) -> None:
        least = 1 if method == "given" else FIRST_ID_ROW + 1
        given = [("--max-rows-per-table", self.max_rows_per_table)]
        given += [(f"--max-rows {name}", rows) for name, rows in self.max_rows.items()]
        for option, rows in given:
            if rows is not None and not least <= rows < 2**31:
                raise ConfigError(
                    f"{option} must be between {least} and {2**31 - 1}, got {rows}",
                    remedy="rows 0 and 1 are for missing and unknown ids" if method != "given" else None,
                )
        without = [name for name in CATEGORY_COLUMNS if self.rows_of(name) is None]
        if method in ("hash", "modulo") and without:
            shown = "" if len(without) == len(CATEGORY_COLUMNS) else f"; {', '.join(without)} have none"
            raise ConfigError(
                f"--vocabulary {method} needs the number of rows of each table{shown}",
                remedy="add --max-rows-per-table N",
            )
