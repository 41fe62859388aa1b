"""Saves and restores one big table and reports this process's peak memory; run as a script.

python -m tests.checkpoint.memory_probe ROOT MIB save|save-encoded|restore
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed

from dlrm_scale.checkpoint import CheckpointEngine, find_chain, restore
from dlrm_scale.checkpoint.files.codec import decode
from dlrm_scale.checkpoint.files.format import TensorSource
from dlrm_scale.checkpoint.files.quantize import encoded_source, lossy_rows
from dlrm_scale.checkpoint.saving.staging import HostStaging
from dlrm_scale.config import CheckpointConfig
from dlrm_scale.layout import LocalShard, ShardLayout, ShardRegion, TableLayout
from dlrm_scale.schema import TableSpec
from dlrm_scale.touched_rows import TouchedRows


def layout_of(rows: int, ranks: int) -> ShardLayout:
    """One table of 64 columns, row-wise."""
    spec = TableSpec(name="C1", rows=rows, dim=64)
    regions = tuple(
        ShardRegion(
            table="C1",
            row_start=rows * rank // ranks,
            row_end=rows * (rank + 1) // ranks,
            column_start=0,
            column_end=64,
            rank=rank,
        )
        for rank in range(ranks)
    )
    return ShardLayout(ranks=ranks, tables=(TableLayout(spec=spec, sharding_type="row_wise", regions=regions),))


def shard_of(layout: ShardLayout, rank: int) -> LocalShard:
    """A rank's shard, all its pages touched."""
    region = layout.tables[0].regions[rank]
    weight = torch.empty(region.rows, 64).fill_(1.0)
    return LocalShard(region=region, weight=weight, state={"momentum1": torch.ones(region.rows)})


def peak_bytes() -> int:
    """Highest resident memory of this process since it started."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM")


def compile_codecs() -> None:
    """Have numba in memory: its compiler takes some 50 MiB once in a process."""
    for codec, shape in (("int8_rows", (2, 64)), ("bf16", (2,))):
        lossy_rows(codec, torch.ones(shape))
        for block in encoded_source(TensorSource.whole("t", torch.ones(shape)), codec).blocks():
            decode(codec, block)


def save(root: Path, rows: int, *, encoded: bool = False) -> int:
    """A baseline, a delta of half the rows and one of nearly all; returns bytes above the table's."""
    layout = layout_of(rows, 1)
    shard = shard_of(layout, 0)
    touched = TouchedRows([rows])
    touched.enabled = True
    engine = CheckpointEngine(
        root,
        layout=layout,
        shards=[shard],
        touched=touched,
        rank=0,
        ranks=1,
        store=None,
        config=CheckpointConfig(
            baseline_ratio=100, delta_rows="int8" if encoded else "fp32", delta_state="bf16" if encoded else "fp32"
        ),
        optimizer="rowwise_adagrad",
        staging=HostStaging(1 << 24),
    )
    compile_codecs()
    before = peak_bytes()
    for step, share in enumerate((0.0, 0.5, 0.95)):
        touched.mark(0, torch.arange(int(rows * share)))
        engine.save(step=step, cursor={}, dense={}, rank_state={}, extra={})
        assert engine.wait()[-1].committed
    return peak_bytes() - before


def load(root: Path, rows: int) -> int:
    """One of two shards; returns bytes above the shard's."""
    layout = layout_of(rows, 2)
    shard = shard_of(layout, 1)
    compile_codecs()
    before = peak_bytes()
    chain = find_chain(root, verify="full")
    assert chain is not None
    restore(chain, layout=layout, shards=[shard], rank=1, ranks=2, optimizer="rowwise_adagrad")
    return peak_bytes() - before


if __name__ == "__main__":
    torch.set_num_threads(1)
    table_rows = int(sys.argv[2]) * 1024 * 1024 // 256
    root, what = Path(sys.argv[1]), sys.argv[3]
    extra = load(root, table_rows) if what == "restore" else save(root, table_rows, encoded=what == "save-encoded")
    sys.stdout.write(json.dumps({"extra_bytes": extra}) + "\n")
