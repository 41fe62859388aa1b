"""`dlrm-scale checkpoint export`: a checkpoint for other programs."""

import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dlrm_scale.cli.checkpoint_words import AsJson, Run, counted, find_step, newest_told_of, print_json

if TYPE_CHECKING:
    from dlrm_scale.checkpoint.chain.chain import Chain
    from dlrm_scale.checkpoint.export import Contents
    from dlrm_scale.checkpoint.storage.storage import Storage
    from dlrm_scale.train.told_checkpoints import ToldCheckpoint

__all__ = ["Format", "export"]


class Format(StrEnum):
    """What a checkpoint can become."""

    safetensors = "safetensors"
    parquet = "parquet"
    dcp = "dcp"


def export(
    run: Run,
    to: Annotated[
        Format,
        typer.Option(
            help="safetensors: one file with whole tables, optimizer state and dense part; parquet: a folder with a "
            "file a table; dcp: a folder for torch.distributed.checkpoint, with everything."
        ),
    ],
    out: Annotated[Path, typer.Option(help="New file or folder; it appears whole, or not at all.")],
    step: Annotated[
        str | None, typer.Option(help="Checkpoint of this step, or best. Default: the newest.", metavar="STEP|best")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint as one safetensors file, as Parquet or for torch.distributed.checkpoint, table by table.

    Exits with 4 where the newest checkpoint, or that of --step, is damaged and no other files have its rows: an older
    one is taken only by its step. Exits with 2 where no checkpoint has this step.
    """
    from dlrm_scale.checkpoint import export as formats
    from dlrm_scale.checkpoint.storage.storage import open_storage
    from dlrm_scale.recipes import find_checkpoints
    from dlrm_scale.units import format_bytes, format_count, format_seconds

    write = {
        Format.safetensors: formats.export_safetensors,
        Format.parquet: formats.export_parquet,
        Format.dcp: formats.export_dcp,
    }[to]
    began = time.perf_counter()
    which = find_step(run, step) if step is not None else None
    told = newest_told_of(run)
    chain, size = _write(open_storage(find_checkpoints(run)), which, told, lambda contents: write(contents, out))
    seconds = time.perf_counter() - began
    rows = sum(table.rows for table in chain.tip.tables)
    if as_json:
        result = {
            "out": str(out),
            "format": to.value,
            "step": chain.step,
            "checkpoint": chain.name,
            "tables": len(chain.tip.tables),
            "rows": rows,
            "bytes": size,
            "seconds": seconds,
        }
        print_json(result)
        return
    typer.echo(
        f"{out}: step {chain.step}, {format_count(rows)} rows of {counted(len(chain.tip.tables), 'table')}, "
        f"{format_bytes(size)} in {format_seconds(seconds)}"
    )


def _write(
    storage: "Storage", step: int | str | None, told: "ToldCheckpoint | None", write: "Callable[[Contents], int]"
) -> "tuple[Chain, int]":
    """Export the checkpoint; by other files with the same rows where some are damaged. Returns what was read."""
    from dlrm_scale.checkpoint import export as formats
    from dlrm_scale.checkpoint.chain.leases import hold_chain
    from dlrm_scale.checkpoint.files.format import DamagedFileError
    from dlrm_scale.cli.byte_progress import ByteProgress

    damaged: dict[str, str] = {}
    wanted: Chain | None = None
    while True:
        with hold_chain(storage, partial(_choose, storage, step, told, wanted, damaged)) as chain:
            assert chain is not None
            wanted = chain
            for detour in chain.detours:
                typer.echo(f"note: read without a damaged file: {detour}", err=True)
            try:
                with ByteProgress("exporting", chain.size_bytes) as bar:
                    return chain, write(formats.Contents(chain, bar.advance))
            except DamagedFileError as error:
                if error.file in damaged:
                    raise
                damaged[error.file] = error.message


def _choose(
    storage: "Storage",
    step: int | str | None,
    told: "ToldCheckpoint | None",
    wanted: "Chain | None",
    damaged: Mapping[str, str],
) -> "Chain":
    from dlrm_scale.checkpoint.chain.chain import open_chain
    from dlrm_scale.checkpoint.chain.damage import damage_met, lost_steps
    from dlrm_scale.checkpoint.verify import chain_of_step
    from dlrm_scale.errors import CheckpointError, StorageError
    from dlrm_scale.train.told_checkpoints import with_lost_steps

    if wanted is None:
        if step is not None:
            return chain_of_step(storage, step)
        chain = with_lost_steps(chain_of_step(storage, None), told)
        if chain.skipped:
            raise lost_steps(chain)
        return chain
    try:
        return open_chain(storage, wanted.name, damaged=damaged)
    except StorageError:
        raise
    except CheckpointError as error:
        raise damage_met(wanted, damaged) from error
