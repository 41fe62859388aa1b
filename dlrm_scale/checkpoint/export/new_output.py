"""A file or folder that appears whole under its name, replaces nothing, or doesn't appear at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dlrm_scale.errors import ConfigError, StorageError
from dlrm_scale.units import format_bytes

__all__ = ["new_file", "new_folder"]


@contextmanager
def new_file(path: Path, size_bytes: int) -> Iterator[int]:
    """Give a descriptor for writing; at the end of the block the file has its name and is durable.

    Args:
        path: the file's name.
        size_bytes: that it is going to have; refused where there is less room.

    Raises:
        ConfigError: it exists, or its folder doesn't.
        StorageError: it can't be written.
    """
    temporary = _temporary(path, size_bytes)
    with _told(path):
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with _told(path):
            try:
                yield descriptor
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            # A link, for a rename would replace what somebody else has put there meanwhile.
            os.link(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink()
    with _told(path):
        _sync_folder(path.parent)


@contextmanager
def new_folder(path: Path, size_bytes: int) -> Iterator[Path]:
    """Give a folder to write into; at the end of the block it has its name, with files that are durable.

    Args:
        path: the folder's name.
        size_bytes: that its files are going to have in all; refused where there is less room.

    Raises:
        ConfigError: it exists, or the folder that it is to lie in doesn't.
        StorageError: it can't be written.
    """
    temporary = _temporary(path, size_bytes)
    try:
        with _told(path):
            temporary.mkdir()
            yield temporary
            for file in temporary.iterdir():
                descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            _sync_folder(temporary)
            if os.path.lexists(path):
                raise FileExistsError(f"{path} has been made by somebody else meanwhile")
            os.rename(temporary, path)
            _sync_folder(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _temporary(path: Path, size_bytes: int) -> Path:
    if os.path.lexists(path):
        raise ConfigError(f"{path} exists already", remedy="name another --out, or remove it first")
    if not path.parent.is_dir():
        raise ConfigError(f"the folder {path.parent} doesn't exist", remedy="make it first")
    free = shutil.disk_usage(path.parent).free
    if free < size_bytes:
        raise StorageError(
            f"{path} needs {format_bytes(size_bytes)}, and {path.parent} has {format_bytes(free)} free",
            remedy="make room, or name an --out on another disk",
        )
    return path.with_name(f".{path.name}-{os.getpid()}.tmp")


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path} can't be written: {error}", remedy="check the disk and --out") from error


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
