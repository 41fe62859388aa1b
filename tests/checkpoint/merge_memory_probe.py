"""Makes a long chain of big tables, or merges one and reports this process's peak memory; run as a script.

python -m tests.checkpoint.merge_memory_probe ROOT make TABLES MIB DELTAS
python -m tests.checkpoint.merge_memory_probe ROOT delta|baseline LIMIT_MIB
"""

import json
import sys
import time
from pathlib import Path

import torch

from dlrm_scale.checkpoint import CheckpointEngine, find_chain
from dlrm_scale.checkpoint.saving.staging import HostStaging
from dlrm_scale.checkpoint.upkeep.merge_memory import merge_memory_bytes
from dlrm_scale.checkpoint.upkeep.merge_plan import MergeTarget, plan_merge
from dlrm_scale.config import CheckpointConfig
from dlrm_scale.layout import LocalShard, ShardLayout, ShardRegion, TableLayout
from dlrm_scale.schema import TableSpec
from dlrm_scale.touched_rows import TouchedRows
from dlrm_scale.units import MIB
from tests.checkpoint.memory_probe import peak_bytes
from tests.checkpoint.merging import merge

_SHARE = 0.4
"""Of the rows in each delta."""


def make(root: Path, tables: int, table_mib: int, deltas: int) -> None:
    """Tables of 64 columns on one rank: a baseline, and deltas of random rows."""
    rows = table_mib * MIB // 256
    specs = [TableSpec(name=f"C{number}", rows=rows, dim=64) for number in range(1, tables + 1)]
    regions = [
        ShardRegion(table=spec.name, row_start=0, row_end=rows, column_start=0, column_end=64, rank=0) for spec in specs
    ]
    layout = ShardLayout(
        ranks=1,
        tables=tuple(
            TableLayout(spec=spec, sharding_type="table_wise", regions=(region,))
            for spec, region in zip(specs, regions, strict=True)
        ),
    )
    touched = TouchedRows([rows] * tables)
    touched.enabled = True
    shards = [
        LocalShard(region=region, weight=torch.ones(rows, 64), state={"momentum1": torch.ones(rows)})
        for region in regions
    ]
    engine = CheckpointEngine(
        root,
        layout=layout,
        shards=shards,
        touched=touched,
        rank=0,
        ranks=1,
        store=None,
        config=CheckpointConfig(merger=True),
        optimizer="rowwise_adagrad",
        staging=HostStaging(1 << 30),
    )
    generator = torch.Generator().manual_seed(0)
    for step in range(deltas + 1):
        for table in range(tables if step else 0):
            touched.mark(table, torch.randperm(rows, generator=generator)[: int(rows * _SHARE)])
        engine.save(step=step, cursor={}, dense={}, rank_state={}, extra={})
        assert engine.wait()[-1].committed


def measure(root: Path, to: MergeTarget, limit_bytes: int) -> dict[str, float]:
    """Merge, and say what it took."""
    chain = find_chain(root)
    assert chain is not None
    plan = plan_merge(chain.manifests, chain.checkpoint, to)
    assert plan is not None
    before = peak_bytes()
    began = time.process_time()
    merged = merge(root, to, memory_limit_bytes=limit_bytes)
    return {
        "chain_bytes": chain.size_bytes,
        "stated_bytes": merge_memory_bytes(plan.manifests),
        "merges": len(merged),
        "before_bytes": before,
        "extra_bytes": peak_bytes() - before,
        "cpu_seconds": round(time.process_time() - began, 2),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    where, what = Path(sys.argv[1]), sys.argv[2]
    if what == "make":
        make(where, *(int(word) for word in sys.argv[3:6]))
    else:
        sys.stdout.write(json.dumps(measure(where, what, int(sys.argv[3]) * MIB)) + "\n")  # type: ignore[arg-type]
