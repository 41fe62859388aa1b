"""`dlrm-scale checkpoint merge`: rolls deltas up beside a running trainer."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from dlrm_scale.cli.checkpoint_words import Run, checked_keep, counted, find_step, newest_told_of

if TYPE_CHECKING:
    from dlrm_scale.checkpoint import Chain
    from dlrm_scale.checkpoint.storage.storage import Storage
    from dlrm_scale.checkpoint.upkeep.merge import Merged
    from dlrm_scale.train.told_checkpoints import ToldCheckpoint

__all__ = ["To", "merge"]


class To(StrEnum):
    """What `merge` makes of a chain."""

    delta = "delta"
    baseline = "baseline"
    auto = "auto"


def merge(
    run: Run,
    step: Annotated[
        str, typer.Option(help="Merge the chain to the checkpoint of this step, best or latest.", metavar="STEP")
    ] = "latest",
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
            help="After a merge remove what is older than this many chains that share no data file; at least 2.",
            metavar="N",
            callback=checked_keep,
        ),
    ] = None,
    memory_limit: Annotated[
        str, typer.Option(help="Memory for blocks of rows, beside the program's own 320 MiB.", metavar="SIZE")
    ] = "1GiB",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be merged.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; with --watch a line for each merge.")] = False,
) -> None:
    """Merge deltas into one, or baseline and deltas into a new baseline, while the trainer goes on.

    What is merged restores the same rows, state and position in the data; what it was made of stays until it is removed
    by --keep, `gc` or the trainer. Exits with 4 if a file is damaged, with the steps that are lost (--watch says so and
    goes by other files where it can), with 1 where another merge is running or the storage fails, with 2 where there is
    no such step or --memory-limit is too small, and with 130 when stopped by a signal.
    """
    import torch

    from dlrm_scale.checkpoint import DamagedFileError, open_storage
    from dlrm_scale.errors import ConfigError, DlrmScaleError
    from dlrm_scale.recipes import find_checkpoints
    from dlrm_scale.units import parse_bytes

    if step not in ("latest", "best") and not step.isdecimal():
        raise ConfigError(f"--step {step} is no step", remedy="give a number, best or latest")
    limit_bytes = parse_bytes(memory_limit)
    storage = open_storage(find_checkpoints(run))
    damaged: dict[str, str] = {}
    which = None if step == "latest" else find_step(run, step)
    # A trainer beside --watch tells of lost steps itself, and commits more.
    told = newest_told_of(run) if watch is None and which is None else None
    choose = _chooser(storage, which, told, damaged, may_wait=watch is not None)
    if dry_run:
        _say_plan(choose(), to, limit_bytes, as_json)
        return
    # Its pieces of work are small, and two threads wait for each other when the trainer has the cores: 100 deltas of
    # 14 MB took 41 CPU s with two threads on two busy cores, and 5 with one.
    torch.set_num_threads(1)
    if watch is None:
        _merge_or_name_damage(storage, choose, to, limit_bytes, keep, as_json)
        return
    said = ""
    while True:
        try:
            _merge_once(storage, choose, to, limit_bytes, keep, as_json, quiet_if_idle=True)
            said = ""
        except (DlrmScaleError, OSError) as error:
            # The trainer may mend it by its next save, or somebody may make room on the disk. It is said once, and
            # again when it has changed or been mended in between; remedies count seconds.
            what = error.message if isinstance(error, DlrmScaleError) else str(error)
            if what != said:
                typer.echo(f"error: {error}", err=True)
            said = what
            if isinstance(error, DamagedFileError):
                # Not tried again: the next round goes by other files, so that the chain doesn't grow for ever.
                damaged[error.file] = error.message
        time.sleep(watch)


def _merge_or_name_damage(
    storage: "Storage",
    choose: "Callable[[], Chain | None]",
    to: To,
    limit_bytes: int,
    keep: int | None,
    as_json: bool,
) -> None:
    from dlrm_scale.checkpoint.chain.damage import damage_met
    from dlrm_scale.checkpoint.files.format import DamagedFileError

    chosen: list[Chain] = []

    def remember() -> "Chain | None":
        chain = choose()
        chosen.extend([chain] if chain is not None else [])
        return chain

    try:
        _merge_once(storage, remember, to, limit_bytes, keep, as_json, quiet_if_idle=False)
    except DamagedFileError as error:
        if not chosen:
            raise
        raise damage_met(chosen[-1], {error.file: error.message}) from error


def _chooser(
    storage: "Storage",
    step: int | str | None,
    told: "ToldCheckpoint | None",
    damaged: Mapping[str, str],
    *,
    may_wait: bool,
) -> "Callable[[], Chain | None]":
    """How the chain is found; damage that costs steps ends the command, or is said once where it may wait."""
    said: set[str] = set()

    def say(what: str, reasons: tuple[str, ...]) -> None:
        for reason in reasons:
            if reason not in said:
                typer.echo(f"{what}: {reason}", err=True)
                said.add(reason)

    def choose() -> "Chain | None":
        from dlrm_scale.checkpoint import find_chain
        from dlrm_scale.checkpoint.chain.damage import lost_steps
        from dlrm_scale.checkpoint.files.manifest_files import no_checkpoint
        from dlrm_scale.checkpoint.verify import chain_of_step
        from dlrm_scale.train.told_checkpoints import with_lost_steps

        chain = find_chain(storage, damaged=damaged) if step is None else chain_of_step(storage, step)
        if chain is None:
            if not may_wait:
                raise no_checkpoint(storage)
            return None
        chain = with_lost_steps(chain, told)
        if chain.skipped and not may_wait:
            raise lost_steps(chain)
        say("error: a newer checkpoint is damaged", tuple(map(str, chain.skipped)))
        say("note: merged without a damaged file", chain.detours)
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
        typer.echo(f"removed {counted(len(removed), 'old file')}")


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
        f"{manifest.name}: {plan.kind} of step {manifest.step} made of {counted(len(plan.manifests), 'checkpoint')}, "
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
        f"would make a {plan.kind} equal to {plan.equal_to.name} of {counted(len(plan.manifests), 'checkpoint')}, "
        f"{format_bytes(plan.source_bytes)}, with {format_bytes(memory_bytes)} of memory{parts} ({plan.reason})"
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
