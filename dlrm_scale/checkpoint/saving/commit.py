"""How N ranks agree that a checkpoint is whole, without a collective.

    every rank   writes and syncs its file, then sets its vote in the store
    rank 0       waits for all votes, checks that they fit together, links the manifest: the commit
    rank 0       sets the outcome; every rank reads it before it releases its touched rows

Votes and outcomes are keys of a `torch.distributed` store, one set for each save, so they can't collide with the
collectives of training. An exception on any rank is a no; so is a missing vote of a rank whose progress counter in
the store stands still for a timeout. A rank that didn't see the outcome keeps its rows marked and learns it before its
next save.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict

from dlrm_scale.checkpoint.chain.starts import FencedError, check_fence
from dlrm_scale.checkpoint.files.finite_values import NotFiniteError
from dlrm_scale.checkpoint.files.manifest import FileRecord, Manifest, TableRecord, temporary_name
from dlrm_scale.checkpoint.files.manifest_check import check_manifest
from dlrm_scale.checkpoint.files.manifest_text import serialize_manifest
from dlrm_scale.checkpoint.storage.storage import Storage
from dlrm_scale.checkpoint.storage.store_calls import UncertainWriteError
from dlrm_scale.errors import CheckpointError

__all__ = [
    "Ballot",
    "ChainState",
    "FencedCommitError",
    "Outcome",
    "SaveKey",
    "StoreLike",
    "UncertainCommitError",
    "Vote",
    "commit_manifest",
]

_LONGEST_POLL_SECONDS = 0.1
_LONGEST_SILENCE_SECONDS = 1.0
"""A rank that moves on says so about this often, or ten times a timeout."""


class StoreLike(Protocol):
    """The part of `torch.distributed.Store` that votes use."""

    def set(self, key: str, value: str, /) -> object: ...  # noqa: D102
    def get(self, key: str, /) -> bytes: ...  # noqa: D102
    def check(self, keys: list[str], /) -> bool: ...  # noqa: D102
    def add(self, key: str, amount: int, /) -> int: ...  # noqa: D102
    def delete_key(self, key: str, /) -> bool: ...  # noqa: D102


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class SaveKey(_Message):
    """What all ranks must agree on in one save."""

    seq: int
    attempt: int
    step: int
    kind: str
    layout_fingerprint: str


class Vote(_Message):
    """One rank's word on one save."""

    save: SaveKey
    rank: int
    error: str | None = None
    """Why the rank votes no."""
    not_finite: bool = False
    """It does so because a value is NaN or infinite."""
    files: tuple[FileRecord, ...] = ()
    tables: tuple[TableRecord, ...] = ()
    """Schemas of the tables that the rank holds a part of."""
    unstaged_bytes: int = 0
    """What the rank wrote while training waited, for want of staging memory."""


class ChainState(_Message):
    """Where the chain stands after the last commit: what the next save depends on (see `policy`)."""

    tip_name: str | None = None
    tip_sha256: str | None = None
    baseline_name: str | None = None
    baseline_sha256: str | None = None
    baseline_bytes: int = 0
    delta_bytes: int = 0
    """Of the deltas that a restore of the tip reads."""
    history_deltas: int = 0
    """Deltas committed since the baseline, each with all rows since it; deltas on one another count as one."""
    history_bytes: int = 0
    """Of these deltas, superseded ones included."""
    needs_baseline: bool = True


class Outcome(_Message):
    """Rank 0's word on one save."""

    committed: bool
    size_bytes: int = 0
    rows: int = 0
    unstaged_bytes: tuple[int, ...] = ()
    """Of each rank's vote."""
    error: str | None = None
    fenced: bool = False
    """Another trainer has started in the same folder; this one may never commit again."""
    uncertain: bool = False
    """The manifest may be on the disk although the save failed: no rank removes its files."""
    not_finite: bool = False
    """A value is NaN or infinite: no later save will do better."""
    chain: ChainState
    """Also after a failure, so that a rank that missed an outcome catches up."""


