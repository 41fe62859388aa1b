"""`dlrm-scale checkpoint pin | unpin`: checkpoints that stay, whatever else is removed."""

import typer

from dlrm_scale.cli.checkpoint_words import AsJson, Run, Step, find_step, print_json

__all__ = ["pin", "unpin"]


def pin(run: Run, step: Step, as_json: AsJson = False) -> None:
    """Keep the checkpoint of a step, whatever else is removed.

    Exits with 2 where no checkpoint has this step, and with 4 where it is damaged.
    """
    from dlrm_scale.checkpoint import open_storage
    from dlrm_scale.checkpoint.chain.pins import pin_step
    from dlrm_scale.recipes import find_checkpoints

    which = find_step(run, step)
    name = pin_step(open_storage(find_checkpoints(run)), which)
    if as_json:
        print_json({"pinned": name, "step": which if isinstance(which, int) else step})
    else:
        typer.echo(f"pinned {name} ({_shown(which)})")


def unpin(run: Run, step: Step, as_json: AsJson = False) -> None:
    """Undo `pin`; the checkpoint goes with the next removal, unless something else needs it.

    Exits with 2 where the step isn't pinned.
    """
    from dlrm_scale.checkpoint import open_storage
    from dlrm_scale.checkpoint.chain.pins import unpin_step
    from dlrm_scale.recipes import find_checkpoints

    which = find_step(run, step)
    names = unpin_step(open_storage(find_checkpoints(run)), which)
    if as_json:
        print_json({"unpinned": names, "step": which if isinstance(which, int) else step})
    else:
        typer.echo(f"unpinned {', '.join(names)} ({_shown(which)})")


def _shown(step: int | str) -> str:
    return f"step {step}" if isinstance(step, int) else "best"
