"""Write a synthetic Criteo set: day files of raw text and `synthetic.json`, which says what can be attained on them.

    OUT/day_0.tsv … day_{D-1}.tsv        (.tsv.gz with gzip)
    OUT/synthetic.json                   written last: parameters, files, checksums, attainable AUC and logloss
    OUT/.synthetic-unfinished            only while generating, or after an interruption

The same parameters give the same text, whatever the chunk size; compressed bytes also depend on the isal version.
"""

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import xxhash
from isal import igzip

from dlrm_scale.data.durable import fsync_folder
from dlrm_scale.data.synthetic_columns import PRESETS, scaled
from dlrm_scale.data.synthetic_model import planted_model
from dlrm_scale.data.synthetic_rows import RowSource, format_rows
from dlrm_scale.data.synthetic_scores import TruthScores
from dlrm_scale.errors import ConfigError, DataError
from dlrm_scale.units import format_bytes

__all__ = ["SYNTHETIC_JSON", "SyntheticParameters", "day_rows", "generate", "row_source"]

SYNTHETIC_JSON = "synthetic.json"
SCHEMA_VERSION = 1
GENERATOR_VERSION = 2
"""Raised whenever the same parameters give other rows."""

_UNFINISHED = ".synthetic-unfinished"
_CHUNK_ROWS = 32_768
_LARGEST_TO_SMALLEST_DAY = 1.35
"""The 1TB set's days have 152 to 205 million rows."""
_FREQUENT_TRAINING_ROWS = 20
"""Ids expected in fewer training rows count as unlearnable in `attainable_from_frequent_ids`."""
_CALIBRATION_ROWS = 1 << 18
_CALIBRATION_SEED = (1 << 63) - 1
_BYTES_A_ROW = {False: 220, True: 90}
"""Least bytes of a row on disk, plain and gzip; the files measure about 245 and 105."""
_LOWEST_SCALE = 0.001


@dataclass(frozen=True, kw_only=True)
class SyntheticParameters:
    """What a synthetic set is a function of.

    Attributes:
        preset: `kaggle` or `terabyte`.
        rows: rows of all days together.
        days: number of files, at most `rows`; the last one is the validation day.
        seed: selects the sample; cardinalities, ids and the planted model don't depend on it.
        scale: cardinalities over the published ones for columns of more than 1,000 ids; None takes rows over the
            published rows, from 0.001 up to 1.
        gzip: compress the files.
    """

    preset: str = "kaggle"
    rows: int
    days: int
    seed: int = 0
    scale: float | None = None
    gzip: bool = False

    def resolved(self) -> "SyntheticParameters":
        """Check everything and fill in the scale.

        Raises:
            ConfigError: a value is out of range.
        """
        if self.preset not in PRESETS:
            raise ConfigError(f"there is no preset {self.preset!r}", remedy=f"use one of: {', '.join(PRESETS)}")
        if self.days < 1:
            raise ConfigError(f"days is {self.days}; at least 1 day is needed", remedy="give --days 1 or more")
        if self.rows < self.days:
            raise ConfigError(
                f"{self.rows} rows can't fill {self.days} days, each day needs at least 1 row",
                remedy=f"give --rows {self.days} or more, or fewer --days",
            )
        if not 0 <= self.seed < _CALIBRATION_SEED:
            raise ConfigError(f"seed is {self.seed}; it must be from 0 to 2**63 - 2", remedy="give --seed 0 or more")
        preset = PRESETS[self.preset]
        scale = min(1.0, max(_LOWEST_SCALE, self.rows / preset.rows)) if self.scale is None else self.scale
        for column, law in enumerate(scaled(preset, scale).categories, start=1):
            values = law.ids + self.days * law.fresh_ids
            if values > 1 << 32:
                raise ConfigError(
                    f"C{column} would need {values:,} distinct ids, 32 bits hold {1 << 32:,}",
                    remedy="give a smaller --scale or fewer --days",
                )
        return replace(self, scale=scale)


def day_rows(rows: int, days: int, seed: int) -> list[int]:
    """Cut `rows` into `days` uneven counts of at least 1: the largest is about 1.35 times the smallest."""
    order = sorted(range(days), key=lambda day: xxhash.xxh3_64_intdigest(f"{seed}/{day}".encode()))
    weights = np.empty(days)
    weights[order] = np.linspace(1.0, _LARGEST_TO_SMALLEST_DAY, days)
    ends = np.floor(np.cumsum(weights / weights.sum()) * (rows - days)).astype(np.int64)
    ends[-1] = rows - days
    return [int(count) + 1 for count in np.diff(ends, prepend=0)]


