"""Whether input may use the vocabularies of another dataset: its ids and features must mean the same."""

from collections.abc import Mapping
from typing import Any

from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.data.preprocess.column_statistics import FileStatistics
from dlrm_scale.data.preprocess.job import Job
from dlrm_scale.data.preprocess.transforms import DENSE_RULE, GIVEN_DENSE_RULE
from dlrm_scale.data.source.row_sources import InputLayout
from dlrm_scale.errors import ConfigError

__all__ = ["check_source", "note_unknown_ids", "text_ids"]

_MOST_UNKNOWN = 0.9


def text_ids(job: Job) -> str | None:
    """How ids stand in the text of the rows: `hexadecimal` or `decimal`; None where the first rows were no text."""
    if job.source is not None:
        return _categories(job.source).get("text_ids")
    if job.format != "text":
        return None
    return "decimal" if job.options.layout.decimal_ids else "hexadecimal"


def check_source(job: Job, layout: InputLayout) -> None:
    """Compare input with the dataset whose vocabularies it is to use.

    Args:
        job: with a source.
        layout: of the input.

    Raises:
        ConfigError: dense features or ids of another kind, or other multi-hot columns in days that are added.
    """
    assert job.source is not None
    source, path = job.source.manifest, job.source.path
    if source.transforms.get("dense") != (GIVEN_DENSE_RULE if layout.gives_features else DENSE_RULE):
        kinds = ("ready-made features", "integers")
        mine, theirs = kinds if layout.gives_features else kinds[::-1]
        raise ConfigError(
            f"I1 to I13 of the input are {mine}, {path} was made of {theirs}",
            remedy="give input of the same kind",
        )
    if job.given_ids and job.format == "text":
        raise ConfigError(
            f"the ids of {path} were given as table rows, the input is text with raw ids",
            remedy="give .npy or Parquet files that were mapped in the same way",
        )
    known = _categories(job.source).get("text_ids")
    mine = "decimal" if job.options.layout.decimal_ids else "hexadecimal"
    if job.format == "text" and known not in (None, mine):
        raise ConfigError(
            f"the ids of the input are read as {mine}, those of {path} were {known}",
            remedy="add --decimal-ids" if known == "decimal" else "leave --decimal-ids out",
        )
    if job.base is not None and layout.multi_hot != job.source.multi_hot:
        raise ConfigError(
            f"the new days have several ids a row in {', '.join(layout.multi_hot) or 'no column'}, "
            f"{path} in {', '.join(job.source.multi_hot) or 'no column'}",
            remedy="read them with the same --multi-hot",
        )


def note_unknown_ids(new: FileStatistics, job: Job) -> None:
    """Add a note where hardly an id of the new rows is in the vocabularies."""
    assert job.source is not None
    present, unknown = int(new.present_ids.sum()), int(new.out_of_vocabulary.sum())
    if not job.given_ids and present and unknown > _MOST_UNKNOWN * present:
        job.notes.append(
            f"{unknown / present:.1%} of the ids aren't in the vocabularies of {job.source.path}: are they ids of the "
            "same kind?"
        )


def _categories(dataset: Dataset) -> Mapping[str, Any]:
    categories = dataset.manifest.transforms.get("categories")
    return categories if isinstance(categories, Mapping) else {}
