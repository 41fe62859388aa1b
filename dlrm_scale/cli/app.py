"""Puts the commands together and turns errors into one message and an exit code.

Command modules import heavy parts inside their functions, so that `--help` starts in a fraction of a second.
"""

import sys
from importlib import import_module
from importlib.util import find_spec

import typer

from dlrm_scale import __version__
from dlrm_scale.errors import DlrmScaleError

__all__ = ["app", "main"]

app = typer.Typer(
    name="dlrm-scale",
    help="Train, benchmark and resume sharded DLRMs on Criteo-format data.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(shown: bool) -> None:
    if shown:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


_COMMANDS = ("doctor", "synth", "preprocess", "train", "evaluate", "demo")
_GROUPS = ("checkpoint", "dataset")


def _register() -> None:
    for name in _COMMANDS:
        if find_spec(f"dlrm_scale.cli.{name}"):
            app.command(name)(getattr(import_module(f"dlrm_scale.cli.{name}"), name))
    for name in _GROUPS:
        if find_spec(f"dlrm_scale.cli.{name}"):
            app.add_typer(import_module(f"dlrm_scale.cli.{name}").app, name=name)


_register()


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; always ends in `SystemExit` with the exit code.

    0 success, 1 bad data or a failed run, 2 a wrong command or config, 3 no feasible plan, 4 a damaged checkpoint,
    130 interrupted.
    """
    try:
        app(args=arguments)
    except DlrmScaleError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_code)
