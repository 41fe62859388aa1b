"""What commands that take their time tell meanwhile."""

import typer

__all__ = ["announce"]


def announce(line: str) -> None:
    """Tell on stderr what begins."""
    typer.echo(f"{line} …", err=True)
