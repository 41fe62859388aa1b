"""`dlrm-scale checkpoint export`: a checkpoint for other programs."""

import json
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["Format", "export"]


class Format(StrEnum):
    """What a checkpoint can become."""

    safetensors = "safetensors"
    parquet = "parquet"
    dcp = "dcp"


def export(
    run: Annotated[str, typer.Argument(help="Folder of a run or of checkpoints, or their URL.", metavar="RUN")],
    to: Annotated[
        Format,
        typer.Option(
            help="safetensors: one file with whole tables, optimizer state and dense part; parquet: a folder with a "
            "file a table; dcp: a folder for torch.distributed.checkpoint, with everything."
        ),
    ],
    out: Annotated[Path, typer.Option(help="New file or folder; it appears whole, or not at all.")],
    step: Annotated[int | None, typer.Option(help="Checkpoint of this step. Default: the newest.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a checkpoint as one safetensors file, as Parquet or for torch.distributed.checkpoint, table by table."""
    from dlrm_scale.checkpoint import export as formats
    from dlrm_scale.checkpoint.chain.leases import hold_chain
    from dlrm_scale.checkpoint.storage.storage import open_storage
    from dlrm_scale.checkpoint.verify import chain_of_step
    from dlrm_scale.cli.byte_progress import ByteProgress
    from dlrm_scale.recipes import find_checkpoints
    from dlrm_scale.units import format_bytes, format_count, format_seconds

    write = {
        Format.safetensors: formats.export_safetensors,
        Format.parquet: formats.export_parquet,
        Format.dcp: formats.export_dcp,
    }[to]
    storage = open_storage(find_checkpoints(run))
    began = time.perf_counter()
    with hold_chain(storage, lambda: chain_of_step(storage, step)) as chain:
        assert chain is not None
        with ByteProgress("exporting", chain.size_bytes) as bar:
            size = write(formats.Contents(chain, bar.advance), out)
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
        typer.echo(json.dumps(result, indent=2))
        return
    typer.echo(
        f"{out}: step {chain.step}, {format_count(rows)} rows of {len(chain.tip.tables)} tables, {format_bytes(size)} "
        f"in {format_seconds(seconds)}"
    )
