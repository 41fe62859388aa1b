"""One merge: writes its files and commits them."""

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import torch

from dlrm_scale import __version__
from dlrm_scale.checkpoint.chain.leases import Lease
from dlrm_scale.checkpoint.chain.starts import fence_name
from dlrm_scale.checkpoint.files.file_names import merged_name
from dlrm_scale.checkpoint.files.format import (
    DTYPES,
    BlockReader,
    TensorSource,
    WrittenFile,
    unreadable,
    write_file,
)
from dlrm_scale.checkpoint.files.manifest import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    FORMAT_NAME,
    FileRecord,
    Manifest,
    MergeRecord,
    TableRecord,
    TensorRecord,
    temporary_name,
)
from dlrm_scale.checkpoint.files.manifest_check import check_manifest
from dlrm_scale.checkpoint.files.manifest_text import serialize_manifest
from dlrm_scale.checkpoint.storage.storage import Storage
from dlrm_scale.checkpoint.storage.store_calls import UncertainWriteError
from dlrm_scale.checkpoint.upkeep.merge_plan import MergePlan
from dlrm_scale.checkpoint.upkeep.merge_rows import Rows, RowsMerge
from dlrm_scale.errors import CheckpointError, StorageError
from dlrm_scale.units import GIB

__all__ = ["PIECE_BYTES", "MergeRun", "Progress"]

Progress = Callable[[int, int], None]
"""Takes bytes written, and about how many there will be."""

PIECE_BYTES = 4 * GIB
"""A table with more bytes is cut by rows, so that a restore of some of its rows needn't read all ids before them."""


