"""Write a synthetic Criteo set: day files of raw text and `synthetic.json`, which says what can be attained on them.

    OUT/day_0.tsv … day_{D-1}.tsv        (.tsv.gz with gzip)
    OUT/synthetic.json                   written last: parameters, files, checksums, attainable AUC and logloss
    OUT/.synthetic-unfinished            only while generating, or after an interruption

The same parameters give the same text, whatever the chunk size; compressed bytes also depend on the isal version.
"""

import errno
import json
import math
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt
import xxhash
from isal import igzip

from dlrm_scale.data.synthetic.bags import bag_law
from dlrm_scale.data.synthetic.columns import PRESETS, scaled
from dlrm_scale.data.synthetic.folder import SyntheticFolder, alone_in, check_folder, new_file
from dlrm_scale.data.synthetic.model import planted_model
from dlrm_scale.data.synthetic.parameters import CALIBRATION_SEED, SyntheticParameters, day_rows
from dlrm_scale.data.synthetic.rows import RowSource, format_rows
from dlrm_scale.data.synthetic.scores import TruthScores
from dlrm_scale.errors import ConfigError, DataError
from dlrm_scale.host_cores import usable_cores
from dlrm_scale.schema import CATEGORY_COLUMNS
from dlrm_scale.units import format_bytes

__all__ = ["SYNTHETIC_JSON", "SyntheticParameters", "day_rows", "generate", "row_source"]

SYNTHETIC_JSON = "synthetic.json"
SCHEMA_VERSION = 1
GENERATOR_VERSION = 2
"""Raised whenever the same parameters give other rows."""

_CHUNK_ROWS = 32_768
_MOST_THREADS = 4
"""One thread writes; more than these would only wait for it."""
_FREQUENT_TRAINING_ROWS = 20
"""Ids expected in fewer training rows count as unlearnable in `attainable_from_frequent_ids`."""
_CALIBRATION_ROWS = {False: 1 << 18, True: 1 << 16}
"""Without and with bags, whose rows take longer; the click rate comes out within 0.4 % of itself."""
_BYTES_A_ROW = {False: 220, True: 90}
"""Least bytes of a row on disk, plain and gzip; the files measure about 245 and 105."""
_BYTES_AN_ID = {False: 2, True: 1}
"""The same of each id after the first of a bag: it has 9 bytes, but Kaggle's C22 is missing in 77 % of the rows."""


def row_source(parameters: SyntheticParameters) -> RowSource:
    """Build the source of all rows, with the intercept set so that the mean click probability is the published rate.

    Raises:
        ConfigError: a parameter is out of range.
    """
    parameters = parameters.resolved()
    assert parameters.scale is not None
    preset = scaled(PRESETS[parameters.preset], parameters.scale)
    mean_ids = tuple(parameters.multi_hot.get(name, 1) for name in CATEGORY_COLUMNS)
    model = planted_model(preset, _intercept(parameters.preset, parameters.scale, mean_ids))
    training_rows = sum(day_rows(parameters.rows, parameters.days, parameters.seed)[:-1]) or parameters.rows
    return RowSource(
        preset=preset,
        model=model,
        seed=parameters.seed,
        frequent_share=_FREQUENT_TRAINING_ROWS / training_rows,
        mean_ids=mean_ids,
    )


