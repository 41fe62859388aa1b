"""Raw files to a dataset: the passes over the input and what each leaves behind.

    lines    only for --validation FRACTION of text: count lines, to know which ones train
    count    only for a new frequency vocabulary: parse, count the ids of training rows      -> counts-00000.bin …
             merge the counts, keep the frequent ids                                         -> vocabulary-C1.parquet …
    write    parse again, map and transform, write one Arrow file for each input file        -> part-00000.arrow …
    then     publish the files, write dataset.json last

Parsing twice is cheaper than a temporary copy: the parser makes 2 to 3 M rows/s a core, and a copy of the 1TB set
would take 720 GB. Memory is bounded by pieces, by the counts' budget and by the vocabularies, whatever the length of
the files.
"""

import errno
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlrm_scale.data.dataset.dataset import MANIFEST_FILE, Dataset, DatasetManifest
from dlrm_scale.data.dataset.split import parse_split_rule, training_lines_of_fraction
from dlrm_scale.data.preprocess.check_source import check_source
from dlrm_scale.data.preprocess.count_pass import count_ids, count_lines_of_files, merged_counts
from dlrm_scale.data.preprocess.extension import extension_of
from dlrm_scale.data.preprocess.finish_dataset import finish_dataset
from dlrm_scale.data.preprocess.job import Job, request_of
from dlrm_scale.data.preprocess.make_vocabularies import (
    copy_vocabularies,
    frequency_vocabularies,
    load_checked,
    rule_vocabularies,
)
from dlrm_scale.data.preprocess.memory_plan import MemoryPlan, plan_memory
from dlrm_scale.data.preprocess.options import PreprocessOptions
from dlrm_scale.data.preprocess.passes import OnProgress, PassProgress
from dlrm_scale.data.preprocess.staging import (
    Staging,
    finished_request,
    remove_leftovers,
    request_key,
)
from dlrm_scale.data.preprocess.write_pass import write_parts
from dlrm_scale.data.source.compressed import name_contradicts_content, open_bytes
from dlrm_scale.data.source.inputs import InputFile, find_inputs
from dlrm_scale.data.source.row_sources import ReadOptions, layout_of
from dlrm_scale.data.source.spool import spool_stdin
from dlrm_scale.data.vocabulary.vocabulary import Vocabulary, given_vocabulary
from dlrm_scale.data.vocabulary.vocabulary_file import check_mapping, stored_vocabulary_bytes, vocabulary_file
from dlrm_scale.errors import ConfigError, DatasetError
from dlrm_scale.schema import CATEGORY_COLUMNS

__all__ = ["PreprocessOptions", "PreprocessResult", "preprocess"]

_STDIN = Path("-")


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
    """Make a dataset of Criteo rows, or add days to one.

    A process that ends early leaves no `dataset.json` (or the one that it was adding to); run again with the same
    input and options it goes on with the files that aren't finished.

    Args:
        paths: files or folders of day files; or only `-` for standard input.
        out: the dataset's folder.
        options: what to make of them.
        on_progress: called after each piece from worker threads, one at a time.

    Raises:
        ConfigError: options that contradict one another or the input.
        DataError: input that is absent, cut off, damaged or breaks the format.
        DatasetError: `out` can't be written, is in use, or holds another dataset.
    """
    started = time.monotonic()
    options.check()
    from_stdin = _STDIN in paths
    if from_stdin and len(paths) > 1:
        raise ConfigError("- (standard input) stands beside other input", remedy="give either")
    inputs = None if from_stdin else find_inputs(paths)
    files = inputs.files if inputs is not None else ()
    notes = list(inputs.notes) if inputs is not None else []
    format = inputs.format if inputs is not None else "text"
    options.check_for(format)
    source = None if options.vocabulary_from is None else Dataset.open(options.vocabulary_from)
    base = None
    if source is not None and source.path.resolve() == out.resolve():
        base = extension_of(source, finished_request(out))
    all_files = (1 if from_stdin else len(files)) + (base.parts if base is not None else 0)
    rule = parse_split_rule(options.validation, files=all_files, labeled=options.layout.labeled)
    job = Job(
        files=files,
        rule=rule,
        options=options,
        format=format,
        source=source,
        base=base,
        notes=notes,
        on_progress=on_progress,
    )
    request = request_of(job)
    if base is not None:
        if options.force:
            raise ConfigError(
                "--force contradicts adding days to a dataset", remedy="leave it out, or name another --out"
            )
        base.check(rule)
    done = _finished(job, out, request)
    if done is not None:
        remove_leftovers(out, request)
        return PreprocessResult(manifest=done, up_to_date=True, notes=tuple(notes), seconds=time.monotonic() - started)
    notes += _name_notes(files) if format == "text" else []
    try:
        with Staging(out, request) as staging:
            # What another process has done between the look above and the lock.
            done = _finished(job, out, request)
            if from_stdin:
                # It can't be read again, so that a rerun has no use for what is here.
                staging.leave_nothing()
                job = replace(job, files=(spool_stdin(staging.path),))
            manifest = done or _build(job, staging, request)
            staging.remove()
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise DatasetError(
            f"{out} can't be written: {error}",
            remedy=("free space" if full else "check the path and its permissions")
            + " and run it again, or name another --out",
        ) from error
    return PreprocessResult(
        manifest=manifest, up_to_date=done is not None, notes=tuple(notes), seconds=time.monotonic() - started
    )


