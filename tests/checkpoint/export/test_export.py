"""Exports hold the whole tables, optimizer state and dense part, and appear whole or not at all."""

import os
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file

from dlrm_scale.checkpoint import find_chain
from dlrm_scale.checkpoint.chain.chain import Chain
from dlrm_scale.checkpoint.chain.table_stream import TableStream
from dlrm_scale.checkpoint.export import Contents, export_dcp, export_parquet, export_safetensors
from dlrm_scale.errors import CheckpointError, ConfigError
from tests.checkpoint.simulated_run import TABLES, Run, Truth, make_layout, make_truth

EXPORTS = {"safetensors": export_safetensors, "parquet": export_parquet, "dcp": export_dcp}
DENSE = {
    "over.weight": torch.arange(6, dtype=torch.float32).reshape(3, 2),
    "over.steps": torch.tensor(7, dtype=torch.int64),
    "optimizer.over.bf16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "empty": torch.empty(0, 4),
}


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = TableStream.__init__

    def small(self: TableStream, chain: Chain, table: object, **options: int) -> None:
        whole(self, chain, table, **{"window_bytes": 1000, **options})  # type: ignore[arg-type]

    monkeypatch.setattr(TableStream, "__init__", small)
    monkeypatch.setattr("dlrm_scale.checkpoint.saving.snapshot.BLOCK_BYTES", 512)


def _saved(root: Path, kind: str = "row_wise", **options: object) -> tuple[Chain, Truth]:
    """A baseline and a delta of two ranks, and what they hold."""
    run = Run(root, make_layout(kind, 2), make_truth(TABLES, ["row", "element"]), baseline_ratio=1e9, **options)
    run.save(1, dense=DENSE)
    run.change("C1", [0, 5, 96], 0.5)
    assert run.save(2, dense=DENSE).committed
    chain = find_chain(root)
    assert chain is not None
    assert len(chain.manifests) == 2
    return chain, run.truth


def _expected(truth: Truth) -> dict[str, torch.Tensor]:
    tables = {f"{name}.weight": weight for name, weight in truth.weight.items()}
    state = {f"{table}.{name}": values for table, states in truth.state.items() for name, values in states.items()}
    return tables | state | {f"dense.{name}": values for name, values in DENSE.items()}


def _assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == values.dtype, name
        assert torch.equal(found[name], values), name


@pytest.mark.parametrize("kind", ["row_wise", "data_parallel"])
def test_a_safetensors_file_has_every_tensor_whole(kind: str, tmp_path: Path) -> None:
    chain, truth = _saved(tmp_path / "ck", kind)
    out = tmp_path / "model.safetensors"
    read: list[int] = []
    assert export_safetensors(Contents(chain, read.append), out) == out.stat().st_size
    _assert_equal(load_file(out), _expected(truth))
    with safe_open(out, "pt") as file:
        assert file.metadata() == {
            "checkpoint": "manifests/00000002-s1.json",
            "step": "2",
            "optimizer": "rowwise_adagrad",
            "writer": f"dlrm_scale {chain.tip.versions['dlrm_scale']}",
        }
    assert sum(read) > sum(t.size_bytes for t in Contents(chain).tensors)
    assert sorted(os.listdir(tmp_path)) == ["ck", "model.safetensors"]


def test_state_of_column_shards_is_exported_by_their_columns(tmp_path: Path) -> None:
    chain, truth = _saved(tmp_path / "ck", "column_wise")
    export_safetensors(Contents(chain), tmp_path / "out")
    expected = _expected(truth)
    for table, half in (("C1", 8), ("C2", 4), ("C3", 8), ("C4", 2)):
        state = expected.pop(f"{table}.momentum1")
        expected |= {f"{table}.momentum1[0:{half}]": state, f"{table}.momentum1[{half}:{2 * half}]": state}
    _assert_equal(load_file(tmp_path / "out"), expected)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_torch_loads_the_folder_whole_and_in_part(tmp_path: Path) -> None:
    chain, truth = _saved(tmp_path / "ck")
    size = export_dcp(Contents(chain), tmp_path / "out")
    assert size == sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
    expected = _expected(truth)
    for wanted in (list(expected), ["C1.weight"]):
        state = {name: torch.zeros_like(expected[name]) for name in wanted}
        dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
        _assert_equal(state, {name: expected[name] for name in wanted})
    described = dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    assert described.keys() == expected.keys()
    assert len(described["C1.weight"].chunks) == 14  # 7 rows of 16 weights, 16 moments and one momentum in 1,000 bytes


