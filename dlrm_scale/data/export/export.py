"""Export a dataset for other programs: `dlrm-scale dataset export`.

    FOLDER/part-00000.parquet …              or day_0_dense.npy …, see `export_parquet` and `export_npy`
    FOLDER/_vocabularies/vocabulary-C1.parquet …   raw id -> table row, where the dataset has them
    FOLDER/_export.json                      what this is an export of

Readers of Parquet folders (pyarrow, pandas, Spark) pass over names that start with `_`. Everything is written into a
hidden folder `.FOLDER.exporting` beside FOLDER, which takes FOLDER's name when it is complete and durable. An export
that is killed leaves that hidden folder, and FOLDER as it was; only between the last two renamings there is no FOLDER,
and the export that was to be replaced is in `.FOLDER.replaced`. The next export to FOLDER, of whatever, first puts that
back and removes what else is hidden.
"""

import errno
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.data.durable import fsync_file, fsync_folder
from dlrm_scale.data.export.export_npy import check_rectangular, check_space, npy_bytes, write_npy
from dlrm_scale.data.export.export_parquet import write_parquet
from dlrm_scale.data.export.export_rows import ExportedPart, exported_parts
from dlrm_scale.data.stoppable import StoppedError, run_until_error
from dlrm_scale.data.vocabulary.vocabulary_file import vocabulary_file
from dlrm_scale.errors import ConfigError, DatasetError

__all__ = ["EXPORT_FILE", "VOCABULARIES_FOLDER", "ExportResult", "ExportTarget", "export_dataset"]

ExportTarget = Literal["parquet", "npy"]

EXPORT_FILE = "_export.json"
VOCABULARIES_FOLDER = "_vocabularies"
_KIND = "dlrm_scale export"
_FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """What was exported.

    Attributes:
        content: what `_export.json` holds.
        up_to_date: the folder held exactly this export already; nothing was written.
    """

    content: dict[str, Any]
    up_to_date: bool


def export_dataset(
    dataset: Dataset,
    folder: Path,
    *,
    to: ExportTarget,
    split: str | None = None,
    force: bool = False,
    jobs: int = 1,
    on_progress: Callable[[int, int], None] | None = None,
) -> ExportResult:
    """Write rows of a dataset in another format.

    Memory doesn't grow with the dataset: each job holds one row group or record batch, some 130 MB for Parquet.

    Args:
        dataset: what to export.
        folder: new or empty, or an earlier export.
        to: `parquet` or `npy`.
        split: `train`, `validation` or `test`; None takes all rows.
        force: replace an earlier export of something else; never anything that isn't an export.
        jobs: parts that are worked on at a time; the files don't depend on it.
        on_progress: called with rows done and rows in all, by one thread at a time.

    Raises:
        ConfigError: the folder holds something else, or there is no job.
        DatasetError: the dataset is damaged or has no such rows, a column doesn't fit .npy arrays, the disk is full or
            can't be written, or another process exports into the folder.
    """
    if jobs < 1:
        raise ConfigError(f"--jobs is {jobs}", remedy="give 1 or more")
    parts = exported_parts(dataset, split)
    rows = sum(part.rows for part in parts)
    if to == "npy":
        check_rectangular(dataset)
        if not _labeled(dataset):
            raise ConfigError(
                f"{dataset.path}: its rows have no labels, the .npy layout has a file of them",
                remedy="export to parquet, which leaves the column out",
            )
    facts = _facts(dataset, to, split)
    folder = folder.resolve()
    progress = _Progress(rows, on_progress)
    try:
        _put_back(folder)
        earlier = _earlier(folder)
        if earlier is not None and not force and _is_same(folder, earlier, facts):
            return ExportResult(content=earlier, up_to_date=True)
        _check_folder(folder, earlier, force=force)
        with _staged(folder) as staging:
            if to == "npy":
                check_space(staging, npy_bytes(rows))

            def write(part: ExportedPart, staging: Path = staging) -> list[str]:
                if to == "parquet":
                    return write_parquet(staging, dataset, part, facts, progress.add)
                return write_npy(staging, dataset, part, progress.add)

            files = [
                {"file": name, "source": part.source, "rows": part.rows, "size_bytes": _size(staging / name)}
                for part, names in zip(parts, _write_parts(parts, write, jobs, progress), strict=True)
                for name in names
            ]
            vocabularies = _copy_vocabularies(dataset, staging)
            content = {**facts, "rows": rows, "files": files, "vocabularies": vocabularies}
            _write_synced(staging / EXPORT_FILE, json.dumps(content, indent=1) + "\n")
            fsync_folder(staging)
            _put_in_place(staging, folder)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise DatasetError(
            f"{folder} can't be written: {'the disk is full' if full else error}",
            remedy="free space or name another folder" if full else "check the folder's path and permissions",
        ) from error
    return ExportResult(content=content, up_to_date=False)


def _labeled(dataset: Dataset) -> bool:
    return dataset.manifest.statistics.get("labeled") is not False


