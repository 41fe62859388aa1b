"""Writes one save in a background thread: files, vote, commit. No collectives, so nothing can interleave with training.

A save whose snapshot was not staged has its files written before the thread starts; the thread then only votes.
"""

import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from dlrm_scale import __version__
from dlrm_scale.checkpoint.chain.pins import replace_pins
from dlrm_scale.checkpoint.chain.starts import FencedError
from dlrm_scale.checkpoint.files.file_names import parse_manifest_name
from dlrm_scale.checkpoint.files.finite_values import NotFiniteError, finite_blocks
from dlrm_scale.checkpoint.files.format import TensorSource, WrittenFile, write_file
from dlrm_scale.checkpoint.files.manifest import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    FORMAT_NAME,
    FileRecord,
    Manifest,
    TableRecord,
)
from dlrm_scale.checkpoint.saving.commit import (
    Ballot,
    ChainState,
    Outcome,
    SaveKey,
    UncertainCommitError,
    Vote,
    commit_manifest,
)
from dlrm_scale.checkpoint.saving.policy import Policy, chain_after, holds_all_since_baseline, parent_of
from dlrm_scale.checkpoint.saving.snapshot import ShardSnapshot
from dlrm_scale.checkpoint.storage.storage import Storage
from dlrm_scale.checkpoint.upkeep.retention import remove_old_chains, remove_superseded
from dlrm_scale.errors import CheckpointError
from dlrm_scale.layout import ShardLayout

__all__ = ["PersistResult", "PersistThread", "SaveRequest", "SaveWriter"]


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """One save, frozen: everything that the background needs.

    Attributes:
        key: what all ranks must agree on.
        snapshots: rows of this rank.
        unstaged_bytes: what had no staging memory, so that it is written within the stall; 0 if all had.
        dense: dense tensors in host memory; of rank 0 only.
        rank_state: this rank's own tensors in host memory.
        rows_consumed: rows of training data used so far, if the caller says.
        cursor: position in the data.
        extra: the caller's JSON.
    """

    key: SaveKey
    snapshots: Sequence[ShardSnapshot]
    unstaged_bytes: int = 0
    dense: Mapping[str, torch.Tensor]
    rank_state: Mapping[str, torch.Tensor]
    rows_consumed: int | None
    cursor: Mapping[str, object]
    extra: Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class PersistResult:
    """How a save ended on this rank.

    Attributes:
        outcome: rank 0's word; None if it didn't come.
        error: why the save isn't known to be committed.
        warning: what went wrong after the commit (removal of old checkpoints).
        persist_seconds: in the background, to the outcome.
    """

    outcome: Outcome | None
    error: str | None
    warning: str | None
    persist_seconds: float


