"""The cheapest chain to a checkpoint, over what the trainer wrote and what merges made of it.

    baseline 1 <- delta 2 <- delta 3 <- delta 4 <- delta 5        the trainer's
               <- merge of 2 to 4, equal to 4                     a merged delta
    merge of 1 to 3, equal to 3                                   a merged baseline

Checkpoints are nodes, known by name and hash of the trainer's manifest. A manifest leads from its parent to the
checkpoint that it restores, and its cost is what a restore reads; a baseline needs nothing before it. The search runs
from the checkpoint wanted back to a baseline and reads a manifest only when it gets there: those older than the newest
good baseline stay unread, and so do data files until a whole path is found. It is A* (Hart, Nilsson and Raphael 1968)
with the size of all rows as the least that is left to read before any checkpoint: by Dijkstra's order, in which a
baseline's size is a surprise, it would first follow as many deltas as make up a baseline (a hundred and more, and 3 to
4 ms for each of their manifests).

Manifests aren't trusted. A cycle ends because no checkpoint is visited twice (and no readable manifest has a parent of
a higher number); a missing link is a node that nothing leads to; two manifests that claim one checkpoint are two ways
to it, told apart by the hash that the next one names.
"""

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import count
from types import MappingProxyType
from typing import NamedTuple

from dlrm_scale.checkpoint.files.file_names import checkpoint_name
from dlrm_scale.checkpoint.files.format import file_fault
from dlrm_scale.checkpoint.files.manifest import ITEM_BYTES, Manifest, ParentRecord, StateRecord, TableRecord
from dlrm_scale.checkpoint.files.manifest_files import ManifestFile, checkpoint_age, list_manifests, read_manifest
from dlrm_scale.checkpoint.storage.storage import Storage
from dlrm_scale.units import MIB

__all__ = ["FILE_COST_BYTES", "ChainSearch", "Path", "restore_cost_bytes"]

FILE_COST_BYTES = MIB
"""What opening one more file costs a restore, as bytes read instead: about a millisecond at 1 GiB/s."""


def restore_cost_bytes(manifest: Manifest) -> int:
    """What a restore reads of a manifest, with its share for opening files, the manifest's too."""
    return manifest.size_bytes + FILE_COST_BYTES * (1 + len(manifest.files))


def _least_baseline_bytes(tables: Iterable[TableRecord]) -> int:
    """What every baseline of these tables has at least: all rows in float32 with their optimizer state."""
    return sum(
        table.rows * (ITEM_BYTES["F32"] * table.dim + sum(_state_row_bytes(s, table.dim) for s in table.state.values()))
        for table in tables
    )


def _state_row_bytes(state: StateRecord, dim: int) -> int:
    return ITEM_BYTES[state.dtype] * (1 if state.per == "row" else dim)


class Path(NamedTuple):
    """A way to restore a checkpoint.

    Attributes:
        checkpoint: name and hash.
        files: manifests, the baseline's first.
    """

    checkpoint: ParentRecord
    files: tuple[ManifestFile, ...]

    @property
    def data_names(self) -> set[str]:
        """Names of all data files."""
        return {data.name for file in self.files if file.manifest is not None for data in file.manifest.files}


