"""`dlrm-scale checkpoint pin | unpin`: checkpoints that stay, whatever else is removed."""

import typer

from dlrm_scale.cli.checkpoint_words import AsJson, Run, Step, print_json

__all__ = ["pin", "unpin"]


def pin(run: Run, step: Step, as_json: AsJson = False) -> None:
    """Keep the checkpoint of a step, whatever else is removed."""
    from dlrm_scale.checkpoint import open_storage
    from dlrm_scale.checkpoint.chain.pins import pin_step
    from dlrm_scale.recipes import find_checkpoints

    name = pin_step(open_storage(find_checkpoints(run)), step)
    if as_json:
        print_json({"pinned": name, "step": step})
    else:
        typer.echo(f"pinned {name} (step {step})")


def unpin(run: Run, step: Step, as_json: AsJson = False) -> None:
    """Undo `pin`; the checkpoint goes with the next removal, unless something else needs it."""
    from dlrm_scale.checkpoint import open_storage
    from dlrm_scale.checkpoint.chain.pins import unpin_step
    from dlrm_scale.recipes import find_checkpoints

    names = unpin_step(open_storage(find_checkpoints(run)), step)
    if as_json:
        print_json({"unpinned": names, "step": step})
    else:
        typer.echo(f"unpinned {', '.join(names)} (step {step})")
