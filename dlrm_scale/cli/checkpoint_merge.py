"""`dlrm-scale checkpoint merge | gc | pin | unpin`: what becomes of old checkpoints, beside a running trainer.

All four need no GPU and no process group, and import neither torchrec nor fbgemm.
"""

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dlrm_scale.checkpoint import Chain
    from dlrm_scale.checkpoint.storage.storage import Storage
    from dlrm_scale.checkpoint.upkeep.collect_garbage import Garbage
    from dlrm_scale.checkpoint.upkeep.merge import Merged

__all__ = ["To", "gc", "merge", "pin", "unpin"]

_Run = Annotated[str, typer.Argument(help="Folder of a run or of checkpoints, or their URL.", metavar="RUN")]
_Step = Annotated[int, typer.Argument(help="Step of a checkpoint, as `ls` lists it.", metavar="STEP")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON; with --watch a line for each merge.")]
_Keep = Annotated[
    int,
    typer.Option(help="Chains to keep that share no data file; nothing old is removed while there are fewer.", min=2),
]


class To(StrEnum):
    """What `merge` makes of a chain."""

    delta = "delta"
    baseline = "baseline"
    auto = "auto"


def merge(
    run: _Run,
    step: Annotated[str, typer.Option(help="Merge the chain to the checkpoint of this step.", metavar="N")] = "latest",
    to: Annotated[
        To,
        typer.Option(
            help="delta: all deltas into one; baseline: everything into a new baseline; auto: a baseline when the "
            "deltas have more bytes than it or a restore costs twice as much, else one delta of many small ones."
        ),
    ] = To.auto,
    watch: Annotated[
        float | None, typer.Option(help="Go on and look for work this often, until a signal.", metavar="SECONDS", min=0)
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(
            help="After a merge remove what is older than this many chains that share no data file.", metavar="N", min=2
        ),
    ] = None,
    memory_limit: Annotated[
        str, typer.Option(help="Memory for blocks of rows, beside the program's own 300 MiB.", metavar="SIZE")
    ] = "1GiB",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be merged.")] = False,
    as_json: _AsJson = False,
) -> None:
    """Merge deltas into one, or baseline and deltas into a new baseline, while the trainer goes on.

    What is merged restores the same rows, state and position in the data; what it was made of stays until it is removed
    by --keep, `gc` or the trainer. Exits with 4 if a file is damaged (--watch says so and goes by other files where it
    can), and with 130 when stopped by a signal.
    """
    from dlrm_scale.checkpoint import DamagedFileError, open_storage
    from dlrm_scale.errors import ConfigError, DlrmScaleError
    from dlrm_scale.recipes import find_checkpoints
    from dlrm_scale.units import parse_bytes

    if step != "latest" and not step.isdecimal():
        raise ConfigError(f"--step {step} is no step", remedy="give a number, or latest")
    limit_bytes = parse_bytes(memory_limit)
    storage = open_storage(find_checkpoints(run))
    damaged: dict[str, str] = {}
    choose = _chooser(storage, None if step == "latest" else int(step), damaged, may_wait=watch is not None)
    if dry_run:
        _say_plan(choose(), to, limit_bytes, as_json)
        return
    with _interruptible():
        if watch is None:
            _merge_once(storage, choose, to, limit_bytes, keep, as_json, quiet_if_idle=False)
            return
        while True:
            try:
                _merge_once(storage, choose, to, limit_bytes, keep, as_json, quiet_if_idle=True)
            except (DlrmScaleError, OSError) as error:
                # The trainer may mend it by its next save, or somebody may make room on the disk.
                typer.echo(f"error: {error}", err=True)
                if isinstance(error, DamagedFileError):
                    # Not tried again: the next round goes by other files, so that the chain doesn't grow for ever.
                    damaged[error.file] = error.message
            time.sleep(watch)


def gc(
    run: _Run,
    keep: _Keep = 2,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    as_json: _AsJson = False,
) -> None:
    """Remove old checkpoints and leftovers of crashes, while trainers, merges and restores go on.

    The newest chains stay, pinned checkpoints, what a restore or merge in progress reads, and whatever can't be read.
    """
    from dlrm_scale.checkpoint import open_storage
    from dlrm_scale.checkpoint.upkeep.collect_garbage import collect_garbage
    from dlrm_scale.recipes import find_checkpoints

    found = collect_garbage(open_storage(find_checkpoints(run)), keep_baselines=keep, dry_run=dry_run)
    if as_json:
        typer.echo(json.dumps({"dry_run": dry_run, **_garbage_summary(found)}, indent=2))
        return
    _say_garbage(found, keep, dry_run)


def pin(run: _Run, step: _Step, as_json: _AsJson = False) -> None:
    """Keep the checkpoint of a step, whatever else is removed."""
    from dlrm_scale.checkpoint import open_storage
    from dlrm_scale.checkpoint.chain.pins import pin_step
    from dlrm_scale.recipes import find_checkpoints

    name = pin_step(open_storage(find_checkpoints(run)), step)
    typer.echo(json.dumps({"pinned": name, "step": step}, indent=2) if as_json else f"pinned {name} (step {step})")


def unpin(run: _Run, step: _Step, as_json: _AsJson = False) -> None:
    """Undo `pin`; the checkpoint goes with the next removal, unless something else needs it."""
    from dlrm_scale.checkpoint import open_storage
    from dlrm_scale.checkpoint.chain.pins import unpin_step
    from dlrm_scale.recipes import find_checkpoints

    names = unpin_step(open_storage(find_checkpoints(run)), step)
    typer.echo(
        json.dumps({"unpinned": names, "step": step}, indent=2)
        if as_json
        else f"unpinned {', '.join(names)} (step {step})"
    )


def _chooser(
    storage: "Storage", step: int | None, damaged: Mapping[str, str], *, may_wait: bool
) -> "Callable[[], Chain | None]":
    def choose() -> "Chain | None":
        from dlrm_scale.checkpoint import find_chain
        from dlrm_scale.checkpoint.chain.chain import open_step
        from dlrm_scale.errors import CheckpointError

        chain = find_chain(storage, damaged=damaged) if step is None else open_step(storage, step)
        if chain is None and not may_wait:
            raise CheckpointError(f"{storage.address} holds no checkpoint", remedy="name a run that has saved one")
        return chain

    return choose


def _merge_once(
    storage: "Storage",
    choose: "Callable[[], Chain | None]",
    to: To,
    limit_bytes: int,
    keep: int | None,
    as_json: bool,
    *,
    quiet_if_idle: bool,
) -> None:
    from dlrm_scale.checkpoint import find_chain
    from dlrm_scale.checkpoint.upkeep.merge import merge_chain
    from dlrm_scale.checkpoint.upkeep.merge_plan import plan_merge
    from dlrm_scale.checkpoint.upkeep.retention import remove_old_chains

    chain = choose()
    if chain is None or plan_merge(chain.manifests, chain.checkpoint, to.value) is None:
        if not quiet_if_idle:
            typer.echo(json.dumps({"merged": [], "removed": []}, indent=2) if as_json else "nothing to merge")
        return
    with _bar(not as_json) as progress:
        merged = merge_chain(storage, choose, to.value, memory_limit_bytes=limit_bytes, progress=progress)
    removed: list[str] = []
    if keep is not None and merged:
        # whatever step was merged: chains are counted from the newest checkpoint on
        newest = find_chain(storage)
        if newest is not None:
            removed = remove_old_chains(storage, tip_name=newest.name, keep_baselines=keep)
    if as_json:
        found = {"merged": [_merged_summary(one) for one in merged], "removed": removed}
        typer.echo(json.dumps(found, indent=None if quiet_if_idle else 2))
        return
    for one in merged:
        typer.echo(_merged_line(one))
    if removed:
        typer.echo(f"removed {len(removed)} old files")


def _merged_summary(merged: "Merged") -> dict[str, object]:
    manifest, plan = merged.manifest, merged.plan
    return {
        "manifest": manifest.name,
        "kind": plan.kind,
        "step": manifest.step,
        "equal_to": plan.equal_to.name,
        "sha256": plan.equal_to.sha256,
        "made_of": [source.name for source in plan.manifests],
        "read_bytes": plan.source_bytes,
        "bytes": manifest.size_bytes,
        "rows": manifest.table_rows_written,
        "seconds": round(merged.seconds, 3),
        "reason": plan.reason,
    }


def _merged_line(merged: "Merged") -> str:
    from dlrm_scale.units import format_bytes, format_count, format_seconds

    manifest, plan = merged.manifest, merged.plan
    return (
        f"{manifest.name}: {plan.kind} of step {manifest.step} made of {len(plan.manifests)} checkpoints, "
        f"{format_bytes(plan.source_bytes)} to {format_bytes(manifest.size_bytes)}, "
        f"{format_count(manifest.table_rows_written)} rows, in {format_seconds(merged.seconds)} ({plan.reason})"
    )


def _say_plan(chain: "Chain | None", to: To, limit_bytes: int, as_json: bool) -> None:
    from dlrm_scale.checkpoint.upkeep.merge_memory import merge_memory_bytes
    from dlrm_scale.checkpoint.upkeep.merge_plan import plan_merge
    from dlrm_scale.units import format_bytes

    plan = plan_merge(chain.manifests, chain.checkpoint, to.value) if chain is not None else None
    memory_bytes = merge_memory_bytes(plan.manifests) if plan is not None else 0
    if as_json:
        found: dict[str, object] = {"dry_run": True, "kind": None}
        if plan is not None:
            found |= {
                "kind": plan.kind,
                "equal_to": plan.equal_to.name,
                "made_of": [manifest.name for manifest in plan.manifests],
                "read_bytes": plan.source_bytes,
                "memory_bytes": memory_bytes,
                "reason": plan.reason,
            }
        typer.echo(json.dumps(found, indent=2))
        return
    if plan is None:
        typer.echo("nothing to merge")
        return
    parts = "" if memory_bytes <= limit_bytes else f", several at a time within {format_bytes(limit_bytes)}"
    typer.echo(
        f"would make a {plan.kind} equal to {plan.equal_to.name} of {len(plan.manifests)} checkpoints, "
        f"{format_bytes(plan.source_bytes)}, with {format_bytes(memory_bytes)} of memory{parts} ({plan.reason})"
    )


def _garbage_summary(found: "Garbage") -> dict[str, object]:
    chains = [
        {
            "checkpoint": chain.checkpoint.name,
            "manifests": [file.name for file in chain.files],
            "bytes": sum(file.manifest.size_bytes for file in chain.files if file.manifest is not None),
        }
        for chain in found.chains
    ]
    return {
        "kept": chains,
        "pinned": list(found.pinned),
        "users": list(found.users),
        "removed": list(found.removed),
        "removed_bytes": found.removed_bytes,
    }


def _say_garbage(found: "Garbage", keep: int, dry_run: bool) -> None:
    from dlrm_scale.units import format_bytes

    for chain in found.chains:
        size_bytes = sum(file.manifest.size_bytes for file in chain.files if file.manifest is not None)
        typer.echo(f"keeps {chain.checkpoint.name}: {len(chain.files)} manifests, {format_bytes(size_bytes)}")
    for name in found.pinned:
        typer.echo(f"keeps {name}: pinned")
    for user in found.users:
        typer.echo(f"keeps what is in use: {user}")
    if len(found.chains) < keep:
        typer.echo(f"keeps all checkpoints: {len(found.chains)} of {keep} chains that share no data file")
    for name in found.removed:
        typer.echo(f"{'would remove' if dry_run else 'removed'} {name}")
    typer.echo(
        f"{'would free' if dry_run else 'freed'} {format_bytes(found.removed_bytes)} in {len(found.removed)} files"
    )


@contextmanager
def _bar(shown: bool) -> "Iterator[Callable[[int, int], None]]":
    """A bar on a terminal; elsewhere nothing."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn("merging"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal), transient=True) as bar:
        task = bar.add_task("merging")
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into a clean end with exit code 130: what isn't committed is removed."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)
