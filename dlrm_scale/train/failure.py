"""The first cause of a failed multi-rank run, and not its neighbours' "connection closed".

Every rank leaves a file in a folder that the launcher reads: `rank-3.started`, then `rank-3.done` or `rank-3.failed`
(JSON). A rank that has started and left neither was killed from outside.
"""

import json
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from dlrm_scale.errors import DlrmScaleError

__all__ = ["Failure", "describe_failure", "first_cause", "mark_done", "mark_started", "record_failure"]

_LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection was likely closed",
    "socket closed",
    "recvvalue failed",
    "failed to recv",
    "connection refused",
    "nccl communicator was aborted",
    "timed out waiting",
    "application timeout",
    "wait timeout",
    "socket timeout",
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How one rank ended.

    Attributes:
        rank: global rank.
        seconds: Unix time.
        message: for the user, one or more lines.
        remedy: what to do, or None.
        exit_code: of the command.
        lost_peer: only a consequence of another rank's end.
        traceback: empty for a user's mistake.
    """

    rank: int
    seconds: float
    message: str
    remedy: str | None
    exit_code: int
    lost_peer: bool
    traceback: str = ""

    def error(self) -> DlrmScaleError:
        """As an exception for the command line."""
        text = f"rank {self.rank}: {self.message}"
        if self.traceback:
            text += "\n" + self.traceback.rstrip()
        error = DlrmScaleError(text, remedy=self.remedy)
        error.exit_code = self.exit_code
        return error


def mark_started(folder: Path, rank: int) -> None:
    """Note that a rank runs."""
    (folder / f"rank-{rank}.started").touch()


def mark_done(folder: Path, rank: int) -> None:
    """Note that a rank ended well."""
    (folder / f"rank-{rank}.done").touch()


def record_failure(folder: Path, rank: int, error: BaseException) -> None:
    """Write down how a rank failed.

    Args:
        folder: shared by the ranks of this host.
        rank: global rank.
        error: what ended it.
    """
    temporary = folder / f"rank-{rank}.failing"
    temporary.write_text(json.dumps(asdict(describe_failure(rank, error))))
    temporary.rename(folder / f"rank-{rank}.failed")


def describe_failure(rank: int, error: BaseException) -> Failure:
    """Put an error into words for the user: their mistakes without a traceback, ours with it."""
    known = isinstance(error, DlrmScaleError)
    lost_peer = not known and any(text in str(error).lower() for text in _LOST_PEER)
    return Failure(
        rank=rank,
        seconds=time.time(),
        message=error.message if isinstance(error, DlrmScaleError) else f"{type(error).__name__}: {error}",
        remedy=error.remedy if isinstance(error, DlrmScaleError) else None,
        exit_code=error.exit_code if isinstance(error, DlrmScaleError) else 1,
        lost_peer=lost_peer,
        traceback="" if known or lost_peer else "".join(traceback.format_exception(error)),
    )


def first_cause(folder: Path) -> Failure | None:
    """Pick the failure to show: the earliest of its own making, else a killed rank, else the earliest."""
    failures = sorted(
        (Failure(**json.loads(p.read_text())) for p in folder.glob("rank-*.failed")), key=lambda f: f.seconds
    )
    for failure in failures:
        if not failure.lost_peer:
            return failure
    ended = {p.stem for p in folder.iterdir() if p.suffix in (".done", ".failed")}
    killed = sorted(p.stem for p in folder.glob("rank-*.started") if p.stem not in ended)
    # the launcher itself kills ranks that outlive a failure, so a killed rank is the cause only if no other is
    if killed:
        return Failure(
            rank=int(killed[0].removeprefix("rank-")),
            seconds=time.time(),
            message="ended without a word: killed from outside (the system's out-of-memory killer, or kill -9)",
            remedy="see the system log for 'out of memory'; then continue with --resume auto",
            exit_code=1,
            lost_peer=False,
        )
    return failures[0] if failures else None