def row_source(parameters: SyntheticParameters) -> RowSource:
    """Build the source of all rows, with the intercept set so that the mean click probability is the published rate.

    Raises:
        ConfigError: a parameter is out of range.
    """
    parameters = parameters.resolved()
    assert parameters.scale is not None
    preset = scaled(PRESETS[parameters.preset], parameters.scale)
    model = planted_model(preset, _intercept(parameters.preset, parameters.scale))
    training_rows = sum(day_rows(parameters.rows, parameters.days, parameters.seed)[:-1]) or parameters.rows
    return RowSource(
        preset=preset, model=model, seed=parameters.seed, frequent_share=_FREQUENT_TRAINING_ROWS / training_rows
    )


def generate(
    folder: Path,
    parameters: SyntheticParameters,
    *,
    force: bool = False,
    on_rows: Callable[[int], None] | None = None,
    chunk_rows: int = _CHUNK_ROWS,
) -> tuple[dict[str, Any], bool]:
    """Write the set into `folder`, or find that it is already there.

    A folder that this function made is written anew when the parameters differ or a file's size is wrong; its old day
    files are removed first. Memory doesn't grow with the rows: the whole process peaks near 210 MB.

    Args:
        folder: made if absent.
        parameters: what to generate.
        force: also write into a non-empty folder that this function didn't make; files of other names stay.
        on_rows: called with the number of rows just written.
        chunk_rows: rows drawn at a time; doesn't change the text.

    Returns:
        The content of `synthetic.json`, and whether files were written.

    Raises:
        ConfigError: a parameter is out of range, or the folder holds something else.
        DataError: the disk is full or can't be written.
    """
    parameters = parameters.resolved()
    earlier = _earlier(folder)
    if earlier is not None and _is_complete(folder, earlier, parameters):
        return earlier, False
    _check_folder(folder, ours=earlier is not None or (folder / _UNFINISHED).exists(), force=force)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_space(folder, parameters)
        with _alone_in(folder):
            _remove_interrupted(folder)
            with _new_file(folder / _UNFINISHED) as file:
                file.write(json.dumps(asdict(parameters)).encode())
            _remove_earlier(folder, earlier)
            document = _write_days(folder, parameters, on_rows or (lambda rows: None), chunk_rows)
            with _new_file(folder / SYNTHETIC_JSON) as file:
                file.write((json.dumps(document, indent=1) + "\n").encode())
            (folder / _UNFINISHED).unlink()
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise DataError(
            f"{error.filename or folder}: {'the disk is full' if full else error.strerror or error}",
            remedy="free space or choose another folder" if full else "check the folder's path and permissions",
        ) from error
    return document, True


def _write_days(
    folder: Path, parameters: SyntheticParameters, on_rows: Callable[[int], None], chunk_rows: int
) -> dict[str, Any]:
    source = row_source(parameters)
    files: list[dict[str, Any]] = []
    whole, whole_frequent = TruthScores(), TruthScores()
    first_row = 0
    for day, rows in enumerate(day_rows(parameters.rows, parameters.days, parameters.seed)):
        scores, frequent = TruthScores(), TruthScores()
        path = folder / f"day_{day}.tsv{'.gz' if parameters.gzip else ''}"
        content = xxhash.xxh3_128()
        content_bytes = 0
        with _new_file(path) as raw, _compressed(raw, parameters.gzip) as out:
            for start in range(0, rows, chunk_rows):
                chunk = source.draw(first_row + start, min(chunk_rows, rows - start), day)
                text = format_rows(chunk).data
                out.write(text)
                content.update(text)
                content_bytes += len(text)
                scores.add(chunk.logits, chunk.labels)
                frequent.add(chunk.frequent_logits, chunk.labels)
                on_rows(len(chunk.labels))
        entry = {"file": path.name, "first_row": first_row, "size_bytes": path.stat().st_size}
        entry |= {"xxh3_128": _checksum(path) if parameters.gzip else content.hexdigest()}
        entry |= {"content_bytes": content_bytes, "content_xxh3_128": content.hexdigest()}
        files.append(entry | _truth(scores, frequent))
        whole += scores
        whole_frequent += frequent
        first_row += rows
    model = source.model
    return {
        "kind": "dlrm_scale synthetic rows",
        "schema_version": SCHEMA_VERSION,
        "generator_version": GENERATOR_VERSION,
        "parameters": asdict(parameters),
        "cardinalities": {f"C{c}": law.ids for c, law in enumerate(source.preset.categories, start=1)},
        "fresh_ids_per_day": {f"C{c}": law.fresh_ids for c, law in enumerate(source.preset.categories, start=1)},
        "click_rate_target": source.preset.click_rate,
        "intercept": model.intercept,
        "frequent_id_rows": _FREQUENT_TRAINING_ROWS,
        "files": files,
        "all_days": _truth(whole, whole_frequent),
        "validation": {"file": files[-1]["file"], **{key: files[-1][key] for key in _truth(whole, whole_frequent)}},
    }


