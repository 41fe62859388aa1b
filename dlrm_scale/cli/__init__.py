"""The command `dlrm-scale`: words in, exit code out."""

import sys

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; see `dlrm_scale.cli.app.main`."""
    try:
        from dlrm_scale.cli.app import main as run
    except KeyboardInterrupt:
        # In the first tenths of a second there is nothing to say more.
        sys.exit(130)
    run(arguments)
