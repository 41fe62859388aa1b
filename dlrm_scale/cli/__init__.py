"""The command `dlrm-scale`: words in, exit code out."""

from dlrm_scale.cli.app import main

__all__ = ["main"]
