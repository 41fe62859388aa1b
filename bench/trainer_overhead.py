"""What the trainer adds to a bare step: `train_rank` with its loader, metrics, tracking, attribution and log lines.

One process trains through the public entry, on a dataset on disk. After every block of steps the trainer is held up,
and as many bare steps are timed with the same model and the same kind of batches, ready in memory: `progress` of a
pipeline without clock, hooks or tracked rows. Blocks are as long as the distance between log lines, so each has one.
A block of the trainer counts from the start of one step to the start of the next block, so nothing between steps is
left out. Checkpoints and validations are not in it: they have intervals and goals of their own. While the bare steps
run, the loader may fill its queue, which spares the next block at most `data.prefetch_batches` batches (the share is
printed).

    python bench/trainer_overhead.py --blocks 15 --save
    python bench/trainer_overhead.py --quick
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import stamp
import torch
from hooks import Hooks, hooks_of, set_hooks
from rounds import Round, ratio, show_spread, spread
from shapes import check_memory, cycle

from dlrm_scale.batch import Batch
from dlrm_scale.data.dataset.dataset import ColumnInfo, Dataset, DatasetManifest, PartWriter, RowRange, write_manifest
from dlrm_scale.data.loading.loader import TrainLoader
from dlrm_scale.schema import CATEGORY_COLUMNS, INTEGER_COLUMNS
from dlrm_scale.sharding import pipeline as pipelines
from dlrm_scale.sharding.shard import ShardedModel
from dlrm_scale.sharding.step_phases import BackwardRanges, mark_phases
from dlrm_scale.telemetry import StepClock
from dlrm_scale.train import trainer
from dlrm_scale.train.run_folder import resolve_run
from dlrm_scale.train.stop import StopRequest
from dlrm_scale.units import GIB

GOAL = 0.03
DISTINCT_BATCHES = 8
WARM_UP_BLOCKS = 1
LOSS_TOLERANCE = 0.1


def main() -> None:
    """Measure, print, and save if asked."""
    options = _options()
    if options.quick:
        options.rows, options.batch_size, options.blocks, options.block_steps = 500, 128, 3, 4
    check_memory(26 * options.rows * options.dim * 4 + 2 * GIB, f"--rows {options.rows} --dim {options.dim}")
    steps = (WARM_UP_BLOCKS + options.blocks) * options.block_steps
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        _make_dataset(Path(folder, "dataset"), steps * options.batch_size, options.rows)
        request = resolve_run("sample", _overrides(options, Path(folder)))
        data = request.config.data
        loader = TrainLoader(Dataset.open(Path(data.path)), data, rank=0, ranks=1, epochs=1)
        bare_batches = cycle([next(loader) for _ in range(DISTINCT_BATCHES)])
        loader.close()
        bare_hooks: list[Hooks] = []
        probes: list[BlockProbe] = []

        def mark(sharded: ShardedModel, clock: StepClock) -> BackwardRanges:
            bare_hooks.append(hooks_of(sharded.module))
            return mark_phases(sharded, clock)

        def make(sharded: ShardedModel, kind: pipelines.PipelineKind, clock: StepClock) -> BlockProbe:
            probes.append(BlockProbe(sharded, kind, clock, options.block_steps, bare_hooks[0], bare_batches))
            return probes[-1]

        with patch.object(trainer, "mark_phases", mark), patch.object(trainer, "make_train_pipeline", make):
            result = trainer.train_rank(request, StopRequest())
    assert result.state == "finished", result.state
    _check_equal_work(probes[0].losses)
    found = _result(probes[0], request.config.data.prefetch_batches, options)
    _show(found)
    if options.json:
        print(json.dumps(found))
    if options.save:
        print("saved:", stamp.save("trainer_overhead", found))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=15, help="timed blocks of each side")
    parser.add_argument("--block-steps", type=int, default=20, help="steps of a block, and between log lines")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--rows", type=int, default=100_000, help="rows of each of the 26 tables")
    parser.add_argument("--dim", type=int, default=64, help="columns of each table")
    parser.add_argument("--batch-size", type=int, default=2048, help="rows of a batch")
    parser.add_argument("--folder", type=Path, help="for dataset and run; the system's temporary folder by default")
    parser.add_argument("--quick", action="store_true", help="tiny tables and blocks: does the script work?")
    parser.add_argument("--json", action="store_true", help="print the result as JSON too")
    parser.add_argument("--save", action="store_true", help="write it to bench/results")
    return parser.parse_args()


def _make_dataset(folder: Path, rows: int, table_rows: int) -> None:
    folder.mkdir()
    random = np.random.default_rng(0)
    with PartWriter(folder / "part-00000.arrow") as writer:
        writer.write(
            (random.random(rows) < 0.25).astype(np.uint8),
            random.standard_normal((len(INTEGER_COLUMNS), rows)).astype(np.float32),
            random.integers(0, table_rows, (len(CATEGORY_COLUMNS), rows), np.int32),
        )
        part = writer.close()
    columns = tuple(
        ColumnInfo(name=name, table_rows=table_rows, method="modulo", statistics={}) for name in CATEGORY_COLUMNS
    )
    split: dict[str, tuple[RowRange, ...]] = {"train": (RowRange(start=0, end=rows),), "validation": (), "test": ()}
    write_manifest(folder, DatasetManifest(parts=(part,), columns=columns, transforms={}, split=split, statistics={}))


def _overrides(options: argparse.Namespace, folder: Path) -> list[str]:
    return [
        f"run.path={folder / 'run'}",
        f"data.path={folder / 'dataset'}",
        f"data.batch_size={options.batch_size}",
        f"model.dim={options.dim}",
        f"model.dense_layers=[512, 256, {options.dim}]",
        "model.over_layers=[512, 512, 256, 1]",
        "dense_optimizer.kind=sgd",
        "sparse_optimizer.kind=sgd",
        "sharding.kind=table_wise",
        "train.epochs=1",
        "train.device=cpu",
        f"train.threads_per_rank={options.threads}",
        f"train.log_every_steps={options.block_steps}",
        "train.validate_every_steps=0",
        "checkpoint.every_steps=0",
    ]


class BlockProbe:
    """The trainer's pipeline, which stops after every block to time a block of bare steps.

    Args:
        sharded: the model.
        kind: of the trainer's pipeline.
        clock: the trainer's.
        block_steps: steps of a block.
        bare_hooks: the model's without those that the trainer added.
        bare_batches: for the bare steps.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        kind: pipelines.PipelineKind,
        clock: StepClock,
        block_steps: int,
        bare_hooks: Hooks,
        bare_batches: Iterator[Batch],
    ) -> None:
        """Make both pipelines of one model."""
        self.trainer_blocks: list[Round] = []
        self.bare_blocks: list[Round] = []
        self._sharded = sharded
        self._clock = clock
        self._block_steps = block_steps
        self._bare_hooks, self._hooks = bare_hooks, hooks_of(sharded.module)
        self._bare_batches = bare_batches
        self._pipeline = pipelines.make_train_pipeline(sharded, kind, clock)
        self._bare = pipelines.make_train_pipeline(sharded, kind)
        self._done = 0
        self._start = (0.0, 0.0)
        self.losses: list[tuple[float, float]] = []

    def progress(self, batches: Iterator[Batch]) -> tuple[Batch, torch.Tensor, torch.Tensor]:
        """Do one of the trainer's steps, after a block of bare ones where it is their turn."""
        if self._done % self._block_steps == 0:
            if self._done:
                self.trainer_blocks.append(self._since(self._start))
            with self._clock.whole("evaluation"):  # not the trainer's time
                self._time_bare_steps()
            self._start = (time.perf_counter(), time.process_time())
        batch, row_loss_sum, logits = self._pipeline.progress(batches)
        self._done += 1
        self._trainer_loss = row_loss_sum / batch.rows_global
        return batch, row_loss_sum, logits

    def _time_bare_steps(self) -> None:
        touched = self._sharded.touched
        assert touched is not None
        set_hooks(self._bare_hooks)
        touched.enabled = False
        start = (time.perf_counter(), time.process_time())
        for _ in range(self._block_steps):
            batch, row_loss_sum, _ = self._bare.progress(self._bare_batches)
        self.bare_blocks.append(self._since(start))
        if self._done:
            self.losses.append((self._trainer_loss.item(), row_loss_sum.item() / batch.rows_global))
        touched.enabled = True
        set_hooks(self._hooks)

    def _since(self, start: tuple[float, float]) -> Round:
        elapsed, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
        return Round(elapsed=1000 * elapsed / self._block_steps, cpu=1000 * cpu / self._block_steps)


