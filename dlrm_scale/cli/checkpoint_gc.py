"""`dlrm-scale checkpoint gc`: removes old checkpoints and leftovers."""

from typing import TYPE_CHECKING, Annotated

import typer

from dlrm_scale.cli.checkpoint_words import AsJson, Run, checked_keep, counted, print_json

if TYPE_CHECKING:
    from dlrm_scale.checkpoint.chain.chain_search import Path
    from dlrm_scale.checkpoint.upkeep.collect_garbage import Garbage

__all__ = ["gc"]


def gc(
    run: Run,
    keep: Annotated[
        int,
        typer.Option(
            help="Chains to keep that share no data file, at least 2; nothing old is removed while there are fewer.",
            callback=checked_keep,
        ),
    ] = 2,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove old checkpoints and leftovers of crashes, while trainers, merges and restores go on.

    The newest chains stay, pinned checkpoints, what a restore or merge in progress reads, and whatever can't be read.
    It works on a disk that is completely full. Exits with 1 where somebody else is removing or the storage fails, with
    2 where there is no checkpoint, and with 4 where none can be restored.
    """
    from dlrm_scale.checkpoint import open_storage
    from dlrm_scale.checkpoint.upkeep.collect_garbage import collect_garbage
    from dlrm_scale.recipes import find_checkpoints

    found = collect_garbage(open_storage(find_checkpoints(run)), keep_baselines=keep, dry_run=dry_run)
    for damage in found.damaged:
        typer.echo(f"damaged, and kept for now: {damage}", err=True)
    if as_json:
        print_json({"dry_run": dry_run, **_summary(found)})
        return
    _say(found, keep, dry_run)


def _chain_bytes(chain: "Path") -> int:
    return sum(file.manifest.size_bytes for file in chain.files if file.manifest is not None)


def _chain_step(chain: "Path") -> int | None:
    manifest = chain.files[-1].manifest
    return manifest.step if manifest is not None else None


def _summary(found: "Garbage") -> dict[str, object]:
    chains = [
        {
            "checkpoint": chain.checkpoint.name,
            "step": _chain_step(chain),
            "manifests": [file.name for file in chain.files],
            "bytes": _chain_bytes(chain),
        }
        for chain in found.chains
    ]
    return {
        "kept": chains,
        "pinned": list(found.pinned),
        "dead_branches": [
            {
                "start": branch.left.start,
                "from_step": branch.left.from_step,
                "removed": list(branch.removed),
                "kept": list(branch.kept),
            }
            for branch in found.dead_branches
        ],
        "users": list(found.users),
        "damaged": list(found.damaged),
        "removed": list(found.removed),
        "removed_bytes": found.removed_bytes,
    }


def _say(found: "Garbage", keep: int, dry_run: bool) -> None:
    from dlrm_scale.units import format_bytes

    for chain in found.chains:
        # by its baseline: two chains may lead to one checkpoint, and share no file
        typer.echo(
            f"keeps step {_chain_step(chain)} from {chain.files[0].name} on: "
            f"{counted(len(chain.files), 'manifest')}, {format_bytes(_chain_bytes(chain))}"
        )
    for name in found.pinned:
        typer.echo(f"keeps {name}: pinned")
    for branch in found.dead_branches:
        typer.echo(
            f"dead branch of steps {branch.first_step} to {branch.last_step} "
            f"({str(branch.left).removeprefix('dead branch: ')}): {'would remove' if dry_run else 'removed'} "
            f"{len(branch.removed)}, keeps {len(branch.kept)}"
        )
    for user in found.users:
        typer.echo(f"keeps what is in use: {user}")
    if len(found.chains) < keep:
        typer.echo(f"keeps all checkpoints: {len(found.chains)} of {keep} chains that share no data file")
    for name in found.removed:
        typer.echo(f"{'would remove' if dry_run else 'removed'} {name}")
    typer.echo(
        f"{'would free' if dry_run else 'freed'} {format_bytes(found.removed_bytes)} in "
        f"{counted(len(found.removed), 'file')}"
    )