def _finished(job: Job, out: Path, request: Mapping[str, Any]) -> DatasetManifest | None:
    """Return the manifest if there is nothing to do.

    Raises:
        DatasetError: `out` holds another dataset, or the one to add to was changed.
    """
    if job.base is None:
        return None if job.options.force else _up_to_date(out, request, job.options.max_bad_rows)
    if Dataset.open(out).fingerprint != job.base.dataset.fingerprint:
        raise DatasetError(f"{out} was changed by another process", remedy="run it again")
    if job.files and job.base.holds(job.files):
        return job.base.dataset.manifest
    job.base.check_order(job.files)
    return None


def _up_to_date(out: Path, request: Mapping[str, Any], max_bad_rows: int) -> DatasetManifest | None:
    """Return the manifest if `out` is what is asked for, None if there is no dataset."""
    if not (out / MANIFEST_FILE).exists():
        return None
    done = finished_request(out)
    manifest = Dataset.open(out).manifest
    if done is not None and done.get("key") == request_key(request):
        for column in CATEGORY_COLUMNS:
            stored_vocabulary_bytes(out, column)  # damaged files are named here and not when training starts
        left_out = manifest.statistics.get("bad_rows", 0)
        if isinstance(left_out, int) and left_out > max_bad_rows:
            raise DatasetError(
                f"{out} was made without {left_out:,} bad rows, --max-bad-rows {max_bad_rows:,} allows fewer",
                remedy="allow as many, or correct the rows (rejected.tsv lists them) and replace it with --force",
            )
        return manifest
    differences = [name for name in request if done is not None and done.get(name) != request[name]]
    raise DatasetError(
        f"{out} holds a dataset that was made "
        + (f"with other {', '.join(differences)}" if differences else "in another way"),
        remedy=f"name another --out, replace it with --force, or add new days to it with --vocabulary-from {out}",
    )


def _name_notes(files: Sequence[InputFile]) -> list[str]:
    notes = []
    for file in files:
        with open_bytes(file.path) as source:
            if (note := name_contradicts_content(source)) is not None:
                notes.append(note)
    return notes


def _build(job: Job, staging: Staging, request: dict[str, Any]) -> DatasetManifest:
    files, options, rule = job.files, job.options, job.rule
    read = ReadOptions(
        layout=options.layout,
        columns=options.columns,
        given_ids=job.given_ids,
        max_bad_rows=options.max_bad_rows,
    )
    layout = layout_of(files, read)
    if job.source is not None:
        check_source(job, layout)
    if job.base is not None:
        job.base.remove_strays()
    if layout.gives_features:
        job.notes.append("I1 to I13 are floating point: taken as they are, without log1p")
    plan = plan_memory(options.memory_limit_bytes, jobs=options.jobs, files=len(files))
    counts = job.source is None and options.method(job.format) == "frequency"
    lines = rule.kind == "fraction" and layout.rows_per_file is None
    names = [*(["lines"] if lines else []), *(["count"] if counts else []), "write"]

    def progress(name: str) -> PassProgress:
        return PassProgress(name, names.index(name) + 1, len(names), files, job.on_progress)

    prepared = staging.finished("vocabularies")
    made_here = job.base is None and not (job.given_ids and job.source is None)
    if made_here and not all(staging.holds(vocabulary_file(column)) for column in CATEGORY_COLUMNS):
        prepared = None
    if prepared is None:
        training_lines: list[int | None] = [0 if rule.kind == "unlabeled" else None] * len(files)
        if rule.kind == "last-file":
            training_lines[-1] = 0
        elif rule.kind == "fraction":
            rows = layout.rows_per_file
            header = 1 if options.layout.header else 0
            if rows is None:
                lines_of_files = count_lines_of_files(files, jobs=options.jobs, progress=progress("lines"))
                rows = [max(0, count - header) for count in lines_of_files]
            training_lines = [count and count + header for count in training_lines_of_fraction(rule, rows)]
        unique_ids: list[int | None] = [None] * len(CATEGORY_COLUMNS)
        if counts:
            count_ids(
                files,
                training_lines,
                staging,
                read,
                jobs=options.jobs,
                memory_bytes=plan.count_bytes,
                progress=progress("count"),
            )
            counted = merged_counts(len(files), staging, plan.merge_bytes)
            unique_ids = [*frequency_vocabularies(counted, options, plan, staging.path)]
        elif job.source is not None:
            if job.base is None:
                copy_vocabularies(job.source, staging.path, plan)
        elif not job.given_ids:
            rule_vocabularies(options, staging.path)
        prepared = {"training_lines": training_lines, "unique_ids": unique_ids}
        staging.finish("vocabularies", prepared)
    vocabularies = _load_vocabularies(job, staging, plan)
    count_now = not counts and job.base is None
    if count_now:
        plan = plan.beside_vocabularies(sum(vocabulary.memory_bytes for vocabulary in vocabularies))
    written = write_parts(
        files,
        prepared["training_lines"],
        vocabularies,
        staging,
        read,
        first_part=job.first_part,
        multi_hot=layout.multi_hot,
        jobs=options.jobs,
        count_memory_bytes=plan.count_bytes if count_now else None,
        progress=progress("write"),
    )
    return finish_dataset(job, staging, request, plan, vocabularies, prepared["unique_ids"], written, layout.multi_hot)


def _load_vocabularies(job: Job, staging: Staging, plan: MemoryPlan) -> list[Vocabulary]:
    if job.given_ids and job.source is None:
        return [given_vocabulary(column, rows=2**31 - 1) for column in CATEGORY_COLUMNS]
    if job.base is not None:
        loaded = load_checked([job.base.dataset.path] * len(CATEGORY_COLUMNS), plan)
        check_mapping(job.base.dataset.path, job.base.dataset.manifest.transforms, loaded)
        return loaded
    return load_checked([staging.where(vocabulary_file(column)).parent for column in CATEGORY_COLUMNS], plan)
