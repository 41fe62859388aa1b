"""Puts the commands together and turns errors into one message and an exit code.

Command modules import heavy parts inside their functions, so that `--help` starts in a fraction of a second.
"""

import sys

import typer

from dlrm_scale import __version__
from dlrm_scale.cli.bench import bench
from dlrm_scale.cli.calibrate import calibrate
from dlrm_scale.cli.checkpoint import app as checkpoint_commands
from dlrm_scale.cli.dataset import app as dataset_commands
from dlrm_scale.cli.demo import demo
from dlrm_scale.cli.diagnose import diagnose
from dlrm_scale.cli.doctor import doctor
from dlrm_scale.cli.evaluate import evaluate
from dlrm_scale.cli.output_errors import end_of_output_error, is_of_output
from dlrm_scale.cli.plan import app as plan_commands
from dlrm_scale.cli.predict import predict
from dlrm_scale.cli.preprocess import preprocess
from dlrm_scale.cli.stats import stats
from dlrm_scale.cli.synth import synth
from dlrm_scale.cli.train import train
from dlrm_scale.errors import DlrmScaleError
from dlrm_scale.plain_warnings import tell_warnings_plainly
from dlrm_scale.planning.solver.interruptible import end_beside_abandoned_calls

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


app.command("doctor")(doctor)
app.command("synth")(synth)
app.command("preprocess")(preprocess)
app.command("train")(train)
app.command("evaluate")(evaluate)
app.command("predict")(predict)
app.command("diagnose")(diagnose)
app.command("stats")(stats)
app.command("calibrate")(calibrate)
app.command("bench")(bench)
app.command("demo")(demo)
app.add_typer(checkpoint_commands, name="checkpoint")
app.add_typer(dataset_commands, name="dataset")
app.add_typer(plan_commands, name="plan")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; always ends in `SystemExit` with the exit code.

    0 success, 1 bad data or a failed run, 2 a wrong command or config, 3 no feasible plan, 4 a damaged checkpoint,
    130 interrupted.
    """
    tell_warnings_plainly()
    try:
        app(args=arguments)
    except SystemExit as ended:
        if isinstance(ended.code, int):
            end_beside_abandoned_calls(ended.code)
        raise
    except DlrmScaleError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_code)
    except OSError as error:
        if is_of_output(error):
            sys.exit(end_of_output_error(error))
        if error.filename is None:
            raise
        # A path that the system refuses: too long a name, a loop of links, no permission.
        print(f"error: {error.filename}: {error.strerror}\n  remedy: check the path", file=sys.stderr)  # noqa: T201
        sys.exit(1)
