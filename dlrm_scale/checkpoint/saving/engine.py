"""The checkpoint engine of a trainer: baselines and deltas of touched rows, written beside the training."""

import json
import math
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from dlrm_scale.checkpoint.chain.chain import Chain
from dlrm_scale.checkpoint.chain.lossy import delta_codecs
from dlrm_scale.checkpoint.chain.starts import RunIdentity
from dlrm_scale.checkpoint.files.file_names import manifest_name
from dlrm_scale.checkpoint.files.live_tables import check_regions, table_records
from dlrm_scale.checkpoint.saving.commit import Ballot, SaveKey, StoreLike, Vote
from dlrm_scale.checkpoint.saving.open_start import open_start
from dlrm_scale.checkpoint.saving.persist import PersistResult, PersistThread, SaveRequest, SaveWriter
from dlrm_scale.checkpoint.saving.policy import holds_all_since_baseline, next_kind
from dlrm_scale.checkpoint.saving.resumed_rows import mark_rows_of_deltas
from dlrm_scale.checkpoint.saving.snapshot import ShardSnapshot, choose_rows, staging_bytes
from dlrm_scale.checkpoint.saving.staging import HostCopies, HostStaging
from dlrm_scale.checkpoint.storage.storage import Location, open_storage
from dlrm_scale.config import CheckpointConfig
from dlrm_scale.errors import CheckpointWarning, SaveError
from dlrm_scale.layout import LocalShard, ShardLayout
from dlrm_scale.touched_rows import TouchedRows

__all__ = ["CheckpointEngine", "SaveOutcome"]


@dataclass(frozen=True, kw_only=True)
class SaveOutcome:
    """How one save ended.

    Attributes:
        step: the step saved.
        seq: its sequence number.
        manifest: its name, if it is committed.
        kind: `baseline` or `delta`.
        committed: whether it can be resumed from.
        bytes: of all ranks' files.
        rows: table rows in it; a row cut into columns counts once.
        stall_seconds: how long `save` held up this rank's training, waiting for the save before included.
        persist_seconds: in the background, to the outcome.
        unstaged_bytes: by rank, what it had no staging memory for and wrote within the stall; 0 where the rows were
            copied and written in the background. Empty if rank 0 didn't say.
        error: why it isn't committed.
        warning: what went wrong after the commit.
        not_finite: it isn't committed because a value is NaN or infinite; no later save will do better.
    """

    step: int
    seq: int
    manifest: str
    kind: str
    committed: bool
    bytes: int
    rows: int
    stall_seconds: float
    persist_seconds: float
    unstaged_bytes: tuple[int, ...] = ()
    error: str | None = None
    warning: str | None = None
    not_finite: bool = False


@dataclass(kw_only=True)
class _Flight:
    thread: PersistThread
    key: SaveKey
    stall_seconds: float