def _check_equal_work(losses: list[tuple[float, float]]) -> None:
    """One model sees random labels on both sides, so its loss must be about the same."""
    for trained, bare in losses:
        if not abs(trained - bare) < LOSS_TOLERANCE:
            raise SystemExit(f"not the same work: the trainer's loss is {trained}, a bare step's {bare}")


def _result(probe: BlockProbe, prefetched: int, options: argparse.Namespace) -> dict:
    trained, bare = probe.trainer_blocks[WARM_UP_BLOCKS:], probe.bare_blocks[WARM_UP_BLOCKS:-1]
    # a block of the trainer stands between two of bare steps: compared with the mean of both, a drift cancels
    after = probe.bare_blocks[WARM_UP_BLOCKS + 1 :]
    around = [
        Round(elapsed=(a.elapsed + b.elapsed) / 2, cpu=(a.cpu + b.cpu) / 2) for a, b in zip(bare, after, strict=True)
    ]
    overhead = ratio(trained, around)
    return {
        "bench": "trainer_overhead",
        "shape": {"tables": 26, "rows": options.rows, "dim": options.dim, "batch_size": options.batch_size},
        "threads": options.threads,
        "blocks": options.blocks,
        "block_steps": options.block_steps,
        "share_of_a_blocks_batches_loaded_before_it": prefetched / options.block_steps,
        "trainer_milliseconds": spread([r.elapsed for r in trained]),
        "bare_milliseconds": spread([r.elapsed for r in bare]),
        "trainer_cpu_milliseconds": spread([r.cpu for r in trained]),
        "bare_cpu_milliseconds": spread([r.cpu for r in bare]),
        "overhead": {kind: {name: value - 1 for name, value in values.items()} for kind, values in overhead.items()},
        "goal": GOAL,
        "goal_met": overhead["elapsed"]["median"] - 1 <= GOAL,
        "stamp": stamp.stamp(),
    }


def _show(found: dict) -> None:
    print("| | trainer, ms a step | bare, ms a step | overhead |\n|---|---|---|---|")
    for kind, middle in (("elapsed", ""), ("cpu", "cpu_")):
        trained, bare = found[f"trainer_{middle}milliseconds"], found[f"bare_{middle}milliseconds"]
        print(
            f"| {kind} | {show_spread(trained, '.1f')} | {show_spread(bare, '.1f')} "
            f"| {show_spread(found['overhead'][kind], '+.1%')} |"
        )
    print(
        f"goal {found['goal']:.0%} of elapsed time: {'met' if found['goal_met'] else 'missed'}; up to "
        f"{found['share_of_a_blocks_batches_loaded_before_it']:.0%} of a block's batches were loaded before it; "
        f"load average {found['stamp']['load_average'][0]}"
    )


if __name__ == "__main__":
    main()
