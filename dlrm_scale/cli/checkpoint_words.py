"""Words, columns and options that the checkpoint commands have in common."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dlrm_scale.train.told_checkpoints import ToldCheckpoint

__all__ = [
    "AsJson",
    "Run",
    "Step",
    "best_of",
    "checked_keep",
    "counted",
    "find_step",
    "local_time",
    "newest_told_of",
    "print_json",
    "run_folder_of",
    "short_name",
]

Run = Annotated[str, typer.Argument(help="Folder of a run or of checkpoints, or their URL.", metavar="RUN")]
Step = Annotated[
    str, typer.Argument(help="Step of a checkpoint, as `ls` lists it, or best, as it marks it.", metavar="STEP")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def find_step(run: str, word: str) -> int | str:
    """Read a step: a number, or the name of the best checkpoint's manifest.

    Raises:
        ConfigError: it is neither.
        MissingCheckpointError: the run has no best checkpoint.
    """
    from dlrm_scale.errors import ConfigError, MissingCheckpointError

    if word.isdecimal():
        return int(word)
    if word != "best":
        raise ConfigError(f"{word} is no step", remedy="give the step of a checkpoint as `ls` lists it, or best")
    best = best_of(run)
    if best is None:
        raise MissingCheckpointError(
            f"{run} has no best checkpoint: best.json is absent or damaged", remedy="give a step that `ls` lists"
        )
    return best


def best_of(run: str) -> str | None:
    """Manifest of the best checkpoint; None where best.json is absent or damaged, which doesn't damage the others."""
    from dlrm_scale.train.best_file import parse_best

    try:
        found = parse_best((run_folder_of(run) / "best.json").read_bytes())["manifest"]
    except (OSError, ValueError, KeyError):
        return None
    return str(found)


def run_folder_of(run: str) -> Path:
    """The folder of a run that is named by itself or by its folder of checkpoints; of a URL one that isn't there."""
    from dlrm_scale.recipes import find_checkpoints

    root = find_checkpoints(run)
    path = run.partition("://")[2] if run.startswith(("file://", "local://")) else run
    return Path(path) if path != root else Path(root).parent


def newest_told_of(run: str) -> "ToldCheckpoint | None":
    """The newest committed checkpoint that a run's own files tell of; None where they tell of none, or aren't there."""
    from dlrm_scale.train.told_checkpoints import newest_told

    folder = run_folder_of(run)
    return newest_told(folder / "log.jsonl", folder / "best.json")


def checked_keep(keep: int | None) -> int | None:
    """Refuse a `--keep` below 2, and say why.

    Raises:
        ConfigError: it is.
    """
    from dlrm_scale.errors import ConfigError

    if keep is not None and keep < 2:
        raise ConfigError(
            f"--keep {keep}: at least 2 chains are kept, as one damaged file may cost every checkpoint of a single one",
            remedy="give 2 or more; `checkpoint pin` keeps single checkpoints besides",
        )
    return keep


def counted(count: int, noun: str) -> str:
    """A number of things: `1 file`, `2,000 files`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def short_name(manifest: str) -> str:
    """A manifest as people name it: without folder and ending."""
    return manifest.removeprefix("manifests/").removesuffix(".json")


def local_time(unix_seconds: float | None) -> str:
    """Date and time here; `?` where it isn't known."""
    return "?" if unix_seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_seconds))


def print_json(value: object) -> None:
    """Print a value for scripts."""
    typer.echo(json.dumps(value, indent=2))
