"""`dlrm-scale checkpoint verify`: whether a run's checkpoints are sound."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from dlrm_scale.cli.checkpoint_words import AsJson, Run, counted, find_step, newest_told_of, print_json, run_folder_of

if TYPE_CHECKING:
    from dlrm_scale.checkpoint.storage.storage import Storage
    from dlrm_scale.checkpoint.verify import Problem, VerifyLevel
    from dlrm_scale.train.told_checkpoints import ToldCheckpoint

__all__ = ["Level", "verify"]

_DAMAGED = 4


class Level(StrEnum):
    """How much `verify` reads."""

    manifest = "manifest"
    size = "size"
    full = "full"
    restore = "restore"


def verify(
    run: Run,
    level: Annotated[
        Level,
        typer.Option(
            help="manifest: manifests and links; size: and that files are there; full: and every byte; restore: and "
            "a checkpoint put together row by row, each row there and finite."
        ),
    ] = Level.full,
    step: Annotated[
        str | None,
        typer.Option(
            help="Which checkpoint --level restore puts together: a step, or best. Default: the newest.",
            metavar="STEP|best",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check all checkpoints; exits with 4 and names the damaged files if there are any.

    Exits with 1 where the storage doesn't answer, so that nothing is known, and with 2 where there is no checkpoint, or
    none of this step.
    """
    from dlrm_scale.checkpoint.files.manifest_files import no_checkpoint
    from dlrm_scale.checkpoint.storage.storage import open_storage
    from dlrm_scale.checkpoint.upkeep.leftovers import verify_notes
    from dlrm_scale.checkpoint.verify import data_bytes
    from dlrm_scale.checkpoint.verify import verify as find_problems
    from dlrm_scale.cli.byte_progress import ByteProgress
    from dlrm_scale.errors import CheckpointError, ConfigError
    from dlrm_scale.recipes import find_checkpoints

    if step is not None and level is not Level.restore:
        raise ConfigError("--step goes with --level restore")
    told = newest_told_of(run)
    which = find_step(run, step) if step is not None else None
    storage = open_storage(find_checkpoints(run))
    total_bytes = data_bytes(storage)
    reads = level in (Level.full, Level.restore)
    began = time.perf_counter()
    with ByteProgress("checking files", total_bytes if reads else 0) as bar:
        files_level = cast("VerifyLevel", "full" if level is Level.restore else level.value)
        problems = find_problems(storage, files_level, progress=bar.advance if reads else _ignore)
    lost = _lost(storage, told)
    problems += [] if lost is None else [lost]
    problems += _best_faults(run)
    if not total_bytes and not problems:
        raise no_checkpoint(storage)
    seconds = time.perf_counter() - began
    notes = [*verify_notes(storage, now=time.time()), *_lost_manifests(storage, run)]
    result: dict[str, Any] = {
        "ok": not problems,
        "level": level.value,
        "bytes": total_bytes if reads else 0,
        "seconds": seconds,
        "problems": [asdict(problem) for problem in problems],
        "notes": notes,
    }
    lines = [f"{p.file} {p.reason}" + (f"; it breaks {', '.join(p.breaks)}" if p.breaks else "") for p in problems]
    if level is Level.restore:
        result["restore"] = restored = _check_restore(storage, which)
        result["ok"] = result["ok"] and not restored["faults"] and restored["error"] is None
        known = {problem.file for problem in problems}
        lines += [f"{file}: {reason}" for file, reason in restored["faults"] if file not in known]
        if restored["error"] is not None:
            lines.append(restored["error"])
    if as_json:
        print_json(result)
        raise typer.Exit(0 if result["ok"] else _DAMAGED)
    if lines:
        raise CheckpointError(
            "\n  ".join(["damaged files:", *lines, *(f"note: {note}" for note in notes)]),
            remedy=f"put them back from a copy; {_consequence(problems, as_told=lines)}",
        )
    from dlrm_scale.units import format_bytes, format_count, format_seconds

    if level is Level.restore:
        typer.echo(
            f"step {restored['step']} put together: {format_count(restored['rows'])} rows of "
            f"{counted(restored['tables'], 'table')} from {counted(restored['manifests'], 'manifest')}, "
            f"{format_bytes(restored['bytes_read'])} in {format_seconds(restored['seconds'])}"
        )
    read = f", {format_bytes(total_bytes)} in {format_seconds(seconds)}" if reads else ""
    for note in notes:
        typer.echo(f"note: {note}")
    typer.echo(f"{run}: ok ({level.value}{read})")


