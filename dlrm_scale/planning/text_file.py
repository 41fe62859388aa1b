"""The planner's files (tables, cluster, plan): read as TOML or JSON, written whole or not at all."""

import json
import os
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dlrm_scale.errors import ConfigError

__all__ = ["check_new", "check_outputs", "read_values", "value_text", "write_text"]


def read_values(path: Path) -> dict[str, Any]:
    """Read a file whose name ends in .toml or .json.

    Raises:
        ConfigError: it can't be read, isn't what its name says, or holds no keys with values.
    """
    try:
        text = path.read_bytes().decode("utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}", remedy="check the path") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error}", remedy="save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}", remedy="mend it there") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}", remedy="mend it there") from None
    except ValueError as error:  # a whole number of more digits than Python reads
        raise ConfigError(f"{path}: {error}", remedy="mend it there") from None
    except RecursionError:
        raise ConfigError(f"{path}: values inside values, too deep to read", remedy="mend it there") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: found {type(values).__name__}, not keys with values", remedy="write an object")
    return values


def check_new(path: Path, *, force: bool) -> None:
    """Refuse, before long work, a file that couldn't be written after it.

    Args:
        path: of the file.
        force: it may exist.

    Raises:
        ConfigError: it exists, it is a folder, the folder for it doesn't exist, or no file can be made there.
    """
    try:
        _check_place(path, force=force)
        # Only making a file tells whether one can be made: permissions, read-only and special file systems, long names.
        temporary = _temporary(path)
        temporary.open("xb").close()
        temporary.unlink()
    except OSError as error:
        raise ConfigError(
            f"{path} can't be written: {error.strerror}", remedy="name a file in a folder that can be written"
        ) from None


def check_outputs(paths: Mapping[str, Path | None], *, force: bool) -> None:
    """Refuse, before long work, files that couldn't all be written after it.

    Args:
        paths: by the option that names them; None where it wasn't given.
        force: they may exist.

    Raises:
        ConfigError: as `check_new`, or two options name the same file, whatever they call it.
    """
    found: dict[Path, str] = {}
    for option, path in paths.items():
        if path is None:
            continue
        check_new(path, force=force)
        other = found.setdefault(path.resolve(), option)
        if other != option:
            raise ConfigError(f"{other} and {option} name the same file, {path}", remedy="name two files")


def value_text(value: object) -> str:
    """Write a number, string or array as JSON does; TOML reads it too, but for one control character, which is escaped.

    Raises:
        ValueError: not a finite number.
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")


def _check_place(path: Path, *, force: bool) -> None:
    if path.is_dir():
        raise ConfigError(f"{path} is a folder", remedy="name a file")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is a device, pipe or socket, which can't be replaced", remedy="name a file")
    if os.path.lexists(path) and not force:
        raise ConfigError(f"{path} exists already", remedy="name another file, or replace it with --force")
    if not path.parent.is_dir():
        raise ConfigError(f"the folder {path.parent} doesn't exist", remedy="make it first")


def write_text(path: Path, text: str, *, force: bool = False) -> None:
    """Write a file under another name and give it its own when it is complete and durable.

    Args:
        path: of the file.
        text: all of it.
        force: replace one that exists.

    Raises:
        ConfigError: as `check_new`, or it can't be written.
    """
    temporary = _temporary(path)
    try:
        _check_place(path, force=force)
        with temporary.open("xb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        if force:
            os.replace(temporary, path)
        else:
            # A link, for a rename would replace what somebody else has put there meanwhile.
            os.link(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}", remedy="check the disk and the path") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}-{os.getpid()}.tmp")


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
