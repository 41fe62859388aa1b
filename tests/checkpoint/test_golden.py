"""Checkpoints that earlier versions of the format wrote stay readable.

`golden/v1` (1.0) and `golden/v1.1` (an encoded delta) were written once by `python -m tests.checkpoint.test_golden
FOLDER`; they are never written again. A later minor version adds a folder of its own.
"""

import sys
from pathlib import Path

import torch

from dlrm_scale.checkpoint import find_chain, restore, verify
from dlrm_scale.schema import TableSpec
from tests.checkpoint.simulated_run import Run, Truth, load_chain, make_layout, shards_of

GOLDEN = Path(__file__).parent / "golden" / "v1"
GOLDEN_ENCODED = Path(__file__).parent / "golden" / "v1.1"
TABLES = (TableSpec(name="C1", rows=6, dim=4), TableSpec(name="C2", rows=1, dim=8, pooling="mean"))


def _counting(step: int) -> Truth:
    truth = Truth()
    for spec in TABLES:
        truth.weight[spec.name] = torch.arange(spec.rows * spec.dim, dtype=torch.float32).reshape(spec.rows, spec.dim)
        truth.state[spec.name] = {"momentum1": torch.arange(spec.rows, dtype=torch.float32) / 4}
    if step == 2:
        truth.weight["C1"][[1, 4]] += 0.5
        truth.state["C1"]["momentum1"][[1, 4]] += 0.5 + len("momentum1")
    return truth


def _write(root: Path) -> None:
    run = Run(root, make_layout("row_wise", 2, TABLES), _counting(1), delta_rows="int8", delta_state="bf16")
    assert run.save(1, rows_consumed=10).committed
    run.change("C1", [1, 4], 0.5)
    run.change("C1", [5], 1e-40)
    run.truth.weight["C1"][3] = torch.tensor([1e30, 1.0, -1.0, 0.5])
    run.change("C1", [3], 0.0)
    assert run.save(2, rows_consumed=20).committed


def test_a_checkpoint_of_format_1_0_restores() -> None:
    chain = find_chain(GOLDEN, verify="full")
    assert chain is not None
    assert [(m.kind, m.step, m.seq, m.minor) for m in chain.manifests] == [("baseline", 1, 1, 0), ("delta", 2, 2, 0)]
    assert verify(GOLDEN) == []
    for layout in (make_layout("table_wise", 1, TABLES), make_layout("row_wise", 3, TABLES)):
        loaded = load_chain(chain, layout, _counting(2), optimizer="rowwise_adagrad")
        assert loaded.equals(_counting(2))
    restored = restore(
        chain,
        layout=make_layout("row_wise", 2, TABLES),
        shards=shards_of(make_layout("row_wise", 2, TABLES), _counting(2), 1, blank=True),
        rank=1,
        ranks=2,
        optimizer="rowwise_adagrad",
    )
    assert (restored.step, restored.rows_consumed, restored.cursor, restored.extra) == (
        2,
        20,
        {"step": 2},
        {"note": "x"},
    )
    assert torch.equal(restored.dense["over.weight"], torch.full((3, 2), 2.0))
    assert restored.rank_state is not None
    assert restored.rank_state["rng"].tolist() == [1, 2]


def test_an_encoded_delta_of_format_1_1_restores() -> None:
    chain = find_chain(GOLDEN_ENCODED, verify="full")
    assert chain is not None
    assert [(m.kind, m.minor, m.lossy) for m in chain.manifests] == [("baseline", 1, False), ("delta", 1, True)]
    assert verify(GOLDEN_ENCODED) == []
    weight = _counting(2).weight["C1"]
    weight[3] = torch.tensor([1e30, 1.0, -1.0, 0.5])
    for layout in (make_layout("table_wise", 1, TABLES), make_layout("row_wise", 3, TABLES)):
        loaded = load_chain(chain, layout, _counting(2), optimizer="rowwise_adagrad")
        assert torch.equal(loaded.weight["C1"][[0, 2, 3]], weight[[0, 2, 3]])
        # a row's steps of 3 / 255 hit all of its values
        assert torch.allclose(loaded.weight["C1"], weight, rtol=1e-6, atol=0)
        assert torch.allclose(loaded.state["C1"]["momentum1"][[1, 4]], torch.tensor([9.75, 10.5]), rtol=1 / 256, atol=0)
        assert torch.equal(loaded.weight["C2"], _counting(2).weight["C2"])


if __name__ == "__main__":
    _write(Path(sys.argv[1]))