class CheckpointEngine:
    """Saves the tables of all ranks; every method is called from the training thread, on every rank alike.

    Args:
        location: folder that all ranks share, made if missing, or URL. One run, one root.
        layout: all tables.
        shards: this rank's live shards, in the order of `touched`.
        touched: which rows changed since the last commit. Maps of replicated tables must be equal on all ranks
            when `save` is called.
        rank: this rank.
        ranks: how many there are.
        store: a `torch.distributed` store that the ranks share; None for one rank.
        config: intervals, ratios, timeouts. `every_steps` is the caller's business.
        optimizer: name of the tables' optimizer, as in `rowwise_adagrad`.
        resumed_from: the chain that the shards were restored from; deltas go on from it where its tables still fit.
        run: on rank 0, the run that the folder belongs to from now on; None keeps no other run out.
        lossy_restores: of the run so far, those of the run before where its weights were taken from included; see
            `lossy`.
        pinned: manifests of checkpoints that are kept when old ones are removed; see `pin`.
        staging: host memory for a copy of the rows; a larger save is written within the stall.
        staging_is_short: on some rank it doesn't hold all rows. Then every rank waits for all at the end of a save, as
            long as they move on: who goes on into a collective would wait there for a rank that writes, and give up.

    Raises:
        StorageError: the folder can't be used, on every rank.
        SaveError: it holds checkpoints that were committed after `resumed_from` was chosen, on every rank.
        CheckpointError: it has a newer format, on every rank; or a delta of `resumed_from` is damaged.
        ConfigError: the folder belongs to another run; on every rank.
        ValueError: the shards aren't those of the layout.
    """

    def __init__(
        self,
        location: Location,
        *,
        layout: ShardLayout,
        shards: Sequence[LocalShard],
        touched: TouchedRows,
        rank: int,
        ranks: int,
        store: StoreLike | None,
        config: CheckpointConfig,
        optimizer: str,
        resumed_from: Chain | None = None,
        run: RunIdentity | None = None,
        lossy_restores: int = 0,
        pinned: Collection[str] = (),
        staging: HostStaging,
        staging_is_short: bool = False,
    ) -> None:
        if store is None:
            if ranks != 1:
                raise ValueError(f"{ranks} ranks need a store")
            store = torch.distributed.HashStore()
        if layout.ranks != ranks:
            raise ValueError(f"the layout is of {layout.ranks} ranks, not {ranks}")
        check_regions(layout, shards, rank)
        if any(touched.current(index).numel() != shard.region.rows for index, shard in enumerate(shards)):
            raise ValueError(f"the touched rows of rank {rank} aren't in the order of its shards")
        tables = table_records(layout, shards)
        storage = open_storage(location)
        ballot = Ballot(store, rank=rank, ranks=ranks, timeout_seconds=config.vote_timeout_seconds)
        start = open_start(
            storage,
            ballot,
            rank=rank,
            layout=layout,
            tables=tables,
            optimizer=optimizer,
            resumed_from=resumed_from,
            run=run,
        )
        self._layout = layout
        self._layout_fingerprint = layout.fingerprint()
        self._shards = list(shards)
        self._touched = touched
        self._rank = rank
        self._config = config
        self._ballot = ballot
        self._writer = SaveWriter(
            storage=storage,
            ballot=ballot,
            layout=layout,
            tables=tables,
            rank=rank,
            start=start.number,
            optimizer=optimizer,
            policy=config.policy,
            delta_codecs=delta_codecs(config, lossy_restores),
            lossy_restores=lossy_restores,
            keep_baselines=config.keep_baselines,
            pinned=frozenset(pinned),
        )
        self._staging = staging
        self._staging_is_short = staging_is_short
        self._dense_copies, self._rank_state_copies = HostCopies(), HostCopies()
        if holds_all_since_baseline(config.policy):
            touched.keep_since_baseline()
            if resumed_from is not None and not start.chain.needs_baseline:
                mark_rows_of_deltas(resumed_from, self._shards, touched.since_baseline())
        self._start = start.number
        self._chain = start.chain
        self._next_seq = start.next_seq
        self._attempt = 0
        self._missed_attempt: int | None = None
        self._flight: _Flight | None = None
        self._outcomes: list[SaveOutcome] = []
        self._stop_reason: str | None = None

    @property
    def next_kind(self) -> str:
        """What the next save will be, `baseline` or `delta`, if the one in flight succeeds."""
        merged = self._config.merger and self._config.policy == "consecutive"
        return next_kind(self._config.policy, self._chain, math.inf if merged else self._config.baseline_ratio)

    @property
    def is_saving(self) -> bool:
        """Whether a save is in flight; one that has ended counts until it is taken in."""
        return self._flight is not None

    def save(
        self,
        *,
        step: int,
        cursor: Mapping[str, object],
        dense: Mapping[str, torch.Tensor],
        rank_state: Mapping[str, torch.Tensor],
        extra: Mapping[str, object],
        rows_consumed: int | None = None,
    ) -> str:
        """Freeze the state of this step and write it in the background.

        Waits for the save before. Returns when training may go on.

        Args:
            step: steps done; equal on all ranks.
            cursor: position in the data, JSON.
            dense: dense tensors, equal on all ranks; rank 0 writes them.
            rank_state: this rank's own tensors, as of its random generators.
            extra: more JSON: schedules, metrics, iteration counters.
            rows_consumed: rows of training data used so far.

        Returns:
            Name of the manifest that will be committed; `pin` takes it.

        Raises:
            SaveError: the save before failed and `on_failure` is `stop`, it hangs (as in `wait`), or another
                trainer has taken over.
            ValueError: `cursor` or `extra` can't be written as JSON (NaN and infinity can't).
        """
        began = time.perf_counter()
        json.dumps([dict(cursor), dict(extra)], allow_nan=False)
        self._finish()
        self._raise_if_stopped()
        self._catch_up()
        self._attempt += 1
        key = SaveKey(
            seq=self._next_seq,
            attempt=self._attempt,
            step=step,
            kind=self.next_kind,
            layout_fingerprint=self._layout_fingerprint,
        )
        self._next_seq += 1
        vote: Vote | None = None
        unstaged_bytes = 0
        snapshots: list[ShardSnapshot] = []
        host_dense: dict[str, torch.Tensor] = {}
        host_rank_state: dict[str, torch.Tensor] = {}
        try:
            rows = self._touched.freeze()
            if holds_all_since_baseline(self._config.policy):
                rows = self._touched.since_baseline()
            snapshots = choose_rows(self._layout, self._shards, None if key.kind == "baseline" else rows, self._rank)
            del rows
            needed_bytes = staging_bytes(snapshots)
            if needed_bytes <= self._staging.size_bytes:
                self._staging.begin()
                snapshots = [snapshot.copy_to(self._staging) for snapshot in snapshots]
                self._staging.settle()
            else:
                unstaged_bytes = needed_bytes
            host_rank_state = self._rank_state_copies.of(rank_state)
            host_dense = self._dense_copies.of(dense) if self._rank == 0 else {}
        except Exception as error:
            vote = Vote(save=key, rank=self._rank, error=f"{type(error).__name__}: {error}")
        request = SaveRequest(
            key=key,
            snapshots=snapshots,
            unstaged_bytes=unstaged_bytes,
            dense=host_dense,
            rank_state=host_rank_state,
            rows_consumed=rows_consumed,
            cursor=json.loads(json.dumps(dict(cursor))),
            extra=json.loads(json.dumps(dict(extra))),
        )
        if vote is None and unstaged_bytes:
            vote = self._writer.write(request)
        self._ballot.progress()
        if self._staging_is_short:
            self._ballot.meet(key.attempt)
        thread = PersistThread(self._writer, request, self._chain, vote)
        thread.start()
        self._flight = _Flight(thread=thread, key=key, stall_seconds=time.perf_counter() - began)
        return manifest_name(key.seq, self._start)

    def pin(self, names: Collection[str]) -> None:
        """Keep these checkpoints, and what they are based on, when old ones are removed; instead of those before.

        The checkpoint of the last `save` is pinned in time when this is called before the next one.

        Args:
            names: of manifests.
        """
        self._writer.pinned = frozenset(names)

    def poll(self) -> list[SaveOutcome]:
        """Take the outcomes of saves that have ended since the last call; never waits, never raises.

        Touched rows are released or merged back here, in `wait` and in `save`.
        """
        if self._flight is not None and not self._flight.thread.is_alive():
            self._finish()
        return self._take()

    def wait(self) -> list[SaveOutcome]:
        """Wait for the save in flight, as long as it moves on, and take the outcomes.

        Raises:
            SaveError: it failed and `on_failure` is `stop`, another trainer has taken over, or it hangs: for two
                vote timeouts no block was written and no vote looked for. The engine saves nothing any more.
        """
        self._finish()
        self._raise_if_stopped()
        return self._take()

    def close(self) -> None:
        """Wait for the save in flight; its outcome is there for `poll`.

        One that hangs, as in `wait`, is left to its daemon thread, with a `CheckpointWarning`.
        """
        if self._finish():
            warnings.warn(str(self._stop_reason), CheckpointWarning, stacklevel=2)

    def _take(self) -> list[SaveOutcome]:
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _finish(self) -> bool:
        """Wait for the flight and take in its result; says whether it hangs."""
        flight, self._flight = self._flight, None
        if flight is None:
            return False
        hang_seconds = 2 * self._ballot.timeout_seconds
        hangs = not _join(flight.thread, self._ballot, hang_seconds)
        result = flight.thread.result
        if hangs or result is None:
            error = f"the storage hangs: nothing has moved for {hang_seconds:g} s" if hangs else "its thread died"
            result = PersistResult(outcome=None, error=error, warning=None, persist_seconds=0.0)
        committed = result.outcome is not None and result.outcome.committed
        if committed:
            self._touched.release(baseline=flight.key.kind == "baseline")
        else:
            self._touched.merge_back()
        if result.outcome is None:
            self._missed_attempt = flight.key.attempt
        else:
            self._chain = result.outcome.chain
        outcome = SaveOutcome(
            step=flight.key.step,
            seq=flight.key.seq,
            manifest=manifest_name(flight.key.seq, self._start),
            kind=flight.key.kind,
            committed=committed,
            bytes=result.outcome.size_bytes if result.outcome else 0,
            rows=result.outcome.rows if result.outcome else 0,
            stall_seconds=flight.stall_seconds,
            persist_seconds=result.persist_seconds,
            unstaged_bytes=result.outcome.unstaged_bytes if result.outcome else (),
            error=None if committed else result.error,
            warning=result.warning,
            not_finite=result.outcome is not None and result.outcome.not_finite,
        )
        self._outcomes.append(outcome)
        fenced = result.outcome is not None and result.outcome.fenced
        if not committed and (hangs or fenced or self._config.on_failure == "stop"):
            self._stop_reason = f"the checkpoint of step {outcome.step} isn't saved: {outcome.error}"
        return hangs

    def _catch_up(self) -> None:
        # Rank 0 may have committed after this rank stopped waiting. The rows are merged back already, which is
        # safe; what is needed is the chain that the next save must agree on.
        if self._missed_attempt is not None:
            outcome = self._ballot.await_outcome(self._missed_attempt, wait=False)
            if outcome is not None:
                self._chain = outcome.chain
            self._missed_attempt = None

    def _raise_if_stopped(self) -> None:
        if self._stop_reason is not None:
            raise SaveError(
                self._stop_reason,
                remedy="repair what the message names and resume from the last checkpoint",
            )


def _join(thread: PersistThread, ballot: Ballot, hang_seconds: float) -> bool:
    """Wait for a thread until it ends, or nothing moves for `hang_seconds`; says whether it has ended."""
    while thread.is_alive():
        left = hang_seconds - ballot.idle_seconds
        if left <= 0:
            return False
        thread.join(left)
    return True
