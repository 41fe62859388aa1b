"""Raw files to a dataset: the passes over the input and what each leaves behind.

    lines    only for --validation FRACTION: count lines, to know which ones train
    count    only for a new frequency vocabulary: parse, count the ids of training rows      -> vocabulary-C1.parquet …
    write    parse again, map and transform, write one Arrow file for each input file        -> part-00000.arrow …
    then     publish the files, write dataset.json last

Parsing twice is cheaper than a temporary copy: the parser makes about 3 M rows/s a core, and a copy of the 1TB set
would take 720 GB. Memory is bounded by blocks and vocabularies, whatever the length of the files.
"""

import errno
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm_scale.data.assemble import assemble_manifest, check_rows, collect_rejected
from dlrm_scale.data.column_statistics import FileStatistics
from dlrm_scale.data.compressed import name_contradicts_content, open_bytes
from dlrm_scale.data.count_pass import count_ids, count_lines_of_files
from dlrm_scale.data.dataset import MANIFEST_FILE, SCHEMA_VERSION, Dataset, DatasetManifest, write_manifest
from dlrm_scale.data.inputs import InputFile, find_inputs
from dlrm_scale.data.passes import OnProgress, PassProgress
from dlrm_scale.data.split import SplitRule, parse_split_rule, training_lines_of_fraction
from dlrm_scale.data.staging import Staging, finished_request, request_key
from dlrm_scale.data.vocabulary import (
    FIRST_ID_ROW,
    Method,
    Vocabulary,
    frequency_vocabulary,
    hashed_vocabulary,
    load_vocabularies,
    load_vocabulary,
    save_vocabulary,
    vocabulary_file,
)
from dlrm_scale.data.write_pass import RowLookups, part_file, write_parts
from dlrm_scale.errors import ConfigError, DatasetError
from dlrm_scale.schema import CATEGORY_COLUMNS

__all__ = ["DEFAULT_THRESHOLD", "PreprocessOptions", "PreprocessResult", "preprocess"]

DEFAULT_THRESHOLD = 2
"""An id seen once can't be told from noise: its row would memorise one label. Such ids are most of the distinct ones
and few of the lookups, so that leaving them out shrinks tables most where it costs least."""

