"""What `predict` reads and where it works: raw files become a dataset beside the output, which is removed at the end.

.NAME.predict/          beside the output NAME; locked while a process works there
    dataset/            raw rows as a dataset, mapped as the training rows were
    scores              takes NAME in one step when it is whole
"""

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.data.durable import fsync_folder
from dlrm_scale.data.preprocess.options import PreprocessOptions
from dlrm_scale.data.preprocess.passes import OnProgress
from dlrm_scale.data.preprocess.preprocess import preprocess
from dlrm_scale.data.preprocess.staging import REJECTED_FILE
from dlrm_scale.data.source.inputs import find_inputs
from dlrm_scale.errors import ConfigError, DataError
from dlrm_scale.scoring.score_file import SourceLines

__all__ = ["dataset_sources", "is_dataset", "prepare_rows", "publish", "working_folder"]


def is_dataset(path: Path) -> bool:
    """Whether a folder is a preprocessed dataset."""
    return (path / "dataset.json").is_file()


@contextmanager
def working_folder(out: Path, *, force: bool) -> Iterator[Path]:
    """Claim the folder beside `out` in which it is made; it is removed at the end, with what a killed process left.

    Args:
        out: the file to make.
        force: it may be there already.

    Raises:
        ConfigError: the output is there already, its folder isn't or can't be written, or another process makes it.
    """
    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder", remedy="name a file")
    if out.exists() and not force:
        raise ConfigError(f"--out {out} is there already", remedy="name another file, or replace it with --force")
    folder = out.with_name(f".{out.name}.predict")
    try:
        folder.mkdir(exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(
            f"--out {out}: folder {out.parent}: {error.strerror}", remedy="name a file in a folder that can be written"
        ) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = os.fstat(descriptor).st_ino == folder.stat().st_ino
        except (BlockingIOError, FileNotFoundError):
            ours = False
        if not ours:
            raise ConfigError(f"--out {out}: another process is making it", remedy="wait for it, or name another file")
        _clear(folder)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def publish(made: Path, out: Path) -> None:
    """Give a finished file its name, in one step and durably."""
    os.replace(made, out)
    fsync_folder(out.parent)


def prepare_rows(
    inputs: Sequence[Path], folder: Path, options: PreprocessOptions, *, on_progress: OnProgress | None = None
) -> tuple[Path, tuple[SourceLines, ...], Path | None, tuple[str, ...]]:
    """Map raw rows as the training rows were.

    Args:
        inputs: raw files, or `-`.
        folder: a `working_folder`.
        options: with `vocabulary_from`; which rows train doesn't matter.
        on_progress: told of the passes.

    Returns:
        The dataset's folder; the files with their lines; a file with the bad rows that were left out, or None; notes.

    Raises:
        DataError: input that is absent, damaged or breaks the format.
        DatasetError: the dataset with the vocabularies is damaged, or there is no room.
        ConfigError: options that contradict the input.
    """
    dataset_path = folder / "dataset"
    validation = "none" if options.layout.labeled else None
    result = preprocess(inputs, dataset_path, replace(options, validation=validation), on_progress=on_progress)
    from_stdin = [str(path) for path in inputs] == ["-"]
    names = ["-"] if from_stdin else [str(file.path) for file in find_inputs(inputs).files]
    parts = result.manifest.parts
    rejected_file = dataset_path / REJECTED_FILE
    rejected: dict[str, list[int]] = {}
    if rejected_file.exists():
        with rejected_file.open(encoding="utf-8") as lines:
            next(lines)
            for line in lines:
                file, number = line.split("\t", 2)[:2]
                rejected.setdefault(file, []).append(int(number))
        known = [part.source for part in parts]
        for file in rejected:
            if known.count(file) > 1:
                raise DataError(
                    f"{file}: two files have this name, so that bad rows can't be told apart",
                    remedy="score them with one command each, or correct the rows",
                )
    header = int(options.layout.header)
    sources = tuple(
        SourceLines(
            name=name,
            rows=part.rows,
            lines_before=header,
            rejected=np.array(sorted(rejected.get(part.source, [])), np.int64),
        )
        for name, part in zip(names, parts, strict=True)
    )
    return dataset_path, sources, rejected_file if rejected else None, result.notes


def dataset_sources(dataset: Dataset) -> tuple[SourceLines, ...]:
    """The files that a dataset was made of."""
    return tuple(SourceLines(name=part.source or part.file, rows=part.rows) for part in dataset.manifest.parts)


def _clear(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
