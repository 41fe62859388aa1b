"""A thousand deltas, merged as they come: the right rows, out of few files."""

from pathlib import Path

import pytest
import torch

from dlrm_scale.checkpoint import find_chain
from dlrm_scale.checkpoint.files.manifest_files import list_manifests
from dlrm_scale.checkpoint.storage.local_storage import LocalStorage
from dlrm_scale.checkpoint.upkeep.merge_plan import MOST_DELTAS
from dlrm_scale.checkpoint.upkeep.retention import remove_old_chains
from dlrm_scale.schema import TableSpec
from tests.checkpoint.merging import merge
from tests.checkpoint.simulated_run import Run, load, make_layout, make_truth

TABLES = (TableSpec(name="C1", rows=200_000, dim=16), TableSpec(name="C2", rows=3, dim=8))
DELTAS = 1_000


@pytest.mark.slow
def test_a_thousand_deltas_with_merges_restore_like_a_baseline_and_a_few(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    layout = make_layout("table_wise", 1, TABLES)
    run = Run(root, layout, make_truth(TABLES, ["row"]), merger=True, staging_limit_bytes=1 << 26)
    weight, state = run.shards[0][0].weight, run.shards[0][0].state["momentum1"]
    assert run.save(0).kind == "baseline"
    written_bytes = 0
    for step in range(1, DELTAS + 1):
        # Rows by a stride, as ids of a batch would fall; `Run.change` copies whole tables each time.
        ids = (step * 7919 + 131 * torch.arange(100)) % TABLES[0].rows
        weight[ids] += step
        state[ids] += 1.0
        run.touched[0].mark(0, ids)
        outcome = run.save(step)
        assert outcome.kind == "delta"
        written_bytes += outcome.bytes
        if step % 24 == 0:
            written_bytes += sum(one.manifest.size_bytes for one in merge(root, "auto"))
            remove_old_chains(LocalStorage(root), tip_name=outcome.manifest, keep_baselines=2)
    truth = run.truth
    truth.weight["C1"].copy_(weight)
    truth.state["C1"]["momentum1"].copy_(state)
    chain = find_chain(root, verify="full")
    assert chain is not None
    assert (chain.step, chain.skipped, chain.detours) == (DELTAS, (), ())
    assert load(root, make_layout("row_wise", 2, TABLES), truth).equals(truth)
    # What a restore reads: within what a baseline and 12 deltas would be.
    files = sum(len(manifest.files) for manifest in chain.manifests)
    assert 1 < len(chain.manifests) <= 1 + MOST_DELTAS + 12
    assert files == 2 * len(chain.manifests)
    assert chain.size_bytes <= 2 * chain.baseline_bytes + 2**20
    # What lies there for two chains that share no file, and what was written for it.
    assert len(list_manifests(LocalStorage(root))) < 150
    assert written_bytes < 100 * chain.baseline_bytes