_RULES_VERSION = 1
"""Raise when the same input and options make other rows than before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreprocessOptions:
    """What to make of the input.

    Attributes:
        vocabulary: how ids become rows; None is frequency.
        threshold: frequency: occurrences in training rows that an id needs for a row of its own; None is
            `DEFAULT_THRESHOLD`.
        max_rows_per_table: rows of a table at most (frequency) or exactly (hash, modulo); rows 0 and 1 count.
        vocabulary_from: folder of a dataset whose vocabularies are taken instead of making new ones.
        validation: last-file, a fraction, or none; None chooses by the number of files.
        pad_short_rows: read fields that are absent at the end of a row as missing.
        max_bad_rows: bad rows that go to `rejected.tsv` before it is an error.
        jobs: files worked on at a time.
        force: replace a dataset that was made from something else.
    """

    vocabulary: Method | None = None
    threshold: int | None = None
    max_rows_per_table: int | None = None
    vocabulary_from: Path | None = None
    validation: str | None = None
    pad_short_rows: bool = False
    max_bad_rows: int = 0
    jobs: int = 1
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
        if self.vocabulary_from is not None:
            for name in ("vocabulary", "threshold", "max_rows_per_table"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"--{name.replace('_', '-')} contradicts --vocabulary-from, which takes the mapping as it is",
                        remedy="leave one of them out",
                    )
            return
        if self.threshold is not None and self.method != "frequency":
            raise ConfigError(f"--threshold has no meaning with --vocabulary {self.method}", remedy="leave it out")
        rows = self.max_rows_per_table
        if rows is not None and not FIRST_ID_ROW < rows < 2**31:
            raise ConfigError(
                f"--max-rows-per-table must be between {FIRST_ID_ROW + 1} and {2**31 - 1}, got {rows}",
                remedy="rows 0 and 1 are for missing and unknown ids",
            )
        if self.method != "frequency" and rows is None:
            raise ConfigError(
                f"--vocabulary {self.method} needs the number of rows of each table",
                remedy="add --max-rows-per-table N",
            )

    @property
    def method(self) -> Method:
        """How ids become rows, unless `vocabulary_from` says it."""
        return self.vocabulary or "frequency"


@dataclass(frozen=True, kw_only=True, slots=True)
class PreprocessResult:
    """What was made.

    Attributes:
        manifest: of the dataset.
        up_to_date: nothing was done: the dataset was made from the same input and options before.
        notes: what the user should know, one sentence each.
        seconds: wall time.
    """

    manifest: DatasetManifest
    up_to_date: bool
    notes: tuple[str, ...]
    seconds: float


def preprocess(
    paths: Sequence[Path], out: Path, options: PreprocessOptions, *, on_progress: OnProgress | None = None
) -> PreprocessResult:
    """Make a dataset of raw Criteo files.

    A process that ends early leaves no `dataset.json`; run again with the same input and options it goes on with the
    files that aren't finished.

    Args:
        paths: raw files or folders of day files.
        out: the dataset's folder.
        options: what to make of them.
        on_progress: called after each block from worker threads, one at a time.

    Raises:
        ConfigError: options that contradict one another or the input.
        DataError: input that is absent, cut off, damaged or breaks the format.
        DatasetError: `out` can't be written, is in use, or holds another dataset.
    """
    started = time.monotonic()
    options.check()
    inputs = find_inputs(paths)
    files = inputs.files
    rule = parse_split_rule(options.validation, files=len(files))
    source = _vocabulary_source(options.vocabulary_from, out)
    request = _request(files, options, rule, source)
    if not options.force and (done := _up_to_date(out, request)) is not None:
        return PreprocessResult(manifest=done, up_to_date=True, notes=inputs.notes, seconds=time.monotonic() - started)
    notes = [*inputs.notes, *_name_notes(files)]
    try:
        with Staging(out, request) as staging:
            manifest = _build(files, rule, options, source, staging, notes, on_progress)
            staging.remove()
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise DatasetError(
            f"{out} can't be written: {error}",
            remedy=("free space" if full else "check the path and its permissions")
            + " and run it again, or name another --out",
        ) from error
    return PreprocessResult(manifest=manifest, up_to_date=False, notes=tuple(notes), seconds=time.monotonic() - started)


def _vocabulary_source(path: Path | None, out: Path) -> Dataset | None:
    if path is None:
        return None
    if path.resolve() == out.resolve():
        raise ConfigError(f"--vocabulary-from and --out are both {out}", remedy="write into another folder")
    return Dataset.open(path)


def _request(
    files: Sequence[InputFile], options: PreprocessOptions, rule: SplitRule, source: Dataset | None
) -> dict[str, Any]:
    return {
        "rules_version": _RULES_VERSION,
        "schema_version": SCHEMA_VERSION,
        "inputs": [
            {"path": str(file.path.resolve()), "size_bytes": file.size_bytes, "modified_ns": file.modified_ns}
            for file in files
        ],
        "vocabulary": _vocabulary_rule(options, source),
        "validation": str(rule),
        "pad_short_rows": options.pad_short_rows,
        "max_bad_rows": options.max_bad_rows,
    }


def _vocabulary_rule(options: PreprocessOptions, source: Dataset | None) -> dict[str, object]:
    if source is not None:
        return {"from_dataset": source.fingerprint}
    rule: dict[str, object] = {"method": options.method, "max_rows_per_table": options.max_rows_per_table}
    return {**rule, "threshold": options.threshold or DEFAULT_THRESHOLD} if options.method == "frequency" else rule


def _up_to_date(out: Path, request: Mapping[str, Any]) -> DatasetManifest | None:
    """Return the manifest if `out` is what is asked for, None if there is no dataset."""
    if not (out / MANIFEST_FILE).exists():
        return None
    done = finished_request(out)
    manifest = Dataset.open(out).manifest
    if done is not None and done.get("key") == request_key(request):
        return manifest
    differences = [name for name in request if done is not None and done.get(name) != request[name]]
    raise DatasetError(
        f"{out} holds a dataset that was made "
        + (f"with other {', '.join(differences)}" if differences else "in another way"),
        remedy="name another --out, or replace it with --force",
    )


def _name_notes(files: Sequence[InputFile]) -> list[str]:
    notes = []
    for file in files:
        with open_bytes(file.path) as source:
            if (note := name_contradicts_content(source)) is not None:
                notes.append(note)
    return notes


def _build(
    files: Sequence[InputFile],
    rule: SplitRule,
    options: PreprocessOptions,
    source: Dataset | None,
    staging: Staging,
    notes: list[str],
    on_progress: OnProgress | None,
) -> DatasetManifest:
    counts = source is None and options.method == "frequency"
    names = [*(["lines"] if rule.kind == "fraction" else []), *(["count"] if counts else []), "write"]

    def progress(name: str) -> PassProgress:
        return PassProgress(name, names.index(name) + 1, len(names), files, on_progress)

    prepared = staging.finished("vocabularies")
    if prepared is None:
        training_lines: list[int | None] = [None] * len(files)
        if rule.kind == "last-file":
            training_lines[-1] = 0
        elif rule.kind == "fraction":
            lines = count_lines_of_files(files, jobs=options.jobs, progress=progress("lines"))
            training_lines = [*training_lines_of_fraction(rule, lines)]
        unique_ids = _make_vocabularies(
            files, training_lines, options, source, staging, progress("count") if counts else None
        )
        prepared = {"training_lines": training_lines, "unique_ids": unique_ids}
        staging.finish("vocabularies", prepared)
    vocabularies = [
        load_vocabulary(staging.where(vocabulary_file(column)).parent, column) for column in CATEGORY_COLUMNS
    ]
    lookups = None if counts else RowLookups(vocabularies)
    written = write_parts(
        files,
        prepared["training_lines"],
        vocabularies,
        staging,
        pad_short_rows=options.pad_short_rows,
        max_bad_rows=options.max_bad_rows,
        jobs=options.jobs,
        progress=progress("write"),
        lookups=lookups,
    )
    total = FileStatistics.total([statistics for _, statistics in written])
    check_rows(total, rule, notes)
    rejected = collect_rejected(len(files), total.bad_rows, staging)
    manifest = assemble_manifest(
        written, vocabularies, prepared["unique_ids"], lookups, rule, _vocabulary_rule(options, source)
    )
    parts = [part_file(index) for index in range(len(files))]
    staging.publish([*parts, *(vocabulary_file(column) for column in CATEGORY_COLUMNS), *rejected])
    return write_manifest(staging.folder, manifest)


def _make_vocabularies(
    files: Sequence[InputFile],
    training_lines: Sequence[int | None],
    options: PreprocessOptions,
    source: Dataset | None,
    staging: Staging,
    progress: PassProgress | None,
) -> list[int | None]:
    """Save the vocabularies in the staging folder; return the distinct ids of each column where they are counted."""
    made: list[Vocabulary]
    unique_ids: list[int | None] = [None] * len(CATEGORY_COLUMNS)
    if source is not None:
        made = load_vocabularies(source.path, source.manifest.transforms)
    elif options.method != "frequency":
        assert options.max_rows_per_table is not None
        made = [
            hashed_vocabulary(column, options.method, rows=options.max_rows_per_table) for column in CATEGORY_COLUMNS
        ]
    else:
        assert progress is not None
        counters = count_ids(
            files,
            training_lines,
            pad_short_rows=options.pad_short_rows,
            max_bad_rows=options.max_bad_rows,
            jobs=options.jobs,
            progress=progress,
        )
        made = []
        for column, name in enumerate(CATEGORY_COLUMNS):
            ids, occurrences = counters[column].result()
            unique_ids[column] = len(ids)
            made.append(
                frequency_vocabulary(
                    name,
                    ids,
                    occurrences,
                    threshold=options.threshold or DEFAULT_THRESHOLD,
                    max_rows=options.max_rows_per_table,
                )
            )
    for vocabulary in made:
        save_vocabulary(staging.path, vocabulary)
    return unique_ids
