"""The sides of `checkpoint.py`: our engine and `torch.distributed.checkpoint` on the state of one sharded model."""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from page_cache import drop_from_cache, read_into_cache
from rounds import spread
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from dlrm_scale.checkpoint import Chain, CheckpointEngine, SaveOutcome, find_chain, restore
from dlrm_scale.checkpoint.saving.staging import HostStaging
from dlrm_scale.config import CheckpointConfig
from dlrm_scale.sharding.shard import ShardedModel
from dlrm_scale.touched_rows import TouchedRows
from dlrm_scale.units import MIB

__all__ = ["Dcp", "Ours", "Saved", "ZipfIds", "in_turns", "load_in_turns", "staging_of"]

NEVER = 1e9
T = TypeVar("T")


def in_turns(rounds: int, sides: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
    """Run all sides in each round, in the opposite order every other round."""
    found: dict[str, list[T]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides) if number % 2 == 0 else list(sides)[::-1]:
            found[name].append(sides[name]())
    return found


def staging_of(sharded: ShardedModel) -> HostStaging:
    """Memory for a copy of all rows and their state; sides that never save at the same time share it."""
    whole = sum(s.weight.nbytes + sum(t.nbytes for t in s.state.values()) for s in sharded.local_shards)
    return HostStaging(whole + MIB)


class ZipfIds:
    """Ids of a column whose k-th most frequent value has probability proportional to k^-skew.

    Ids are numbered by frequency, as our vocabularies do.

    Args:
        table_rows: rows of each table.
        skew: the exponent.
        seed: of the draws.
    """

    def __init__(self, table_rows: Sequence[int], skew: float, seed: int) -> None:
        self._generator = np.random.default_rng(seed)
        self._cumulated = [np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -skew) for rows in table_rows]

    def draw(self, rows: int) -> list[torch.Tensor]:
        """`[rows]` int64 ids of each table."""
        return [
            torch.from_numpy(np.searchsorted(sums, self._generator.random(rows) * sums[-1]).clip(max=len(sums) - 1))
            for sums in self._cumulated
        ]


def load_in_turns(
    rounds: int,
    sides: Mapping[str, "Ours | Dcp"],
    checked: Callable[[Callable[[], float]], Callable[[], float]],
    sizes: Mapping[str, int],
) -> dict[str, dict[str, object]]:
    """Time the loads of all sides in turns, first with the files in the page cache and then with none of them in it.

    Large files that we write leave the cache, and those of dcp stay in it until something else needs the memory: a
    load that found them so would tell more of that than of itself.

    Args:
        rounds: of each.
        sides: by name; dcp's is `dcp.load`.
        checked: of `Dcp.checking_loads`.
        sizes: bytes that each side reads.

    Returns:
        By `NAME` and `NAME, cold`: seconds, and seconds and bytes to dcp's in the same condition.
    """
    found: dict[str, dict[str, object]] = {}
    for condition, prepare in (("", read_into_cache), (", cold", drop_from_cache)):

        def prepared(side: Ours | Dcp, prepare: Callable[[Path], None] = prepare) -> Callable[[], float]:
            def load() -> float:
                prepare(side.folder)
                return side.load()

            return checked(load)

        times = in_turns(rounds, {name: prepared(side) for name, side in sides.items()})
        for name, values in times.items():
            found[name + condition] = {
                "seconds": spread(values),
                "to_dcp": spread([a / b for a, b in zip(values, times["dcp.load"], strict=True)]),
                "bytes_to_dcp": sizes[name] / sizes["dcp.load"],
            }
    return found


@dataclass(frozen=True, kw_only=True)
class Saved:
    """One save: how long training waited, until when it was durable, what it wrote, the process's CPU seconds."""

    stall_seconds: float
    seconds: float
    cpu_seconds: float
    bytes: int
    rows: int = 0