class ChainSearch:
    """Looks for chains; every manifest and data file is looked at once.

    Takes time proportional to the manifests that it reads, for all checkpoints of a root together.

    Args:
        storage: the checkpoints. The list of names is taken here.
        read_all: check every byte of the chain that is returned; otherwise sizes.
        damaged: what a restore has found to be wrong with data files, by their names.
        progress: called after each file that was looked at.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        read_all: bool = False,
        damaged: Mapping[str, str] = MappingProxyType({}),
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._storage = storage
        self._progress = progress
        self._damaged = damaged
        self._read_all = read_all
        self._by_checkpoint: dict[str, list[str]] = {}
        for name in list_manifests(storage):
            self._by_checkpoint.setdefault(checkpoint_name(name) or "", []).append(name)
        self._manifests: dict[str, ManifestFile] = {}
        self._faults: dict[str, str | None] = {}
        self._hashed: set[str] = set()
        self._unreachable: dict[frozenset[str], dict[ParentRecord, str]] = {}
        self._suspicious = False

    @property
    def checkpoints(self) -> list[str]:
        """Names of all checkpoints, oldest first; a merge counts as the one that it is equal to."""
        return sorted(self._by_checkpoint, key=checkpoint_age)

    @property
    def faults(self) -> dict[str, str]:
        """What was found to be wrong so far, by the name of the manifest that can't be used for it."""
        unreadable = {name: file.reason for name, file in self._manifests.items() if file.reason is not None}
        return unreadable | {name: fault for name, fault in self._faults.items() if fault is not None}

    def manifest(self, name: str) -> ManifestFile:
        """Read a manifest."""
        if name not in self._manifests:
            self._manifests[name] = read_manifest(self._storage, name)
            self._progress()
        return self._manifests[name]

    def files_of(self, checkpoint: str) -> list[ManifestFile]:
        """The trainer's manifest and merges that stand for a checkpoint, by its name."""
        return [self.manifest(name) for name in self._by_checkpoint.get(checkpoint, [])]

    def named(self, checkpoint: str) -> ParentRecord | str:
        """The checkpoint with a name, or why that isn't known."""
        files = self.files_of(checkpoint)
        own = next((file for file in files if file.name == checkpoint and file.manifest is not None), None)
        if own is not None:
            return ParentRecord(name=own.name, sha256=own.sha256)
        known = {file.checkpoint for file in files if file.checkpoint is not None}
        if len(known) == 1:
            return known.pop()
        if known:
            return f"{', '.join(f.name for f in files if f.manifest)} claim to be equal to it and to different things"
        return next((file.reason for file in files if file.reason), f"{checkpoint} is missing")

    def path_to(self, checkpoint: ParentRecord, *, without: Collection[str] = ()) -> Path | str:
        """The cheapest path, or what is wrong with every one.

        Args:
            checkpoint: which.
            without: names of data files that it may not use.
        """
        while True:
            found = self._cheapest(checkpoint, frozenset(without))
            if isinstance(found, str):
                return found
            # All of them, so that the number of searches doesn't grow with the number of damaged files.
            faults = [self._fault(file, read_all=self._read_all) for file in found.files]
            if all(fault is None for fault in faults):
                return found
            self._suspicious = True

    def _cheapest(self, checkpoint: ParentRecord, without: frozenset[str]) -> Path | str:
        unreachable = self._unreachable.setdefault(without, {})
        tables: dict[str, TableRecord] | None = None
        reasons: list[str] = []
        other_tables = False
        ways: dict[ParentRecord, tuple[ManifestFile, ParentRecord] | None] = {}
        number = count()
        least_baseline = 0
        # What the whole path costs at least, and of it what is known.
        heap: list[tuple[int, int, int, ParentRecord | None, tuple[ManifestFile, ParentRecord] | None]] = []
        heapq.heappush(heap, (0, next(number), 0, checkpoint, None))
        while heap:
            _, _, cost, node, way = heapq.heappop(heap)
            if node is None:
                return Path(checkpoint, tuple(_walk(ways, way)))
            if node in ways:
                continue
            ways[node] = way
            if node in unreachable:
                reasons.append(unreachable[node])
                continue
            for file in self._leading_to(node, way, without, reasons):
                manifest = file.manifest
                if manifest is None:
                    continue
                if tables is None:
                    tables, least_baseline = manifest.table_schema(), _least_baseline_bytes(manifest.tables)
                if manifest.table_schema() != tables:
                    other_tables = True
                    reasons.append("its checkpoints have different tables")
                    continue
                before = None if manifest.kind == "baseline" else manifest.parent
                to_here = cost + restore_cost_bytes(manifest)
                least_left = 0 if before is None else least_baseline
                heapq.heappush(heap, (to_here + least_left, next(number), to_here, before, (file, node)))
        reason = "; ".join(dict.fromkeys(reasons)) or f"{checkpoint.name} is missing"
        if not other_tables:
            # Whatever was visited leads back to the same gaps.
            unreachable |= dict.fromkeys(ways, reason)
        return reason

    def _leading_to(
        self,
        node: ParentRecord,
        way: tuple[ManifestFile, ParentRecord] | None,
        without: frozenset[str],
        reasons: list[str],
    ) -> Iterator[ManifestFile]:
        """Usable manifests that restore a checkpoint; why others can't be used goes to `reasons`."""
        files = self.files_of(node.name)
        if not files:
            reasons.append(f"{node.name} is missing")
        for file in files:
            if file.manifest is None:
                reasons.append(file.reason or f"{file.name} can't be read")
            elif file.checkpoint != node:
                child = f" that {way[0].name} was made from" if way is not None else ""
                reasons.append(f"{file.name} isn't the one{child}")
            elif not without.isdisjoint(data.name for data in file.manifest.files):
                reasons.append(f"{file.name} isn't to be used")
            elif (fault := self._fault(file) if self._suspicious else self._faults.get(file.name)) is not None:
                reasons.append(fault)
            else:
                yield file

    def _fault(self, file: ManifestFile, *, read_all: bool = False) -> str | None:
        looked = file.name in self._hashed or (file.name in self._faults and not read_all)
        if not looked and self._faults.get(file.name) is None:
            self._faults[file.name] = next(self._data_faults(file, read_all), None)
            if read_all:
                self._hashed.add(file.name)
        return self._faults[file.name]

    def _data_faults(self, file: ManifestFile, read_all: bool) -> Iterator[str]:
        for data in file.manifest.files if file.manifest is not None else ():
            if data.name in self._damaged:
                yield self._damaged[data.name]
                continue
            fault = file_fault(self._storage, data, read_all=read_all)
            self._progress()
            if fault is not None:
                yield f"{data.name} {fault}"


def _walk(
    ways: dict[ParentRecord, tuple[ManifestFile, ParentRecord] | None],
    way: tuple[ManifestFile, ParentRecord] | None,
) -> Iterator[ManifestFile]:
    while way is not None:
        file, node = way
        yield file
        way = ways[node]