class _Progress:
    """Rows done by all threads; also how they learn that they needn't go on."""

    def __init__(self, rows: int, report: Callable[[int, int], None] | None) -> None:
        self._rows, self._report = rows, report
        self._done = 0
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def add(self, count: int) -> None:
        """Count rows that were just done."""
        if self._stopped.is_set():
            raise StoppedError
        with self._lock:
            self._done += count
            if self._report is not None:
                self._report(self._done, self._rows)

    def stop(self) -> None:
        """Make every thread end at its next report."""
        self._stopped.set()


def _write_parts(
    parts: Sequence[ExportedPart], write: Callable[[ExportedPart], list[str]], jobs: int, progress: _Progress
) -> list[list[str]]:
    with ThreadPoolExecutor(min(jobs, len(parts)), "export") as pool:
        return run_until_error(pool, write, parts, progress.stop)


def _facts(dataset: Dataset, to: ExportTarget, split: str | None) -> dict[str, Any]:
    return {
        "kind": _KIND,
        "format_version": _FORMAT_VERSION,
        "to": to,
        "fingerprint": dataset.fingerprint,
        "split": split,
        "table_rows": dataset.table_rows,
        "multi_hot": list(dataset.multi_hot),
        "transforms": dataset.manifest.transforms,
    }


def _earlier(folder: Path) -> dict[str, Any] | None:
    try:
        content = json.loads((folder / EXPORT_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and content.get("kind") == _KIND else None


def _is_same(folder: Path, earlier: dict[str, Any], facts: dict[str, Any]) -> bool:
    # Through JSON, so that tuples in the transforms compare equal.
    return all(earlier.get(name) == value for name, value in json.loads(json.dumps(facts)).items()) and _is_whole(
        folder, earlier
    )


def _is_whole(folder: Path, content: dict[str, Any]) -> bool:
    return all(
        (folder / entry["file"]).is_file() and _size(folder / entry["file"]) == entry["size_bytes"]
        for entry in content["files"]
    )


def _check_folder(folder: Path, earlier: dict[str, Any] | None, *, force: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file, not a folder", remedy="name a folder for --out")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if earlier is None:
        raise ConfigError(f"{folder} isn't empty and holds no export", remedy="name a new or empty folder for --out")
    if not force:
        raise ConfigError(
            f"{folder} holds another export ({earlier.get('to')}, split {earlier.get('split') or 'all'}) or a "
            "damaged one",
            remedy="name another folder for --out, or give --force to replace it",
        )


@contextmanager
def _staged(folder: Path) -> Iterator[Path]:
    """Give an empty hidden folder beside `folder`, ours alone; what is left of it at the end is removed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = folder.parent / f".{folder.name}.exporting"
    staging.mkdir(exist_ok=True)
    descriptor = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(descriptor, staging, folder)
        for entry in staging.iterdir():
            _remove(entry)
        yield staging
    finally:
        # Another export may have the folder; its lock is held then, and ours is not.
        if _is_ours(descriptor, staging):
            shutil.rmtree(staging, ignore_errors=True)
        os.close(descriptor)


def _lock(descriptor: int, staging: Path, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DatasetError(
            f"{folder}: another process is exporting into it", remedy="wait for it, or name another folder"
        ) from None
    if not _same_folder(descriptor, staging):
        raise DatasetError(f"{folder}: another process has just exported into it", remedy="look at what it wrote")


def _same_folder(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _is_ours(descriptor: int, staging: Path) -> bool:
    if not _same_folder(descriptor, staging):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _put_in_place(staging: Path, folder: Path) -> None:
    """Give the finished folder its name; an earlier export steps aside first, and comes back if that fails."""
    aside = _aside(folder)
    replaces = folder.is_dir() and any(folder.iterdir())
    if replaces:
        _remove(aside)
        folder.rename(aside)
    try:
        staging.rename(folder)
    except BaseException:
        if replaces:
            aside.rename(folder)
        raise
    fsync_folder(folder.parent)
    # The export is done; what can't be removed is removed by the next one.
    shutil.rmtree(aside, ignore_errors=True)


def _put_back(folder: Path) -> None:
    """Mend what an export left that was killed while it took the place of an earlier one."""
    aside = _aside(folder)
    if not aside.is_dir():
        return
    with _staged(folder):
        content = _earlier(aside)
        if (folder.is_dir() and any(folder.iterdir())) or content is None or not _is_whole(aside, content):
            # The new export had its name already, and a part of the old one may be removed.
            _remove(aside)
        else:
            aside.rename(folder)
            fsync_folder(folder.parent)


def _aside(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.replaced"


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _copy_vocabularies(dataset: Dataset, folder: Path) -> list[str]:
    target = folder / VOCABULARIES_FOLDER
    names = []
    for column in dataset.manifest.columns:
        source = dataset.path / vocabulary_file(column.name)
        if not source.exists():
            if column.method == "frequency":
                raise DatasetError(
                    f"{source} is missing; it says which ids the rows of column {column.name} stand for",
                    remedy="restore the file, or write the dataset again with `dlrm-scale preprocess`",
                )
            continue
        target.mkdir(exist_ok=True)
        shutil.copyfile(source, target / source.name)
        fsync_file(target / source.name)
        names.append(f"{VOCABULARIES_FOLDER}/{source.name}")
    if names:
        fsync_folder(target)
    return names


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _size(path: Path) -> int:
    return path.stat().st_size