@dataclass(kw_only=True)
class SaveWriter:
    """What stays the same over all saves of an engine.

    Attributes:
        storage: where to.
        ballot: how the ranks agree.
        layout: all tables.
        tables: schemas of the tables that this rank holds a part of.
        rank: this rank.
        start: number of the trainer's start.
        optimizer: name of the tables' optimizer.
        policy: what deltas hold and are applied to.
        delta_codecs: of the rows and of the optimizer state in deltas; see `codec`.
        lossy_restores: of the run so far.
        keep_baselines: chains that retention keeps.
        pinned: manifests of checkpoints that it keeps besides; replaced as a whole, by the training thread.
        now: a clock in Unix seconds.
    """

    storage: Storage
    ballot: Ballot
    layout: ShardLayout
    tables: Sequence[TableRecord]
    rank: int
    start: int
    optimizer: str
    policy: Policy
    keep_baselines: int
    delta_codecs: tuple[str, str] = ("none", "none")
    lossy_restores: int = 0
    pinned: frozenset[str] = frozenset()
    now: Callable[[], float] = field(default=time.time)

    def write(self, request: SaveRequest) -> Vote:
        """Write, hash and sync this rank's files. Any exception becomes a no."""
        try:
            files = [self._write_rank_file(request)]
            if self.rank == 0:
                files.append(self._write_dense_file(request))
            self.storage.sync_folder("data")
        except Exception as error:
            not_finite = isinstance(error, NotFiniteError)
            return Vote(save=request.key, rank=self.rank, error=_describe(error), not_finite=not_finite)
        return Vote(
            save=request.key,
            rank=self.rank,
            files=tuple(files),
            tables=tuple(self.tables),
            unstaged_bytes=request.unstaged_bytes,
        )

    def agree(self, request: SaveRequest, vote: Vote, chain: ChainState) -> tuple[Outcome | None, str | None]:
        """Vote, and on rank 0 commit; then read the outcome.

        Returns:
            The outcome, and a warning about old checkpoints that couldn't be removed.
        """
        warning = None
        if self.rank == 0:
            warning = self._write_pins()
            outcome = self._decide(request, vote, chain)
            try:
                self.ballot.announce(request.key.attempt, outcome)
            except Exception as error:
                # The link decides, not the store: ranks that hear nothing keep their rows marked.
                warning = f"the other ranks may not know the outcome: {_describe(error)}"
            if outcome.committed:
                warning = self._retain(request.key.kind, outcome.chain) or warning
            known: Outcome | None = outcome
        else:
            self.ballot.cast(vote)
            known = self.ballot.await_outcome(request.key.attempt)
        if known is not None and not known.committed and not known.uncertain:
            self._remove_own_files(request.key)
        return known, warning

    def _decide(self, request: SaveRequest, vote: Vote, chain: ChainState) -> Outcome:
        try:
            self.ballot.cast(vote)
            votes = self.ballot.collect(request.key)
            manifest = self._manifest(request, votes, chain)
            digest = commit_manifest(self.storage, manifest)
        except Exception as error:
            return Outcome(
                committed=False,
                error=_describe(error),
                fenced=isinstance(error, FencedError),
                not_finite=isinstance(error, NotFiniteError),
                uncertain=isinstance(error, UncertainCommitError),
                chain=chain,
            )
        return Outcome(
            committed=True,
            size_bytes=manifest.size_bytes,
            rows=manifest.table_rows_written,
            unstaged_bytes=tuple(vote.unstaged_bytes for vote in votes),
            chain=chain_after(chain, manifest, digest),
        )

    def _manifest(self, request: SaveRequest, votes: Sequence[Vote], chain: ChainState) -> Manifest:
        schemas: dict[str, TableRecord] = {}
        for vote in votes:
            for table in vote.tables:
                if schemas.setdefault(table.name, table) != table:
                    raise CheckpointError(f"rank {vote.rank} has another schema of table {table.name}")
        missing = [table.spec.name for table in self.layout.tables if table.spec.name not in schemas]
        if missing:
            raise CheckpointError(f"no rank holds rows of {', '.join(missing)}")
        key = request.key
        parent = parent_of(self.policy, chain, key.kind)
        supersedes = key.kind == "delta" and holds_all_since_baseline(self.policy)
        parent_seq = (parse_manifest_name(parent.name) if parent is not None else None) or (0, 0)
        files = tuple(file for vote in votes for file in vote.files)
        return Manifest(
            format=FORMAT_NAME,
            major=FORMAT_MAJOR,
            minor=FORMAT_MINOR,
            seq=key.seq,
            start=self.start,
            attempt=key.attempt,
            kind=key.kind,  # type: ignore[arg-type]
            parent=parent,
            covers=(parent_seq[0] + 1 if supersedes else key.seq, key.seq),
            since_baseline=supersedes,
            earlier_deltas=chain.history_deltas if supersedes else 0,
            earlier_delta_bytes=chain.history_bytes if supersedes else 0,
            step=key.step,
            rows_consumed=request.rows_consumed,
            created_unix_seconds=self.now(),
            ranks=self.layout.ranks,
            optimizer=self.optimizer,
            tables=tuple(schemas[table.spec.name] for table in self.layout.tables),
            files=files,
            layout_fingerprint=key.layout_fingerprint,
            plan=_plan(self.layout),
            cursor=dict(request.cursor),
            extra=dict(request.extra),
            lossy=any(t.codec != "none" for f in files for entry in f.entries for t in entry.tensors.values()),
            lossy_restores=self.lossy_restores,
            versions={"dlrm_scale": __version__, "python": platform.python_version(), "torch": str(torch.__version__)},
        )

    def _write_rank_file(self, request: SaveRequest) -> FileRecord:
        snapshots = request.snapshots
        if request.key.kind != "baseline" and self.delta_codecs != ("none", "none"):
            rows, state = self.delta_codecs
            snapshots = [part for s in snapshots for part in s.encoded(rows, state, self.ballot.progress)]
        sources = [source for snapshot in snapshots for source in snapshot.sources()]
        sources += [TensorSource.whole(f"rank_state/{name}", t) for name, t in request.rank_state.items()]
        written = self._write_file(self._rank_name(request.key), sources, request.key)
        return FileRecord(
            name=written.name,
            rank=self.rank,
            role="rank",
            size_bytes=written.size_bytes,
            xxh3_128=written.xxh3_128,
            entries=tuple(snapshot.record(written) for snapshot in snapshots),
            tensors={name: written.tensors[f"rank_state/{name}"] for name in request.rank_state},
        )

    def _write_dense_file(self, request: SaveRequest) -> FileRecord:
        sources = [_dense_source(name, tensor) for name, tensor in request.dense.items()]
        written = self._write_file(self._dense_name(request.key), sources, request.key)
        return FileRecord(
            name=written.name,
            rank=self.rank,
            role="dense",
            size_bytes=written.size_bytes,
            xxh3_128=written.xxh3_128,
            tensors=written.tensors,
        )

    def _write_file(self, name: str, sources: Sequence[TensorSource], key: SaveKey) -> WrittenFile:
        metadata = {"format": f"{FORMAT_NAME}/{FORMAT_MAJOR}", "seq": str(key.seq), "step": str(key.step)}
        return write_file(self.storage, name, sources, {**metadata, "kind": key.kind}, self.ballot.progress)

    def _rank_name(self, key: SaveKey) -> str:
        return f"data/{key.seq:08d}-s{self.start}a{key.attempt}-r{self.rank}.safetensors"

    def _dense_name(self, key: SaveKey) -> str:
        return f"data/{key.seq:08d}-s{self.start}a{key.attempt}-dense.safetensors"

    def _remove_own_files(self, key: SaveKey) -> None:
        names = [self._rank_name(key), *([self._dense_name(key)] if self.rank == 0 else [])]
        for name in names:
            try:
                self.storage.remove(name)
            except OSError:
                # An orphan; the next start sweeps it.
                continue

    def _write_pins(self) -> str | None:
        """Before the commit that makes the best checkpoint one of the older ones: `gc` then finds it pinned."""
        try:
            replace_pins(self.storage, self.pinned, "best")
        except Exception as error:
            return f"the best checkpoint isn't pinned for other programs: {_describe(error)}"
        return None

    def _retain(self, kind: str, chain: ChainState) -> str | None:
        # Only a new baseline makes a chain old, and reading all manifests after every delta would cost more and more.
        # Deltas that supersede one another stay few.
        if chain.tip_name is None or (kind != "baseline" and not holds_all_since_baseline(self.policy)):
            return None
        remove = remove_old_chains if kind == "baseline" else remove_superseded
        try:
            remove(
                self.storage,
                tip_name=chain.tip_name,
                keep_baselines=self.keep_baselines,
                pinned=self.pinned,
                progress=self.ballot.progress,
            )
        except Exception as error:
            return f"old checkpoints aren't removed: {_describe(error)}"
        return None


