"""One run of preprocess: what it reads, what it is to make, and how it is recognised when it is given again."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dlrm_scale.data.dataset.dataset import SCHEMA_VERSION, Dataset
from dlrm_scale.data.dataset.split import SplitRule
from dlrm_scale.data.preprocess.extension import Extension, input_identities
from dlrm_scale.data.preprocess.options import DEFAULT_THRESHOLD, PreprocessOptions
from dlrm_scale.data.preprocess.passes import OnProgress
from dlrm_scale.data.preprocess.staging import request_key
from dlrm_scale.data.source.inputs import InputFile, InputFormat

__all__ = ["Job", "request_of", "vocabulary_rule"]

_RULES_VERSION = 2
"""Raise when the same input and options make other rows than before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run of preprocess.

    Attributes:
        files: the input.
        rule: the split of the whole dataset.
        options: what is asked for.
        format: of the input.
        source: dataset whose vocabularies are taken, or None.
        base: dataset that is added to, or None.
        notes: for the user; grows.
        on_progress: who is told.
    """

    files: tuple[InputFile, ...]
    rule: SplitRule
    options: PreprocessOptions
    format: InputFormat
    source: Dataset | None
    base: Extension | None
    notes: list[str]
    on_progress: OnProgress | None

    @property
    def first_part(self) -> int:
        """Number of the first part that is written."""
        return self.base.parts if self.base is not None else 0

    @property
    def given_ids(self) -> bool:
        """Whether ids are table rows already."""
        if self.source is not None:
            return self.source.manifest.columns[0].method == "given"
        return self.options.method(self.format) == "given"


def request_of(job: Job) -> dict[str, Any]:
    """Return what is asked for, JSON-ready: equal for the same input and the options that rows depend on."""
    options, layout = job.options, job.options.layout
    request: dict[str, Any] = {
        "rules_version": _RULES_VERSION,
        "schema_version": SCHEMA_VERSION,
        # What came through a pipe can't be known again.
        "inputs": input_identities(job.files) or [{"path": "-", "run": uuid.uuid4().hex}],
        "vocabulary": vocabulary_rule(job),
        "validation": str(job.rule),
        "layout": {
            "delimiter": layout.delimiter,
            "header": layout.header,
            "id_column": layout.id_column,
            "labeled": layout.labeled,
            "decimal_ids": layout.decimal_ids,
            "multi_hot": list(layout.multi_hot),
            "pad_short_rows": layout.pad_short_rows,
        },
        "columns": dict(options.columns),
    }
    counted = {name: request[name] for name in ("rules_version", "inputs", "validation", "layout", "columns")}
    request["counts_key"] = request_key(counted)
    if job.base is not None:
        request["added_to"] = job.base.dataset.fingerprint
    return request


def vocabulary_rule(job: Job) -> dict[str, object]:
    """Return how the vocabularies are made, JSON-ready."""
    if job.base is not None:
        categories = job.base.dataset.manifest.transforms["categories"]
        assert isinstance(categories, Mapping)
        return {**categories["rule"]}
    if job.source is not None:
        return {"from_dataset": job.source.fingerprint}
    options = job.options
    method = options.method(job.format)
    rule: dict[str, object] = {
        "method": method,
        "max_rows_per_table": options.max_rows_per_table,
        "max_rows": dict(options.max_rows),
    }
    return {**rule, "threshold": options.threshold or DEFAULT_THRESHOLD} if method == "frequency" else rule