def _truth(scores: TruthScores, frequent: TruthScores) -> dict[str, Any]:
    return {
        "rows": scores.rows,
        "clicks": scores.clicks,
        "click_rate": scores.clicks / scores.rows,
        "base_rate_logloss": scores.base_rate_logloss,
        "attainable": scores.summary(),
        "attainable_from_frequent_ids": frequent.summary(),
    }


@cache
def _intercept(preset_name: str, scale: float) -> float:
    """Find the intercept that gives the published click rate on rows of a seed that users can't choose."""
    preset = scaled(PRESETS[preset_name], scale)
    source = RowSource(preset=preset, model=planted_model(preset, 0.0), seed=_CALIBRATION_SEED)
    logits = source.draw(0, _CALIBRATION_ROWS, 0).logits
    low, high = -30.0, 30.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _mean_probability(logits + middle) < preset.click_rate else (low, middle)
    # Rounded, so that the last bits of another machine's exp don't reach the file.
    return round((low + high) / 2, 6)


def _mean_probability(logits: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    return float((1.0 / (1.0 + np.exp(-logits))).mean())


def _earlier(folder: Path) -> dict[str, Any] | None:
    try:
        document = json.loads((folder / SYNTHETIC_JSON).read_bytes())
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) and document.get("kind") == "dlrm_scale synthetic rows" else None


def _is_complete(folder: Path, earlier: dict[str, Any], parameters: SyntheticParameters) -> bool:
    versions = (earlier.get("schema_version"), earlier.get("generator_version"))
    if versions != (SCHEMA_VERSION, GENERATOR_VERSION) or earlier.get("parameters") != asdict(parameters):
        return False
    return all(
        (folder / entry["file"]).is_file() and (folder / entry["file"]).stat().st_size == entry["size_bytes"]
        for entry in earlier["files"]
    )


def _check_folder(folder: Path, *, ours: bool, force: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file, not a folder", remedy="give another folder")
    if not ours and not force and folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(
            f"{folder} isn't empty and wasn't made by synth",
            remedy="give an empty or new folder, or --force to write beside what is there",
        )


def _check_space(folder: Path, parameters: SyntheticParameters) -> None:
    needed = parameters.rows * _BYTES_A_ROW[parameters.gzip]
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            f"{folder}: {parameters.rows:,} rows need at least {format_bytes(needed)}, {format_bytes(free)} are free",
            remedy="give fewer --rows, --gzip, or a folder on a larger disk",
        )


def _remove_earlier(folder: Path, earlier: dict[str, Any] | None) -> None:
    if earlier is None:
        return
    (folder / SYNTHETIC_JSON).unlink()
    for entry in earlier["files"]:
        (folder / Path(entry["file"]).name).unlink(missing_ok=True)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; the system lets go of it when the process ends, however that happens."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise DataError(
            f"{folder}: another process is generating rows here", remedy="wait for it, or choose another folder"
        ) from None
    try:
        yield
    finally:
        os.close(descriptor)


def _remove_interrupted(folder: Path) -> None:
    """Remove the day files of a generation that did not end, which may have had more days than this one."""
    if not (folder / _UNFINISHED).exists():
        return
    for path in folder.iterdir():
        if re.fullmatch(r"day_\d+\.tsv(\.gz)?|\.day_\d+\.tsv(\.gz)?\.tmp", path.name):
            path.unlink()


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that takes its name, synced, only when the block ends well."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


@contextmanager
def _compressed(raw: BinaryIO, gzip: bool) -> Iterator[BinaryIO]:
    if not gzip:
        yield raw
        return
    # No name and no time in the header: the same rows give the same file.
    header: dict[str, Any] = {"filename": "", "mtime": 0}
    with igzip.IGzipFile(mode="wb", compresslevel=2, fileobj=raw, **header) as file:  # type: ignore[no-untyped-call]
        yield cast(BinaryIO, file)


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