class PersistThread(threading.Thread):
    """One save in flight.

    Args:
        writer: the engine's writer.
        request: the save.
        chain: state before it.
        vote: the vote, if the files are written already.
    """

    def __init__(self, writer: SaveWriter, request: SaveRequest, chain: ChainState, vote: Vote | None) -> None:
        # A daemon: a trainer that dies of something else isn't held up by a vote that can't end.
        super().__init__(name=f"checkpoint-{request.key.seq}", daemon=True)
        self._writer = writer
        self._request = request
        self._chain = chain
        self._vote = vote
        self.result: PersistResult | None = None

    def run(self) -> None:
        """Write, vote, and keep the result."""
        began = time.perf_counter()
        outcome, warning = None, None
        try:
            vote = self._vote if self._vote is not None else self._writer.write(self._request)
            outcome, warning = self._writer.agree(self._request, vote, self._chain)
            error = "rank 0 didn't say in time whether it committed" if outcome is None else outcome.error
            if vote.error is not None:
                error = f"rank {vote.rank}: {vote.error}"
        except Exception as raised:
            error = _describe(raised)
        seconds = time.perf_counter() - began
        self.result = PersistResult(outcome=outcome, error=error, warning=warning, persist_seconds=seconds)


def _dense_source(name: str, tensor: torch.Tensor) -> TensorSource:
    blocks = partial(finite_blocks, [tensor], lambda row, column: f"{name}: a value in row {row}")
    return TensorSource(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), blocks=blocks)


def _plan(layout: ShardLayout) -> list[dict[str, object]]:
    return [
        {
            "table": table.spec.name,
            "sharding_type": table.sharding_type,
            "replicated": table.replicated,
            "regions": [[r.rank, r.row_start, r.row_end, r.column_start, r.column_end] for r in table.regions],
        }
        for table in layout.tables
    ]


def _describe(error: BaseException) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"