class Ours:
    """The engine on a folder of its own.

    Args:
        folder: made anew.
        sharded: the model on one rank.
        staging: of `staging_of`.
        config: settings of checkpoints; deltas alone follow the first baseline.
    """

    def __init__(self, folder: Path, sharded: ShardedModel, staging: HostStaging, **config: object) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self.folder, self._sharded, self._step = folder, sharded, 0
        self.touched = TouchedRows([shard.region.rows for shard in sharded.local_shards])
        self.touched.enabled = True
        self._engine = CheckpointEngine(
            folder,
            layout=sharded.layout,
            shards=sharded.local_shards,
            touched=self.touched,
            rank=0,
            ranks=1,
            store=None,
            config=CheckpointConfig(baseline_ratio=NEVER, **config),  # type: ignore[arg-type]
            optimizer="rowwise_adagrad",
            staging=staging,
        )

    def change(self, drawn: Sequence[torch.Tensor]) -> None:
        """Change rows and mark them, a tensor of ids a table, in the order of the model's shards."""
        for shard, ids in zip(self._sharded.local_shards, drawn, strict=True):
            shard.weight[ids.unique()] += 0.5
        self.mark(drawn)

    def mark(self, ids: Sequence[torch.Tensor]) -> None:
        """Note rows as touched, a tensor of ids a table, in the order of the model's shards."""
        for index, touched in enumerate(ids):
            self.touched.mark(index, touched)

    def begin(self) -> float:
        """Start a save; the stall in seconds."""
        self._step += 1
        start = time.perf_counter()
        self._engine.save(
            step=self._step,
            cursor={},
            dense=self._sharded.dense_state(),
            rank_state={},
            extra={},
        )
        return time.perf_counter() - start

    def wait(self) -> SaveOutcome:
        """Wait until it is committed.

        Raises:
            SystemExit: it isn't.
        """
        outcome = self._engine.wait()[-1]
        if not outcome.committed:
            raise SystemExit(f"the save failed: {outcome.error}")
        return outcome

    def save(self) -> Saved:
        """Save, and wait."""
        start, cpu = time.perf_counter(), time.process_time()
        stall = self.begin()
        outcome = self.wait()
        return Saved(
            stall_seconds=stall,
            seconds=time.perf_counter() - start,
            cpu_seconds=time.process_time() - cpu,
            bytes=outcome.bytes,
            rows=outcome.rows,
        )

    def chain(self) -> Chain:
        """The newest one."""
        chain = find_chain(self.folder)
        assert chain is not None
        return chain

    def delta_parts(self) -> dict[str, int]:
        """Bytes of the last save by what they are."""
        manifest = self.chain().manifests[-1]
        parts = dict.fromkeys(("rows", "state", "ids", "dense"), 0)
        for file in manifest.files:
            parts["dense"] += sum(tensor.size_bytes for tensor in file.tensors.values())
            for name, tensor in ((n, t) for entry in file.entries for n, t in entry.tensors.items()):
                parts[{"weight": "rows", "ids": "ids"}.get(name, "state")] += tensor.size_bytes
        return parts | {"headers": manifest.size_bytes - sum(parts.values())}

    def load(self) -> float:
        """Find the newest chain and fill the tables from it, hashes checked; seconds."""
        start = time.perf_counter()
        chain = self.chain()
        sharded = self._sharded
        restored = restore(
            chain, layout=sharded.layout, shards=sharded.local_shards, rank=0, ranks=1, optimizer="rowwise_adagrad"
        )
        sharded.load_dense_state(restored.dense)
        return time.perf_counter() - start

    def close(self) -> None:
        """End the engine and remove the folder."""
        self._engine.close()
        shutil.rmtree(self.folder)


class Dcp:
    """`torch.distributed.checkpoint` of the same tensors: weights, optimizer state, dense part.

    Args:
        folder: where its folders go.
        sharded: the model on one rank.
    """

    def __init__(self, folder: Path, sharded: ShardedModel) -> None:
        self._parent, self._number = folder, 0
        self.folder = folder
        self.state: dict[str, torch.Tensor] = dict(sharded.dense_state())
        for shard in sharded.local_shards:
            self.state[f"{shard.region.table}.weight"] = shard.weight
            self.state |= {f"{shard.region.table}.{name}": values for name, values in shard.state.items()}

    def save(self, kind: Literal["sync", "async"]) -> Saved:
        """Save, and wait; the copy is removed, but for the last one."""
        with self.saving(kind) as started:
            stall = time.perf_counter() - started
        return Saved(
            stall_seconds=stall,
            seconds=time.perf_counter() - started,
            cpu_seconds=time.process_time() - self._cpu,
            bytes=sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file()),
        )

    @contextmanager
    def saving(self, kind: Literal["sync", "async"]) -> Iterator[float]:
        """Begin a save, give the time when it began, and wait for its end on leaving."""
        if self._number:
            shutil.rmtree(self.folder)
        self._number += 1
        self.folder = self._parent / f"dcp-{self._number}"
        self._cpu, started = time.process_time(), time.perf_counter()
        if kind == "sync":
            dcp.save(self.state, checkpoint_id=self.folder)
            yield started
        else:
            future = dcp.async_save(
                self.state, checkpoint_id=self.folder, async_checkpointer_type=AsyncCheckpointerType.THREAD
            )
            yield started
            getattr(future, "upload_completion", future).result()

    def checking_loads(self) -> Callable[[Callable[[], float]], Callable[[], float]]:
        """Give what wraps a load: it clears all tensors before, and ends the program if they aren't as now after it."""
        expected = {name: values.clone() for name, values in self.state.items()}

        def checked(load: Callable[[], float]) -> Callable[[], float]:
            def run() -> float:
                for values in self.state.values():
                    values.detach().zero_()
                seconds = load()
                for name, values in self.state.items():
                    if not torch.equal(values, expected[name]):
                        raise SystemExit(f"not the same work: {name} is restored with other values")
                return seconds

            return run

        return checked

    def load(self) -> float:
        """Load into the live tensors; seconds."""
        start = time.perf_counter()
        dcp.load(self.state, checkpoint_id=self.folder)
        return time.perf_counter() - start

    def close(self) -> None:
        """Remove the last copy."""
        if self._number:
            shutil.rmtree(self.folder)