def test_parquet_has_a_file_a_table_with_ids_weights_and_state(tmp_path: Path) -> None:
    chain, truth = _saved(tmp_path / "ck")
    size = export_parquet(Contents(chain), tmp_path / "out")
    files = sorted((tmp_path / "out").iterdir())
    assert [file.name for file in files] == ["C1.parquet", "C2.parquet", "C3.parquet", "C4.parquet"]
    assert size == sum(file.stat().st_size for file in files)
    for spec in TABLES:
        table = pq.read_table(tmp_path / "out" / f"{spec.name}.parquet")
        assert table.column_names == ["id", "weight", "moment2", "momentum1"]
        assert table["id"].to_pylist() == list(range(spec.rows))
        for name in ("weight", "moment2"):
            assert str(table.schema.field(name).type).startswith("fixed_size_list<")
            values = torch.tensor(table[name].to_pylist())
            whole = truth.weight[spec.name] if name == "weight" else truth.state[spec.name][name]
            assert torch.equal(values, whole)
        assert torch.equal(torch.tensor(table["momentum1"].to_pylist()), truth.state[spec.name]["momentum1"])
        assert table.schema.metadata[b"step"] == b"2"
    assert pq.ParquetFile(tmp_path / "out" / "C1.parquet").num_row_groups == 14


@pytest.mark.parametrize("kind", EXPORTS)
def test_an_export_replaces_nothing(kind: str, tmp_path: Path) -> None:
    chain, _ = _saved(tmp_path / "ck")
    out = tmp_path / "out"
    out.write_text("mine")
    with pytest.raises(ConfigError, match="out exists already"):
        EXPORTS[kind](Contents(chain), out)
    assert out.read_text() == "mine"
    with pytest.raises(ConfigError, match="nowhere doesn't exist"):
        EXPORTS[kind](Contents(chain), tmp_path / "nowhere" / "out")
    assert sorted(os.listdir(tmp_path)) == ["ck", "out"]


@pytest.mark.parametrize("kind", EXPORTS)
def test_what_takes_the_name_meanwhile_stays(kind: str, tmp_path: Path) -> None:
    chain, _ = _saved(tmp_path / "ck")
    out = tmp_path / "out"

    def rival(size_bytes: int) -> None:
        out.write_text("mine")

    with pytest.raises(CheckpointError, match="out can't be written"):
        EXPORTS[kind](Contents(chain, rival), out)
    assert out.read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["ck", "out"]


def _damaged(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> str:
    file = next(file for file in chain.manifests[0].files if file.rank == 1)
    entry = next(entry for entry in file.entries if entry.table == "C3")
    path = Path(chain.storage.address) / file.name
    data = bytearray(path.read_bytes())
    data[entry.tensors["weight"].offset_bytes] ^= 1
    path.write_bytes(data)
    return f"{file.name}.* damaged"


def _full(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> str:
    class Usage:
        free = 100

    monkeypatch.setattr("dlrm_scale.checkpoint.export.new_output.shutil.disk_usage", lambda path: Usage)
    return r"out needs \d+\.\d KiB, and .* has 100 B free"


@pytest.mark.parametrize("fault", [_damaged, _full])
@pytest.mark.parametrize("kind", EXPORTS)
def test_an_export_that_fails_leaves_nothing(
    kind: str, fault: Callable[[Chain, pytest.MonkeyPatch], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, _ = _saved(tmp_path / "ck")
    message = fault(chain, monkeypatch)
    with pytest.raises(CheckpointError, match=message):
        EXPORTS[kind](Contents(chain), tmp_path / "out")
    assert os.listdir(tmp_path) == ["ck"]


def test_names_that_would_meet_are_refused(tmp_path: Path) -> None:
    chain, _ = _saved(tmp_path / "ck")
    tables = [t.model_copy(update={"name": "dense"}) if t.name == "C1" else t for t in chain.tip.tables]
    files = [
        file.model_copy(update={"tensors": {"weight": file.tensors["over.weight"]}}) if file.role == "dense" else file
        for file in chain.tip.files
    ]
    tip = chain.tip.model_copy(update={"tables": tuple(tables), "files": tuple(files)})
    clashing = Chain(storage=chain.storage, manifests=(chain.manifests[0], tip), tip_sha256=chain.tip_sha256)
    with pytest.raises(CheckpointError, match=r"two tensors of .* would be exported as dense\.weight"):
        export_safetensors(Contents(clashing), tmp_path / "out")