def _consequence(problems: "Sequence[Problem]", as_told: Sequence[str]) -> str:
    if any(problem.breaks for problem in problems) or len(as_told) > len(problems):
        return "training resumes from the newest checkpoint that isn't broken"
    if any(problem.file == "FORMAT" for problem in problems):
        return "no checkpoint is broken, and the next start writes FORMAT anew"
    return "no checkpoint is broken by them, and training resumes from the newest"


def _lost(storage: "Storage", told: "ToldCheckpoint | None") -> "Problem | None":
    """The newest checkpoint that the run's own files tell of, where no manifest is as new."""
    from dlrm_scale.checkpoint.files.manifest_files import read_manifests
    from dlrm_scale.checkpoint.verify import Problem

    files = read_manifests(storage) if told is not None else []
    steps = [file.manifest.step for file in files if file.manifest is not None]
    older = [told is not None and told.is_newer_than(file.name, max(steps, default=None)) for file in files]
    unread = any(file.manifest is None for file in files)
    if told is None or not all(older) or (unread and not told.manifest):
        return None
    return Problem(
        file=told.manifest or f"the manifest of step {told.step}",
        reason=f"is missing: {told.source} tells that step {told.step} was committed, and the newest there is of step "
        f"{max(steps, default='none')}",
        breaks=(told.manifest,) if told.manifest else (),
    )


def _best_faults(run: str) -> "list[Problem]":
    from dlrm_scale.checkpoint.verify import Problem
    from dlrm_scale.train.best_file import parse_best

    try:
        parse_best((run_folder_of(run) / "best.json").read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        return [Problem(file="best.json", reason=f"can't be read: {error}", breaks=())]
    return []


def _lost_manifests(storage: "Storage", run: str) -> list[str]:
    """Lines on committed checkpoints older than the newest whose data is there and whose manifest isn't."""
    from dlrm_scale.checkpoint.files.file_names import manifest_name, parse_data_name
    from dlrm_scale.checkpoint.upkeep.sweep import unnamed_data
    from dlrm_scale.train.told_checkpoints import told_manifests

    told = told_manifests(run_folder_of(run) / "log.jsonl")
    numbers = {found[:2] for name in unnamed_data(storage) if (found := parse_data_name(name)) is not None}
    names = {manifest_name(*found) for found in numbers}
    return [
        f"{name} is gone and its data is there, and log.jsonl tells that step {told[name]} was committed: put the "
        "manifest back from a copy before a start or `checkpoint gc` removes the data, unless a removal was cut short"
        for name in sorted(names & set(told))
    ]


def _check_restore(storage: "Storage", step: int | str | None) -> dict[str, Any]:
    from dlrm_scale.checkpoint.chain.leases import hold_chain
    from dlrm_scale.checkpoint.restoring.restore_check import check_restore
    from dlrm_scale.checkpoint.verify import chain_of_step
    from dlrm_scale.cli.byte_progress import ByteProgress
    from dlrm_scale.errors import CheckpointError, MissingCheckpointError, StorageError

    with ExitStack() as held:
        try:
            chain = held.enter_context(hold_chain(storage, lambda: chain_of_step(storage, step)))
        except (StorageError, MissingCheckpointError):
            raise
        except CheckpointError as error:
            # that no checkpoint is whole is what was asked for
            return {"checkpoint": None, "faults": [], "error": error.message}
        assert chain is not None
        with ByteProgress("restoring", chain.size_bytes) as bar:
            return asdict(check_restore(chain, progress=bar.advance)) | {"error": None}


def _ignore(size_bytes: int) -> None:
    pass
