"""The parts of `checkpoint.py` that don't need a merger: writing, restoring, training, and the curves."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from checkpoint_long_chain import merge_memory
from checkpoint_sides import Dcp, Ours, Saved, ZipfIds, in_turns, load_in_turns
from rounds import spread
from shapes import cycle

from dlrm_scale.batch import Batch, make_batch
from dlrm_scale.checkpoint.saving.staging import HostStaging
from dlrm_scale.schema import INTEGER_COLUMNS
from dlrm_scale.sharding.pipeline import make_train_pipeline
from dlrm_scale.sharding.shard import ShardedModel
from dlrm_scale.telemetry import StepClock

__all__ = ["BATCH_ROWS", "CHAIN_DELTAS", "Bed", "curves", "restoring", "training", "writing"]

BATCH_ROWS = 2048
CHAIN_DELTAS = 12
BATCHES = 100


@dataclass(frozen=True, kw_only=True)
class Bed:
    """What all parts work with.

    Attributes:
        folder: where checkpoints go.
        sharded: the model.
        staging: for all sides of ours, as they never save at the same time.
        interval: steps between checkpoints.
        rounds: of each part.
        skew: of the ids.
    """

    folder: Path
    sharded: ShardedModel
    staging: HostStaging
    interval: int
    rounds: int
    skew: float

    @property
    def table_rows(self) -> list[int]:
        """By shard, which are whole tables."""
        return [shard.region.rows for shard in self.sharded.local_shards]

    def ours(self, name: str, **config: object) -> Ours:
        """A side of ours in a folder of its own."""
        return Ours(self.folder / name, self.sharded, self.staging, **config)

    def ids(self, seed: int) -> ZipfIds:
        """Ids of the tables."""
        return ZipfIds(self.table_rows, self.skew, seed)


def writing(bed: Bed) -> dict[str, object]:
    """Write baselines and deltas in turns with whole copies by dcp."""
    ids, dcp = bed.ids(1), Dcp(bed.folder, bed.sharded)
    exact, rounded = bed.ours("exact"), bed.ours("int8", delta_rows="int8")
    for side in (exact, rounded):
        side.save()

    def baseline() -> Saved:
        side = bed.ours("baseline")
        try:
            return side.save()
        finally:
            side.close()

    def delta(side: Ours) -> Saved:
        for _ in range(bed.interval):
            side.mark(ids.draw(BATCH_ROWS))
        return side.save()

    found = in_turns(
        bed.rounds,
        {
            "baseline": baseline,
            "delta": lambda: delta(exact),
            "delta, int8 rows": lambda: delta(rounded),
            "dcp.save": lambda: dcp.save("sync"),
            "dcp.async_save": lambda: dcp.save("async"),
        },
    )
    parts = {"delta": exact.delta_parts(), "delta, int8 rows": rounded.delta_parts()}
    for side in (exact, rounded, dcp):
        side.close()
    peers = found["dcp.save"]
    return {
        name: {
            "stall_seconds": spread([s.stall_seconds for s in saves]),
            "seconds": spread([s.seconds for s in saves]),
            "cpu_seconds": spread([s.cpu_seconds for s in saves]),
            "bytes": spread([s.bytes for s in saves]),
            "seconds_to_dcp": spread([s.seconds / peer.seconds for s, peer in zip(saves, peers, strict=True)]),
            "cpu_to_dcp": spread([s.cpu_seconds / peer.cpu_seconds for s, peer in zip(saves, peers, strict=True)]),
            "bytes_to_dcp": spread([s.bytes / peer.bytes for s, peer in zip(saves, peers, strict=True)]),
            "parts_bytes": parts.get(name),
        }
        for name, saves in found.items()
    }


def restoring(bed: Bed) -> dict[str, object]:
    """Restore a chain and a baseline in turns with `dcp.load`, then merge the chain."""
    ids, alone, chain, dcp = bed.ids(2), bed.ours("alone"), bed.ours("chain"), Dcp(bed.folder, bed.sharded)
    chain.save()
    for _ in range(CHAIN_DELTAS):
        drawn = [ids.draw(BATCH_ROWS) for _ in range(bed.interval)]
        chain.change([torch.cat(parts) for parts in zip(*drawn, strict=True)])
        chain.save()
    alone.save()
    dcp_bytes = dcp.save("sync").bytes
    sizes = {"chain": chain.chain().size_bytes, "baseline": alone.chain().size_bytes, "dcp.load": dcp_bytes}
    checked = dcp.checking_loads()
    found = load_in_turns(bed.rounds, {"chain": chain, "baseline": alone, "dcp.load": dcp}, checked, sizes)
    merged = merge_memory(chain.folder)
    checked(chain.load)()  # the merged baseline, which has the same values
    for side in (alone, chain, dcp):
        side.close()
    return {"merge": merged, "sides": found}


def training(bed: Bed) -> dict[str, object]:
    """Time intervals that begin with a checkpoint; a save that is still being written at the end is awaited untimed."""
    ours, dcp = bed.ours("training"), Dcp(bed.folder, bed.sharded)
    marks = _MarkClock(bed.sharded, ours)
    pipeline, turn = make_train_pipeline(bed.sharded, "plain", StepClock()), cycle(_batches(bed))

    def steps() -> float:
        start = time.perf_counter()
        for _ in range(bed.interval):
            pipeline.progress(turn)
        return time.perf_counter() - start

    ours.save()
    steps()
    ours.touched.enabled = False  # the other sides don't track, and their rows aren't in our deltas

    def with_ours() -> Saved:
        ours.touched.enabled = True
        marks.seconds = 0.0
        start = time.perf_counter()
        stall = ours.begin()
        running = steps()
        seconds = time.perf_counter() - start
        ours.touched.enabled = False
        tracking.append(marks.seconds / running)
        outcome = ours.wait()
        return Saved(stall_seconds=stall, seconds=seconds, cpu_seconds=0.0, bytes=outcome.bytes)

    def with_dcp() -> Saved:
        with dcp.saving("async") as start:
            stall = time.perf_counter() - start
            steps()
            seconds = time.perf_counter() - start
        return Saved(stall_seconds=stall, seconds=seconds, cpu_seconds=0.0, bytes=0)

    def with_neither() -> Saved:
        return Saved(stall_seconds=0.0, seconds=steps(), cpu_seconds=0.0, bytes=0)

    tracking: list[float] = []
    found = in_turns(bed.rounds, {"none": with_neither, "delta": with_ours, "dcp.async_save": with_dcp})
    for side in (ours, dcp):
        side.close()
    bare = [saved.seconds for saved in found["none"]]
    return {
        "seconds_without": spread(bare),
        "tracking_share": spread(tracking),
        **{
            name: {
                "overhead": spread([s.seconds / b - 1 for s, b in zip(found[name], bare, strict=True)]),
                "stall_share": spread([s.stall_seconds / b for s, b in zip(found[name], bare, strict=True)]),
            }
            for name in ("delta", "dcp.async_save")
        },
    }


class _MarkClock:
    """Has lookups tracked by a side's map, and times that: hooks run in the order of their registration."""

    def __init__(self, sharded: ShardedModel, ours: Ours) -> None:
        self.seconds = 0.0
        self._began = 0.0
        modules = [kernel.module for kernel in sharded.kernels]
        for module in modules:
            module.register_forward_pre_hook(self._begin)
        sharded.track(ours.touched)
        for module in modules:
            module.register_forward_pre_hook(self._end)

    def _begin(self, *_: object) -> None:
        self._began = time.perf_counter()

    def _end(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began


def _batches(bed: Bed) -> list[Batch]:
    ids, generator = bed.ids(3), torch.Generator().manual_seed(3)
    return [
        make_batch(
            dense_features=torch.randn(BATCH_ROWS, len(INTEGER_COLUMNS), generator=generator),
            ids=torch.stack(ids.draw(BATCH_ROWS)),
            labels=(torch.rand(BATCH_ROWS, generator=generator) < 0.25).float(),
        )
        for _ in range(BATCHES)
    ]


def curves(bed: Bed, skews: Sequence[float], intervals: Sequence[int]) -> list[dict[str, float]]:
    """Save deltas of several intervals, their ids drawn with several skews."""
    return [point for skew in skews for point in _curve(bed, skew, intervals)]


def _curve(bed: Bed, skew: float, intervals: Sequence[int]) -> Iterator[dict[str, float]]:
    sides = {"": bed.ours("fp32"), "int8_": bed.ours("int8", delta_rows="int8")}
    whole = {name: side.save().bytes for name, side in sides.items()}
    for interval in intervals:
        ids = ZipfIds(bed.table_rows, skew, seed=interval)
        for _ in range(interval):
            drawn = ids.draw(BATCH_ROWS)
            for side in sides.values():
                side.mark(drawn)
        saves = {name: side.save() for name, side in sides.items()}
        shares = {f"{name}bytes_share": saved.bytes / whole[name] for name, saved in saves.items()}
        yield {"skew": skew, "interval_steps": interval, "rows_share": saves[""].rows / sum(bed.table_rows), **shares}
    for side in sides.values():
        side.close()
