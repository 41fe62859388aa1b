"""The end of preprocessing: what is known about the rows, the files' final names, and the manifest last."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from dlrm_scale.data.dataset.dataset import DatasetManifest, write_manifest
from dlrm_scale.data.dataset.manifest import fingerprint_of
from dlrm_scale.data.preprocess.assemble import assemble_manifest, check_rows, collect_rejected
from dlrm_scale.data.preprocess.check_source import note_unknown_ids, text_ids
from dlrm_scale.data.preprocess.column_statistics import FileStatistics
from dlrm_scale.data.preprocess.count_pass import merged_counts
from dlrm_scale.data.preprocess.extension import Extension
from dlrm_scale.data.preprocess.job import Job, vocabulary_rule
from dlrm_scale.data.preprocess.make_vocabularies import given_vocabularies
from dlrm_scale.data.preprocess.memory_plan import MemoryPlan
from dlrm_scale.data.preprocess.staging import REJECTED_FILE, REQUEST_FILE, Staging, write_json
from dlrm_scale.data.preprocess.write_pass import WrittenPart
from dlrm_scale.data.vocabulary.id_facts import IdFacts, id_facts
from dlrm_scale.data.vocabulary.part_lookups import read_lookups
from dlrm_scale.data.vocabulary.vocabulary import Vocabulary
from dlrm_scale.data.vocabulary.vocabulary_file import read_counts, vocabulary_file
from dlrm_scale.errors import DataError
from dlrm_scale.schema import CATEGORY_COLUMNS

__all__ = ["finish_dataset"]


def finish_dataset(
    job: Job,
    staging: Staging,
    request: Mapping[str, Any],
    plan: MemoryPlan,
    vocabularies: Sequence[Vocabulary],
    unique_ids: Sequence[int | None],
    written: Sequence[WrittenPart],
    multi_hot: Sequence[str],
) -> DatasetManifest:
    """Gather what is known about the rows, give the files their names and write the manifest last."""
    new = FileStatistics.total([sums for _, sums in written])
    old = job.base.training_parts() if job.base is not None else []
    try:
        check_rows(new, job.rule, job.notes, earlier_rows=sum(int(sums.rows[0]) for _, sums in old))
        if job.given_ids and job.source is None:
            vocabularies = given_vocabularies(new, job.options, staging.path)
    except DataError:
        staging.leave_nothing()
        raise
    names = [part.file for part, _ in written]
    rejected = collect_rejected(
        names,
        new.bad_rows,
        staging,
        REJECTED_FILE if job.base is None else REJECTED_FILE.replace(".", f"-{job.first_part:05d}."),
        job.notes,
    )
    parts = [*old, *written]
    training = [(staging.folder / part.file, int(sums.rows[0])) for part, sums in old]
    training += [(staging.where(part.file), int(sums.rows[0])) for part, sums in written]
    counted_first = job.source is None and job.options.method(job.format) == "frequency"

    read: dict[str, IdFacts] = {}
    if job.base is not None:
        with ThreadPoolExecutor(job.options.jobs) as pool:
            found = pool.map(lambda vocabulary: read_lookups(vocabulary, training), vocabularies)
            read = {vocabulary.column: facts for vocabulary, facts in zip(vocabularies, found, strict=True)}

    def facts_of(vocabulary: Vocabulary) -> IdFacts:
        if read:
            return read[vocabulary.column]
        column = CATEGORY_COLUMNS.index(vocabulary.column)
        if counted_first:
            kept = read_counts(staging.where(vocabulary_file(vocabulary.column)).parent, vocabulary.column)
            facts = id_facts(vocabulary, kept, memory_bytes=plan.merge_bytes, only_kept=True)
            return replace(facts, unique_ids=unique_ids[column])
        counts = merged_counts(len(job.files), staging, plan.merge_bytes)[column]
        return id_facts(vocabulary, counts, memory_bytes=plan.merge_bytes)

    manifest = assemble_manifest(
        parts,
        vocabularies,
        facts_of,
        job.rule,
        vocabulary_rule=vocabulary_rule(job),
        multi_hot=multi_hot,
        text_ids=text_ids(job),
    )
    if job.source is not None:
        note_unknown_ids(new, job)
    if job.base is not None:
        return _add_to_dataset(job.base, staging, request, manifest, [*names, *rejected])
    staging.publish([*names, *(vocabulary_file(column) for column in CATEGORY_COLUMNS), *rejected])
    return write_manifest(staging.folder, manifest)


def _add_to_dataset(
    base: Extension, staging: Staging, request: Mapping[str, Any], manifest: DatasetManifest, files: Sequence[str]
) -> DatasetManifest:
    staging.add_to_dataset(files)
    # Until the manifest is replaced the request of the old one holds: its fingerprint tells which of the two counts.
    content = {
        **base.request,
        "inputs": [*base.request["inputs"], *request["inputs"]],
        "key": "",
        "fingerprint": fingerprint_of(manifest),
        "before": {name: value for name, value in base.request.items() if name != "before"},
    }
    write_json(staging.folder / REQUEST_FILE, content)
    return write_manifest(staging.folder, manifest)
