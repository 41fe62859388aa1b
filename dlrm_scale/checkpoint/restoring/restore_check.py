"""Restores a checkpoint into nothing: every row, state value and dense value is read, checked and dropped."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from dlrm_scale.checkpoint.chain.chain import Chain
from dlrm_scale.checkpoint.chain.table_stream import TableStream
from dlrm_scale.checkpoint.files.finite_values import finite_blocks
from dlrm_scale.checkpoint.files.format import BlockReader, DamagedFileError, unreadable
from dlrm_scale.checkpoint.files.manifest import FileRecord, TableRecord
from dlrm_scale.errors import CheckpointError, StorageError

__all__ = ["RestoreCheck", "check_restore"]


@dataclass(frozen=True, kw_only=True)
class RestoreCheck:
    """What a restore on one rank would read, and what is wrong with it.

    Attributes:
        checkpoint: its manifest.
        step: its step.
        manifests: links of the chain.
        tables: how many were put together.
        rows: of all tables.
        bytes_read: from data files.
        seconds: that took.
        faults: (file, what is wrong), the first of each table and file; empty if every row is there, sound and finite.
    """

    checkpoint: str
    step: int
    manifests: int
    tables: int
    rows: int
    bytes_read: int
    seconds: float
    faults: tuple[tuple[str, str], ...]


def check_restore(
    chain: Chain,
    *,
    progress: Callable[[int], None] = lambda size_bytes: None,
    now: Callable[[], float] = time.perf_counter,
) -> RestoreCheck:
    """Put all tables of a chain together, a window of rows at a time, and read its dense and rank tensors.

    Goes on after a fault, with the next table or file.

    Args:
        chain: from `find_chain` or `open_chain`.
        progress: told the bytes read since the last call.
        now: a clock in seconds.

    Raises:
        StorageError: the storage doesn't answer, so it isn't known.
    """
    began = now()
    faults: list[tuple[str, str]] = []
    read = 0

    def note(size_bytes: int) -> None:
        nonlocal read
        read += size_bytes
        progress(size_bytes)

    for table in chain.tip.tables:
        with _noted(faults, chain.name):
            _check_table(chain, table, note)
    for file in chain.tip.files:
        with _noted(faults, chain.name):
            _check_tensors(chain, file, note)
    return RestoreCheck(
        checkpoint=chain.name,
        step=chain.step,
        manifests=len(chain.manifests),
        tables=len(chain.tip.tables),
        rows=sum(table.rows for table in chain.tip.tables),
        bytes_read=read,
        seconds=now() - began,
        faults=tuple(faults),
    )


@contextmanager
def _noted(faults: list[tuple[str, str]], checkpoint: str) -> Iterator[None]:
    """Turn the damage that a part of the check finds into a fault."""
    try:
        yield
    except StorageError:
        raise
    except DamagedFileError as error:
        faults.append((error.file or checkpoint, error.message))
    except CheckpointError as error:
        faults.append((checkpoint, error.message))


def _check_table(chain: Chain, table: TableRecord, note: Callable[[int], None]) -> None:
    stream = TableStream(chain, table)
    seen = 0
    try:
        for block in stream:
            for name, values in {"weight": block.weight, **block.state}.items():
                for _ in finite_blocks([values], partial(_place, table.name, name, block.row_start)):
                    pass
            note(stream.bytes_read - seen)
            seen = stream.bytes_read
    finally:
        note(stream.bytes_read - seen)


def _check_tensors(chain: Chain, file: FileRecord, note: Callable[[int], None]) -> None:
    try:
        with chain.storage.open(file.name) as opened:
            for name, record in file.tensors.items():
                values = BlockReader(opened, record).read()
                note(record.size_bytes)
                for _ in finite_blocks([values], partial(_place, file.name, name, 0)):
                    pass
    except OSError as error:
        raise unreadable(f"can't open {file.name}: {error}", error, file.name) from error


def _place(where: str, name: str, first_row: int, row: int, column: int) -> str:
    return f"{where}: {name} of row {first_row + row}, column {column},"
