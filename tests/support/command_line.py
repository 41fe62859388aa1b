"""Commands run in this process, so that torchrec is imported once."""

import json
import signal
from typing import Any

import pytest

from dlrm_scale.cli import main

__all__ = ["run_command", "run_json"]


def run_command(*arguments: object) -> int:
    """Run `dlrm-scale ARGUMENTS` and return its exit code; signal handlers are put back."""
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(SystemExit) as exit_:
            main([str(argument) for argument in arguments])
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    code = exit_.value.code
    return code if isinstance(code, int) else int(code is not None)


def run_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """Run a command that must succeed with `--json` and return what it printed."""
    capsys.readouterr()
    code = run_command(*arguments, "--json")
    captured = capsys.readouterr()
    assert code == 0, captured.err
    values: dict[str, Any] = json.loads(captured.out)
    return values
