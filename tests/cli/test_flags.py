"""Every word of the command line, in one table: a change here is a change of the interface."""

import click
from typer.main import get_command

from dlrm_scale.cli.app import app

FLAGS = {
    "": "--version --install-completion --show-completion",
    "doctor": "--json",
    "synth": "OUT --rows --days --seed --preset --scale --multi-hot --gzip --force --json",
    "preprocess": (
        "INPUTS --out --vocabulary --threshold --max-rows-per-table --max-rows --vocabulary-from --validation "
        "--pad-short-rows --max-bad-rows --jobs --memory-limit --delimiter --header --id-column --unlabeled "
        "--decimal-ids --multi-hot --column --force --json"
    ),
    "train": (
        "CONFIG --set --nproc --resume --init-from --tables-only --allow-new-tables --allow-resized-tables "
        "--dry-run --json"
    ),
    "evaluate": "RUN --data --split --step --by --top --nproc --set --json",
    "predict": (
        "RUN INPUTS --out --step --split --vocabulary-from --delimiter --header --id-column --unlabeled --decimal-ids "
        "--multi-hot --pad-short-rows --column --max-bad-rows --jobs --memory-limit --nproc --set --force --json"
    ),
    "diagnose": "CONFIG --set --nproc --steps --rounds --what-if --no-what-if --time-limit --json",
    "stats": (
        "SOURCE --out -o --set --dim --optimizer --batch-size --samples --generate --tables --seed --force --json"
    ),
    "calibrate": "--out -o --ranks --ranks-per-host --quick --allow-noise --processor-time --force --json",
    "bench": (
        "--tables --data --cluster --out -o --ranks --ranks-per-host --batch-size-per-rank --set --plans --plan --dim "
        "--optimizer --allow-split-row-state --rounds --quick --seed --memory --processor-time --force --json"
    ),
    "demo": "--out --rows --days --seed --nproc",
    "checkpoint": "",
    "checkpoint ls": "RUN --json",
    "checkpoint show": "RUN STEP LATER --json",
    "checkpoint verify": "RUN --level --step --json",
    "checkpoint export": "RUN --to --out --step --json",
    "checkpoint merge": "RUN --step --to --watch --keep --memory-limit --dry-run --json",
    "checkpoint gc": "RUN --keep --dry-run --json",
    "checkpoint pin": "RUN STEP --json",
    "checkpoint unpin": "RUN STEP --json",
    "plan": (
        "--tables --cluster --world-size --batch-size-per-rank --ranks-per-host --optimizer --dim --set --memory "
        "--reserve --allow-split-row-state --constrain --force-plan --force-kind --effort --torchrec --no-torchrec "
        "--what-if --no-what-if --simulate --out -o --html --force --json"
    ),
    "plan diff": "BEFORE AFTER --json",
    "dataset": "",
    "dataset export": "DATASET --to --out --split --jobs --force --json",
    "dataset show": "DATASET --json",
    "dataset verify": "DATASET --json",
}


def _commands(command: click.Command, words: str = "") -> dict[str, str]:
    found = {words: " ".join(name for parameter in command.params for name in _names(parameter))}
    for name, sub in getattr(command, "commands", {}).items():
        found |= _commands(sub, f"{words} {name}".strip())
    return found


def _names(parameter: click.Parameter) -> list[str]:
    """An argument by its name in capitals, an option by its spellings."""
    if parameter.param_type_name == "argument":
        return [str(parameter.name).upper()]
    return [*parameter.opts, *parameter.secondary_opts]


def test_the_table_lists_every_flag() -> None:
    assert _commands(get_command(app)) == FLAGS


def test_every_flag_has_a_help_text() -> None:
    silent = []
    for words in FLAGS:
        command = get_command(app)
        for word in words.split():
            command = command.commands[word]
        silent += [f"{words} {p.name}" for p in command.params if not getattr(p, "help", None)]
        assert command.help, f"{words} has no help text"
    assert silent == []