def generate(
    folder: Path,
    parameters: SyntheticParameters,
    *,
    force: bool = False,
    on_rows: Callable[[int], None] | None = None,
    chunk_rows: int | None = None,
) -> tuple[dict[str, Any], bool]:
    """Write the set into `folder`, or find that it is already there.

    A set of the same parameters in which a file's size is wrong is written anew, one of other parameters only with
    `force`; its old day files are removed first, files of other making never. Memory doesn't grow with the rows: the
    whole process peaks near 220 MB.

    Args:
        folder: made if absent.
        parameters: what to generate.
        force: also replace a set of other parameters, write into a non-empty folder that this function didn't make, and
            over files of other making that have the names of new day files; files of other names stay.
        on_rows: called with the number of rows just written.
        chunk_rows: rows drawn at a time, by default about 8 MB of text; doesn't change the text.

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
    written = SyntheticFolder(folder)
    names = _day_files(parameters)
    check_folder(folder, names, made=_files_of(earlier), ours=earlier is not None or written.interrupted, force=force)
    if earlier is not None and not force and earlier.get("parameters") != parameters.to_json():
        raise ConfigError(
            f"{folder} holds a set that was made with other arguments",
            remedy="give another folder, or --force to replace it",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_space(folder, parameters)
        with alone_in(folder):
            written.begin(names, earlier=_files_of(earlier))
            if earlier is not None:
                (folder / SYNTHETIC_JSON).unlink()
            written.remove_earlier()
            document = _write_days(written, parameters, on_rows or (lambda rows: None), chunk_rows)
            with new_file(folder / SYNTHETIC_JSON) as file:
                file.write((json.dumps(document, indent=1) + "\n").encode())
            written.end()
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise DataError(
            f"{error.filename or folder}: {'the disk is full' if full else error.strerror or error}",
            remedy="free space or choose another folder" if full else "check the folder's path and permissions",
        ) from error
    return document, True


def _write_days(
    folder: SyntheticFolder, parameters: SyntheticParameters, on_rows: Callable[[int], None], chunk_rows: int | None
) -> dict[str, Any]:
    source = row_source(parameters)
    chunk_rows = chunk_rows or _chunk_rows(source.mean_ids)
    files: list[dict[str, Any]] = []
    whole, whole_frequent = TruthScores(), TruthScores()
    first_row = 0
    threads = min(_MOST_THREADS, usable_cores())
    rows_of_days = day_rows(parameters.rows, parameters.days, parameters.seed)
    for day, (name, rows) in enumerate(zip(_day_files(parameters), rows_of_days, strict=True)):
        scores, frequent = TruthScores(), TruthScores()
        path = folder.path / name
        content = xxhash.xxh3_128()
        content_bytes = 0
        with folder.new_day(name) as raw, _compressed(raw, parameters.gzip) as out:
            draws = ((first_row + start, min(chunk_rows, rows - start), day) for start in range(0, rows, chunk_rows))
            for chunk in _drawn_ahead(source, draws, threads):
                out.write(chunk.text)
                content.update(chunk.text)
                content_bytes += len(chunk.text)
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
        "parameters": parameters.to_json(),
        "cardinalities": {f"C{c}": law.ids for c, law in enumerate(source.preset.categories, start=1)},
        "fresh_ids_per_day": {f"C{c}": law.fresh_ids for c, law in enumerate(source.preset.categories, start=1)},
        "click_rate_target": source.preset.click_rate,
        "intercept": model.intercept,
        "frequent_id_rows": _FREQUENT_TRAINING_ROWS,
        "files": files,
        "all_days": _truth(whole, whole_frequent),
        "validation": {"file": files[-1]["file"], **{key: files[-1][key] for key in _truth(whole, whole_frequent)}},
        **_multi_hot(parameters),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chunk:
    text: memoryview
    labels: npt.NDArray[np.uint8]
    logits: npt.NDArray[np.float64]
    frequent_logits: npt.NDArray[np.float64]


def _drawn_ahead(source: RowSource, draws: Iterator[tuple[int, int, int]], threads: int) -> Iterator[_Chunk]:
    """Draw and format in threads, which numba's kernels allow; chunks come in order, at most `threads` + 1 ahead."""

    def make(first_row: int, rows: int, day: int) -> _Chunk:
        drawn = source.draw(first_row, rows, day)
        return _Chunk(
            text=format_rows(drawn).data,
            labels=drawn.labels,
            logits=drawn.logits,
            frequent_logits=drawn.frequent_logits,
        )

    with ThreadPoolExecutor(threads, "synth") as pool:
        ahead = deque(pool.submit(make, *draw) for draw in islice(draws, threads + 1))
        try:
            while ahead:
                chunk = ahead.popleft().result()
                ahead.extend(pool.submit(make, *draw) for draw in islice(draws, 1))
                yield chunk
        finally:
            pool.shutdown(cancel_futures=True)


def _multi_hot(parameters: SyntheticParameters) -> dict[str, Any]:
    if not parameters.multi_hot:
        return {}
    laws = {name: bag_law(mean) for name, mean in parameters.multi_hot.items()}
    return {
        "multi_hot": {name: {"mean_ids": law.mean, "most_ids": law.most} for name, law in laws.items()},
        "preprocess_flag": f"--multi-hot {','.join(laws)}",
    }


def _chunk_rows(mean_ids: tuple[int, ...]) -> int:
    """Rows that are drawn at a time: fewer where rows are long, in powers of two."""
    return max(256, _CHUNK_ROWS >> (math.ceil(sum(mean_ids) / len(mean_ids)) - 1).bit_length())


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
def _intercept(preset_name: str, scale: float, mean_ids: tuple[int, ...]) -> float:
    """Find the intercept that gives the published click rate on rows of a seed that users can't choose."""
    preset = scaled(PRESETS[preset_name], scale)
    source = RowSource(preset=preset, model=planted_model(preset, 0.0), seed=CALIBRATION_SEED, mean_ids=mean_ids)
    chunk = _chunk_rows(mean_ids)
    logits = np.concatenate(
        [source.draw(first, chunk, 0).logits for first in range(0, _CALIBRATION_ROWS[max(mean_ids) > 1], chunk)]
    )
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


def _files_of(document: dict[str, Any] | None) -> list[str]:
    return [] if document is None else [Path(entry["file"]).name for entry in document["files"]]


def _day_files(parameters: SyntheticParameters) -> list[str]:
    return [f"day_{day}.tsv{'.gz' if parameters.gzip else ''}" for day in range(parameters.days)]


def _is_complete(folder: Path, earlier: dict[str, Any], parameters: SyntheticParameters) -> bool:
    versions = (earlier.get("schema_version"), earlier.get("generator_version"))
    if versions != (SCHEMA_VERSION, GENERATOR_VERSION) or earlier.get("parameters") != parameters.to_json():
        return False
    return all(
        (folder / entry["file"]).is_file() and (folder / entry["file"]).stat().st_size == entry["size_bytes"]
        for entry in earlier["files"]
    )


def _check_space(folder: Path, parameters: SyntheticParameters) -> None:
    more_ids = sum(parameters.multi_hot.values()) - len(parameters.multi_hot)
    needed = parameters.rows * (_BYTES_A_ROW[parameters.gzip] + more_ids * _BYTES_AN_ID[parameters.gzip])
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            f"{folder}: {parameters.rows:,} rows need at least {format_bytes(needed)}, {format_bytes(free)} are free",
            remedy="give fewer --rows, --gzip, or a folder on a larger disk",
        )


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