class Ballot:
    """The store's keys of one engine.

    Args:
        store: shared by the ranks.
        rank: this rank.
        ranks: how many there are.
        timeout_seconds: of each wait, counted from the last progress of the rank waited for.
        now: a clock in seconds; a parameter so that tests need not wait.
        pause: waits for some seconds.
    """

    def __init__(
        self,
        store: StoreLike,
        *,
        rank: int,
        ranks: int,
        timeout_seconds: float,
        now: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._timeout_seconds = timeout_seconds
        self._now = now
        self._pause = pause
        self._moved_at = now()
        self._told_at = -math.inf
        # Every rank makes its engines in the same order, so the count tells engines of one store apart.
        generation = store.add(f"dlrm_scale/checkpoint/engines/{rank}", 1)
        self._prefix = f"dlrm_scale/checkpoint/{generation}"

    @property
    def timeout_seconds(self) -> float:
        """Of each wait."""
        return self._timeout_seconds

    @property
    def idle_seconds(self) -> float:
        """How long this rank has neither made progress nor looked for the others' votes or the outcome."""
        return self._now() - self._moved_at

    def progress(self) -> None:
        """Note that this rank's save moves on, and let the others know; cheap, called for each block."""
        self._moved_at = self._now()
        if self._moved_at - self._told_at >= min(_LONGEST_SILENCE_SECONDS, self._timeout_seconds / 10):
            self._told_at = self._moved_at
            # A store that fails is noticed by the vote; bytes that could be written aren't at fault.
            with suppress(RuntimeError):
                self._store.add(self._progress_key(self._rank), 1)

    def patience(self, rank: int, timeout_seconds: float) -> "_Patience":
        """A wait for a rank that ends once its progress stands still for the timeout."""
        key = self._progress_key(rank)
        return _Patience(lambda: self._store.add(key, 0), self._now, timeout_seconds)

    def meet(self, attempt: int) -> None:
        """Wait until every rank is here in this save, or stands still for a timeout: then the vote will say so."""
        self._store.set(self._here_key(attempt, self._rank), "")
        for rank in range(self._ranks):
            self._await(self._here_key(attempt, rank), self.patience(rank, self._timeout_seconds))
        self._store.delete_key(self._here_key(attempt - 2, self._rank))

    def announce_start(self, message: dict[str, Any]) -> None:
        """Rank 0: tell the others the start's number and state, or an error."""
        self._store.set(f"{self._prefix}/start", json.dumps(message))

    def await_start(self) -> dict[str, Any]:
        """Wait for rank 0's announcement.

        Raises:
            CheckpointError: none came in time.
        """
        text = self._await(f"{self._prefix}/start", self.patience(0, self._timeout_seconds))
        if text is None:
            raise CheckpointError(f"rank {self._rank}: rank 0 didn't open the checkpoints in time")
        message: dict[str, Any] = json.loads(text)
        return message

    def cast(self, vote: Vote) -> None:
        """Set this rank's vote."""
        self._store.set(self._vote_key(vote.save.attempt, vote.rank), vote.model_dump_json())

    def collect(self, save: SaveKey) -> list[Vote]:
        """Rank 0: wait for everybody's vote.

        Raises:
            CheckpointError: a no, a vote on another save, or a missing vote; the message names the rank.
        """
        waits = {rank: self.patience(rank, self._timeout_seconds) for rank in range(self._ranks)}
        votes: dict[int, Vote] = {}
        pauses = _pauses()
        while True:
            for rank in [rank for rank in waits if self._store.check([self._vote_key(save.attempt, rank)])]:
                votes[rank] = self._read_vote(save, rank)
                del waits[rank]
                self.progress()
            if not waits:
                return [votes[rank] for rank in range(self._ranks)]
            for rank, patience in waits.items():
                if patience.is_over():
                    raise CheckpointError(f"no vote from rank {rank}, and no progress for {self._timeout_seconds:g} s")
                if patience.has_moved:
                    self.progress()
            self._moved_at = self._now()
            self._pause(next(pauses))

    def announce(self, attempt: int, outcome: Outcome) -> None:
        """Rank 0: set the outcome of a save, and drop the keys of the save before the last."""
        self._store.set(self._outcome_key(attempt), outcome.model_dump_json())
        if attempt > 2:
            self._store.delete_key(self._outcome_key(attempt - 2))
            for rank in range(self._ranks):
                self._store.delete_key(self._vote_key(attempt - 2, rank))

    def await_outcome(self, attempt: int, *, wait: bool = True) -> Outcome | None:
        """Wait for the outcome; None if it didn't come in time, or isn't there with `wait=False`.

        The wait is two timeouts after rank 0's last progress: it waits one for the votes and needs time to commit.
        """
        text = self._await(self._outcome_key(attempt), self.patience(0, 2 * self._timeout_seconds if wait else 0.0))
        return None if text is None else Outcome.model_validate_json(text)

    def _await(self, key: str, patience: "_Patience") -> bytes | None:
        # A blocking `get` would hold the store's only connection, which the main thread needs too.
        pauses = _pauses()
        while not self._store.check([key]):
            if patience.is_over():
                return None
            self._moved_at = self._now()
            self._pause(next(pauses))
        return self._store.get(key)

    def _read_vote(self, save: SaveKey, rank: int) -> Vote:
        vote = Vote.model_validate_json(self._store.get(self._vote_key(save.attempt, rank)))
        if vote.error is not None:
            kind = NotFiniteError if vote.not_finite else CheckpointError
            raise kind(f"rank {rank}: {vote.error}")
        if vote.save != save:
            raise CheckpointError(f"ranks disagree: rank 0 saves {save!r}, rank {rank} saves {vote.save!r}")
        return vote

    def _progress_key(self, rank: int) -> str:
        # Not of one save: a rank that is still busy with the last one moves on too.
        return f"{self._prefix}/progress/{rank}"

    def _vote_key(self, attempt: int, rank: int) -> str:
        return f"{self._prefix}/vote/{attempt}/{rank}"

    def _here_key(self, attempt: int, rank: int) -> str:
        return f"{self._prefix}/here/{attempt}/{rank}"

    def _outcome_key(self, attempt: int) -> str:
        return f"{self._prefix}/outcome/{attempt}"


class _Patience:
    def __init__(self, progress: Callable[[], int], now: Callable[[], float], timeout_seconds: float) -> None:
        self._progress = progress
        self._now = now
        self._timeout_seconds = timeout_seconds
        self._seen = progress()
        self._since = now()
        self.has_moved = False
        """Whether the last look found progress."""

    def is_over(self) -> bool:
        """Look at the progress; say whether it has stood still for the timeout."""
        progress = self._progress()
        self.has_moved = progress != self._seen
        if self.has_moved:
            self._seen, self._since = progress, self._now()
        return self._now() - self._since >= self._timeout_seconds


def _pauses() -> Iterator[float]:
    """Seconds between looks at the store: short at first, for saves that take milliseconds."""
    seconds = 0.001
    while True:
        yield seconds
        seconds = min(2 * seconds, _LONGEST_POLL_SECONDS)


def commit_manifest(storage: Storage, manifest: Manifest) -> str:
    """Check a manifest and link it to its final name, durably: the commit.

    Returns:
        Its sha256.

    Raises:
        CheckpointError: it is inconsistent, a file isn't where rank 0 sees it, or its writer is fenced (after the link:
            `FencedCommitError`).
        OSError: it can't be written; there is no manifest.
        UncertainCommitError: the link can't be made durable, or a store doesn't say whether it has made it.
    """
    check_manifest(manifest)
    for file in manifest.files:
        found = storage.size_bytes(file.name) if storage.exists(file.name) else None
        if found != file.size_bytes:
            raise CheckpointError(
                f"rank 0 sees {found} of {file.size_bytes} bytes of rank {file.rank}'s {file.name}",
                remedy="put run.path on storage that all hosts share",
            )
    data, digest = serialize_manifest(manifest)
    temporary = temporary_name(manifest)
    storage.write_durably(temporary, data)
    try:
        check_fence(storage, manifest.start)
        try:
            storage.link(temporary, manifest.name)
        except FileNotFoundError:
            check_fence(storage, manifest.start)  # whoever took over has swept the temporary name
            raise
        except UncertainWriteError as error:
            raise UncertainCommitError(f"{manifest.name} may or may not be there: {error}") from error
        try:
            storage.sync_folder("manifests")
        except Exception as error:
            # It stays: whoever has seen it may have removed what it takes the place of.
            raise UncertainCommitError(f"can't make {manifest.name} durable: {error}") from error
        try:
            # Who claimed the root since the first look may have swept the data before the link was there.
            check_fence(storage, manifest.start)
        except FencedError as error:
            raise FencedCommitError(error.message, remedy=error.remedy) from error
        except Exception as error:
            raise UncertainCommitError(f"{manifest.name} is there, and starts/ can't be read: {error}") from error
    finally:
        # The link has decided. What is left of the temporary name is swept by the next start.
        with suppress(OSError):
            storage.remove(temporary)
    return digest


class UncertainCommitError(CheckpointError):
    """The save failed, and yet its manifest may be there after a loss of power, so its data has to stay."""


class FencedCommitError(FencedError, UncertainCommitError):
    """A newer trainer owns the folder, and may have been in time to go on from this manifest, which stays."""
