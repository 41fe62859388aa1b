"""Warnings of checkpoints as lines for users: without the source line that Python adds for programmers."""

import sys
import warnings
from typing import TextIO

from dlrm_scale.errors import CheckpointWarning

__all__ = ["tell_warnings_plainly"]


def tell_warnings_plainly() -> None:
    """From now on in this process, print each `CheckpointWarning` as one `note:` line on stderr; others as before."""
    before = warnings.showwarning
    if getattr(before, "is_plain", False):
        return

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, CheckpointWarning):
            print(f"note: {message}", file=file or sys.stderr)
        else:
            before(message, category, filename, lineno, file, line)

    show.is_plain = True  # type: ignore[attr-defined]
    warnings.showwarning = show
