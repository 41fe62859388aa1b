"""Words, columns and options that the checkpoint commands have in common."""

import json
import time
from typing import Annotated

import typer

__all__ = ["AsJson", "Run", "Step", "checked_keep", "counted", "local_time", "print_json", "short_name"]

Run = Annotated[str, typer.Argument(help="Folder of a run or of checkpoints, or their URL.", metavar="RUN")]
Step = Annotated[int, typer.Argument(help="Step of a checkpoint, as `ls` lists it.", metavar="STEP")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


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