@dataclass(kw_only=True)
class MergeRun:
    """A merge that fits into memory.

    Args:
        storage: the checkpoints.
        plan: what to merge.
        lease: that holds it.
        number: of the merge.
        progress: called after each block.
    """

    storage: Storage
    plan: MergePlan
    lease: Lease
    number: int
    progress: Progress
    _written: list[str] = field(default_factory=list, init=False)
    _done_bytes: int = field(default=0, init=False)

    def run(self) -> Manifest:
        """Write and commit.

        Returns:
            The committed manifest.

        Raises:
            CheckpointError: a file is damaged, tables don't fit together, or the lease has ended. Files are removed.
            StorageError: a file hasn't the bytes that were written.
            OSError: the storage fails or is full. Files are removed as far as it lets.
        """
        try:
            files = self._write_files()
            self.storage.sync_folder("data")
            manifest = self._manifest(files)
            self._commit(manifest)
        except BaseException:
            # Also when it is interrupted. What can't be removed is swept by the next merge.
            with suppress(OSError):
                self._remove_uncommitted()
            raise
        return manifest

    def _remove_uncommitted(self) -> None:
        if not self.storage.exists(merged_name(self._tip.seq, self._tip.start, self.number)):
            for name in self._written:
                self.storage.remove(name)

    @property
    def _tip(self) -> Manifest:
        return self.plan.manifests[-1]

    def _write_files(self) -> list[FileRecord]:
        merges = self._spread()
        for merge in (merge for found in merges for merge in found):
            merge.count(self.lease.check)
        total_bytes = sum(s.size_bytes for found in merges for merge in found for s in merge.sources())
        files = []
        for rank, found in enumerate(merges):
            state = self._copies(next(f for f in self._tip.files if f.role == "rank" and f.rank == rank), "rank_state/")
            sources = [source for merge in found for source in merge.sources()] + [source for _, source in state]
            written = self._write_file(f"r{rank}", sources, total_bytes)
            files.append(
                FileRecord(
                    name=written.name,
                    rank=rank,
                    role="rank",
                    size_bytes=written.size_bytes,
                    xxh3_128=written.xxh3_128,
                    entries=tuple(record for merge in found for record in merge.records(written)),
                    tensors={name: written.tensors[source.name] for name, source in state},
                )
            )
        dense = self._copies(next(file for file in self._tip.files if file.role == "dense"), "")
        written = self._write_file("dense", [source for _, source in dense], total_bytes)
        files.append(
            FileRecord(
                name=written.name,
                rank=0,
                role="dense",
                size_bytes=written.size_bytes,
                xxh3_128=written.xxh3_128,
                tensors={name: written.tensors[source.name] for name, source in dense},
            )
        )
        return files

    def _write_file(self, what: str, sources: Sequence[TensorSource], total_bytes: int) -> WrittenFile:
        name = f"data/{self._tip.seq:08d}-s{self._tip.start}m{self.number}-{what}.safetensors"
        metadata = {"format": f"{FORMAT_NAME}/{FORMAT_MAJOR}", "seq": str(self._tip.seq), "step": str(self._tip.step)}
        self._written.append(name)
        counted = [replace(source, blocks=partial(self._counted, source, total_bytes)) for source in sources]
        kind = "baseline" if self.plan.kind == "baseline" else "merged"
        return write_file(self.storage, name, counted, {**metadata, "kind": kind}, self.lease.check)

    def _counted(self, source: TensorSource, total_bytes: int) -> Iterator[torch.Tensor]:
        for block in source.blocks():
            yield block
            self._done_bytes += block.nbytes
            self.progress(self._done_bytes, total_bytes)

    def _copies(self, file: FileRecord, prefix: str) -> list[tuple[str, TensorSource]]:
        """A file's own tensors, read one at a time and checked, under names of the new file."""

        def read(record: TensorRecord) -> Iterator[torch.Tensor]:
            try:
                with self.storage.open(file.name) as opened:
                    values = BlockReader(opened, record).read()
            except OSError as error:
                raise unreadable(f"can't open {file.name}: {error}", error, file.name) from error
            yield values

        return [
            (
                name,
                TensorSource(
                    name=f"{prefix}{name}",
                    dtype=DTYPES[record.dtype],
                    shape=record.shape,
                    blocks=partial(read, record),
                ),
            )
            for name, record in file.tensors.items()
        ]

    def _spread(self) -> list[list[RowsMerge]]:
        """Cut the tables into rectangles and spread these over the files of the tip's ranks, the largest first."""
        merges = [merge for table in self._tip.tables for merge in self._rectangles(table)]
        spread: list[list[RowsMerge]] = [[] for _ in range(self._tip.ranks)]
        filled_bytes = [0] * len(spread)
        for merge in sorted(merges, key=lambda m: -m.rows.size_bytes):
            rank = filled_bytes.index(min(filled_bytes))
            spread[rank].append(merge)
            filled_bytes[rank] += merge.rows.size_bytes
        return spread

    def _rectangles(self, table: TableRecord) -> Iterator[RowsMerge]:
        manifests = self.plan.manifests
        found = [(f, e) for m in manifests for f in m.files for e in f.entries if e.table == table.name]
        splits = {manifest.column_splits(table.name) for manifest in manifests}
        if len(splits) > 1 and any(state.per == "row" for state in table.state.values()):
            raise CheckpointError(
                f"row-wise optimizer state of table {table.name} was kept under different column splits between "
                f"{manifests[0].name} and {self._tip.name}; it can't be merged exactly",
                remedy="let the trainer write a new baseline: resume it once",
            )
        bounds = sorted({bound for split in splits for columns in split for bound in columns})
        for column_start, column_end in pairwise(bounds):
            whole = Rows(table=table, row_start=0, row_end=table.rows, column_start=column_start, column_end=column_end)
            rows = max(whole.block_rows, PIECE_BYTES // whole.row_bytes)
            for row_start in range(0, table.rows, rows):
                piece = replace(whole, row_start=row_start, row_end=min(row_start + rows, table.rows))
                yield RowsMerge(
                    storage=self.storage,
                    rows=piece,
                    found=[(file, entry) for file, entry in found if piece.meets(entry)],
                    decodes=self.plan.kind == "baseline",
                )

    def _manifest(self, files: Sequence[FileRecord]) -> Manifest:
        manifests, tip = self.plan.manifests, self._tip
        is_baseline = self.plan.kind == "baseline"
        encoded = any(t.codec != "none" for f in files for e in f.entries for t in e.tensors.values())
        still_lossy = any(m.lossy and m.lossy_restores == tip.lossy_restores for m in manifests)
        return tip.model_copy(
            update={
                "major": FORMAT_MAJOR,
                "minor": FORMAT_MINOR,
                "attempt": 0,
                "kind": "baseline" if is_baseline else "merged",
                "parent": manifests[1].parent if is_baseline else manifests[0].parent,
                "covers": (manifests[0].covers[0], tip.seq),
                "since_baseline": False,
                "earlier_deltas": 0,
                "earlier_delta_bytes": 0,
                "created_unix_seconds": time.time(),
                "files": tuple(files),
                "versions": {
                    "dlrm_scale": __version__,
                    "python": platform.python_version(),
                    "torch": str(torch.__version__),
                },
                "merge": MergeRecord(
                    number=self.number, equal_to=self.plan.equal_to, manifests=tuple(m.name for m in manifests)
                ),
                "lossy": encoded or still_lossy,
            }
        )

    def _commit(self, manifest: Manifest) -> None:
        """As a trainer's commit, but fenced off by sweepers alone; the order is that of `sweep`."""
        check_manifest(manifest)
        data, _ = serialize_manifest(manifest)
        temporary = temporary_name(manifest)
        linking = False
        try:
            self.storage.write_durably(temporary, data)
            self.lease.check()
            swept = self.storage.exists(fence_name(self.number))
            for file in manifest.files:
                size = self.storage.size_bytes(file.name)
                if size != file.size_bytes:
                    raise StorageError(
                        f"{file.name} has {size} bytes, and {file.size_bytes} were written",
                        remedy="check the storage, and run it again",
                    )
            if not swept:
                linking = True
                self.storage.link(temporary, manifest.name)
        except FileNotFoundError:
            swept = True
        except BaseException as error:
            # A store that doesn't answer, or is interrupted meanwhile, may show the manifest later. So its data stays,
            # and is no leftover before the lease is over.
            if isinstance(error, UncertainWriteError) or (linking and not isinstance(error, Exception)):
                self._written.clear()
                self.lease.leave()
            raise
        finally:
            with suppress(OSError):
                self.storage.remove(temporary)
        if swept:
            raise StorageError(
                f"merge {self.number} was stopped for so long that its files were taken for leftovers",
                remedy="run it again",
            )
        try:
            self.storage.sync_folder("manifests")
        except OSError:
            # It stays, with its data: whoever has seen it may have removed what it takes the place of. After a loss of
            # power it may be gone; then a sweep takes the data.
            self._written.clear()
            raise
