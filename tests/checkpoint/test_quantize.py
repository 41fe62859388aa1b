"""Encoded values stay within the bound of their codec, and rows that can't are found."""

import json
from pathlib import Path

import fbgemm_gpu  # noqa: F401  loads its operators
import pytest
import torch
from typer.testing import CliRunner

from dlrm_scale.checkpoint import Chain, find_chain
from dlrm_scale.checkpoint.chain.lossy import lossy_restores_after, stored_codecs
from dlrm_scale.checkpoint.files.codec import decode, decode_into
from dlrm_scale.checkpoint.files.entry_reader import EntryReader
from dlrm_scale.checkpoint.files.format import TensorSource
from dlrm_scale.checkpoint.files.manifest import EntryRecord, Manifest
from dlrm_scale.checkpoint.files.manifest_check import check_manifest
from dlrm_scale.checkpoint.files.quantize import LARGEST_ERROR_SHARE, encoded_source, lossy_rows
from dlrm_scale.cli.checkpoint import app
from dlrm_scale.errors import CheckpointError
from dlrm_scale.schema import TableSpec
from tests.checkpoint.simulated_run import SHARDING_TYPES, TABLES, Run, load, load_chain, make_layout, make_truth

OPTIMIZER = "rowwise_adagrad"
COLUMNS = 64


def _normal(scale: float, rows: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(seed)) * scale


def _through(codec: str, values: torch.Tensor) -> tuple[torch.Tensor, TensorSource]:
    """Values encoded in two blocks and decoded again."""
    cut = len(values) // 2
    raw = TensorSource(
        name="t", dtype=values.dtype, shape=tuple(values.shape), blocks=lambda: [values[:cut], values[cut:]]
    )
    source = encoded_source(raw, codec)
    stored = torch.cat(list(source.blocks()))
    assert (tuple(stored.shape), stored.dtype) == (source.shape, source.dtype)
    return decode(codec, stored), source


@pytest.mark.parametrize("scale", [1e30, 1.0, 0.05, 1e-30], ids=str)
def test_an_int8_value_is_off_by_half_a_step_at_most(scale: float) -> None:
    values = _normal(scale)
    assert not lossy_rows("int8_rows", values).any()
    found, source = _through("int8_rows", values)
    low, high = values.aminmax(dim=1)
    half_steps = (high.double() - low.double()) / 510
    errors = (found.double() - values.double()).abs()
    rounding = values.abs().amax(1).double() * 2**-22
    assert (errors.amax(1) <= half_steps + rounding).all()
    assert source.measured is not None
    measured = source.measured()
    assert measured.max_absolute == pytest.approx(errors.max().item(), rel=1e-6)
    assert measured.mean_absolute == pytest.approx(errors.mean().item(), rel=1e-4)
    assert measured.max_absolute > 0


def test_the_stored_bytes_are_fbgemms_fused_rows() -> None:
    values = _normal(0.05)
    stored = torch.cat(list(encoded_source(TensorSource.whole("t", values), "int8_rows").blocks()))
    theirs = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(values)
    assert stored.shape == theirs.shape
    # A tie may be rounded the other way, and their step is 1e-8 wider.
    assert (stored[:, :COLUMNS].int() - theirs[:, :COLUMNS].int()).abs().max() <= 1
    assert torch.equal(stored[:, COLUMNS:], theirs[:, COLUMNS:])
    read = torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(stored)
    assert torch.allclose(read, decode("int8_rows", stored), rtol=0, atol=2e-8)


def test_a_constant_row_is_exact_whatever_its_value() -> None:
    constants = torch.tensor([0.0, -0.0, 1e30, -1e30, 1e-30, 1e-45, 3.4e38, 0.1])
    values = constants[:, None].expand(-1, COLUMNS).contiguous()
    assert not lossy_rows("int8_rows", values).any()
    found, source = _through("int8_rows", values)
    assert torch.equal(found, values)
    assert source.measured is not None
    assert source.measured().max_absolute == 0


def test_rows_that_int8_would_spoil_are_found_and_others_are_not() -> None:
    values = _normal(0.05, rows=12)
    values[1, 0] = 1e30  # drowns the others
    values[2] *= 1e-38  # its step is a denormal number
    values[3] = torch.linspace(1e-42, 1e-41, COLUMNS)  # denormal numbers
    values[4, :2] = torch.tensor([3e38, -3e38])  # its range is infinite
    values[5, 9] = float("nan")
    values[6, 9] = float("-inf")
    values[7, 9] = float("inf")
    values[8] = 0.0
    values[8, 3] = 1.0  # the others are kept, as their bias, but no bound says so
    expected = [False, True, True, True, True, True, True, True, True, False, False, False]
    assert lossy_rows("int8_rows", values).tolist() == expected


def test_the_largest_share_is_the_one_that_is_stated() -> None:
    for columns in (4, 16, 128):
        for outlier, expected in ((-30.5, False), (-31.5, True)):
            values = torch.ones(1, columns)
            values[0, 1] = outlier
            assert ((1 - outlier) / 510 > LARGEST_ERROR_SHARE * values.abs().median().item()) is expected
            assert lossy_rows("int8_rows", values).tolist() == [expected]


@pytest.mark.parametrize("shape", [(1000,), (50, COLUMNS)], ids=str)
def test_bf16_keeps_every_state_value_above_zero_within_a_256th(shape: tuple[int, ...]) -> None:
    exponents = torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 75 - 37.5
    values = (10**exponents).float()
    assert not lossy_rows("bf16", values).any()
    found, source = _through("bf16", values)
    assert torch.equal(found, values.bfloat16().float())
    assert (found > 0).all()
    errors = (found.double() - values.double()).abs()
    assert (errors <= values.double() / 256).all()
    assert source.measured is not None
    assert source.measured().max_absolute == pytest.approx(errors.max().item(), rel=1e-6)


def test_state_that_bf16_would_make_zero_or_infinite_is_found() -> None:
    values = torch.tensor([0.0, 1e-45, 1e-39, 1.2e-38, 1.0, 3.38e38, 3.4e38, float("inf"), float("nan"), -1e-40])
    assert lossy_rows("bf16", values).tolist() == [False, True, True, False, False, False, True, True, True, True]
    rows = values[:, None].repeat(1, 4)
    assert torch.equal(lossy_rows("bf16", rows), lossy_rows("bf16", values))


def test_decoding_into_given_memory_gives_the_same_bits() -> None:
    stored = torch.cat(list(encoded_source(TensorSource.whole("t", _normal(3.0)), "int8_rows").blocks()))
    wide = torch.zeros(50, 2 * COLUMNS)
    assert torch.equal(decode_into("int8_rows", stored, wide[:, :COLUMNS]), decode("int8_rows", stored))
    assert not wide[:, COLUMNS:].any()


def _saved(root: Path, kind: str = "row_wise", ranks: int = 2, **options: object) -> tuple[Run, Chain]:
    """A baseline and a delta with rows that int8 would spoil."""
    run = Run(root, make_layout(kind, ranks), make_truth(TABLES, ["row"]), delta_rows="int8", **options)
    run.save(1)
    run.change("C1", range(10, 70), 0.5)
    run.truth.weight["C1"][20, 3] = 1e30
    run.truth.state["C1"]["momentum1"][30] = 1e-40
    run.change("C1", [20, 30], 0.0)
    run.truth.state["C1"]["momentum1"][30] = 1e-40
    for shards in run.shards:
        for shard in shards:
            region = shard.region
            if region.table == "C1" and region.row_start <= 30 < region.row_end:
                shard.state["momentum1"][30 - region.row_start] = 1e-40
    run.change("C3", range(40), 0.125)
    assert run.save(2).kind == "delta"
    chain = find_chain(root, verify="full")
    assert chain is not None
    return run, chain


def _entries(chain: Chain, table: str) -> list[EntryRecord]:
    return [entry for file in chain.tip.files for entry in file.entries if entry.table == table]


@pytest.mark.parametrize("staging_limit_bytes", [1 << 20, 0])
@pytest.mark.parametrize("kind", [kind for kind in SHARDING_TYPES if kind not in ("column_wise", "grid_shard")])
def test_an_encoded_delta_restores_within_its_error_and_spoilt_rows_exactly(
    tmp_path: Path, kind: str, staging_limit_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlrm_scale.checkpoint.saving.snapshot.BLOCK_BYTES", 1024)  # blocks of 16 rows
    run, chain = _saved(tmp_path / "ck", kind, 3, delta_state="bf16", staging_limit_bytes=staging_limit_bytes)
    assert stored_codecs(chain.manifests) == ["bf16", "int8_rows"]
    found = {
        ranks: load_chain(chain, make_layout("row_wise", ranks), run.truth, optimizer=OPTIMIZER) for ranks in (1, 4)
    }
    assert found[1].equals(found[4])
    for table in ("C1", "C2", "C3", "C4"):
        recorded = [e.tensors["weight"].error for e in _entries(chain, table)]
        largest = max((error.max_absolute for error in recorded if error is not None), default=0.0)
        wrong = (found[1].weight[table].double() - run.truth.weight[table].double()).abs()
        assert wrong.max() == pytest.approx(largest, rel=1e-6)
    weight, momentum = run.truth.weight["C1"], run.truth.state["C1"]["momentum1"]
    assert torch.equal(found[1].weight["C1"][[20, 30]], weight[[20, 30]])
    assert torch.equal(found[1].state["C1"]["momentum1"][[20, 30]], momentum[[20, 30]])
    assert torch.equal(found[1].weight["C1"][:10], weight[:10])
    changed = found[1].state["C1"]["momentum1"][10:70]
    assert torch.allclose(changed, momentum[10:70], rtol=1 / 256, atol=0)
    assert (changed > 0).all()
    assert not torch.equal(changed, momentum[10:70])


def test_a_delta_without_spoilt_rows_has_one_entry_a_shard_and_keeps_fp32_state_if_asked(tmp_path: Path) -> None:
    run, chain = _saved(tmp_path / "ck")
    assert [entry.has_ids for entry in _entries(chain, "C3")] == [False, False]
    assert {entry.tensors["momentum1"].codec for entry in _entries(chain, "C3")} == {"none"}
    # 1e-40 loses nothing as fp32: only the row with 1e30 is kept apart
    apart = [entry for entry in _entries(chain, "C1") if entry.tensors["weight"].codec == "none"]
    assert [entry.rows for entry in apart] == [1]
    found = load_chain(chain, make_layout("table_wise", 1), run.truth, optimizer=OPTIMIZER)
    assert torch.equal(found.state["C1"]["momentum1"], run.truth.state["C1"]["momentum1"])
    assert stored_codecs(chain.manifests[:1]) == []
    assert [m.lossy for m in chain.manifests] == [False, True]


def test_the_reader_gives_stored_blocks_with_their_ids_and_decoded_ones(tmp_path: Path) -> None:
    run, chain = _saved(tmp_path / "ck", "table_wise", 1)
    (file,) = [f for f in chain.tip.files if f.role == "rank"]
    rows: dict[int, torch.Tensor] = {}
    with chain.storage.open(file.name) as opened:
        for entry in _entries(chain, "C1"):
            reader = EntryReader(opened, entry)
            for index in range(reader.blocks):
                ids = reader.ids(index)
                assert ids is not None
                stored = reader.encoded("weight", index).clone()
                values = reader.decoded("weight", index)
                assert torch.equal(decode(entry.tensors["weight"].codec, stored), values)
                rows |= dict(zip(ids.tolist(), values.clone(), strict=True))
    assert sorted(rows) == list(range(10, 70))
    assert torch.equal(rows[20], run.truth.weight["C1"][20])


def test_an_int8_delta_of_a_17th_of_the_rows_has_a_45th_of_a_baselines_bytes(tmp_path: Path) -> None:
    tables = (TableSpec(name="C1", rows=17_000, dim=64),)
    sizes = {}
    for rows in ("fp32", "int8"):
        run = Run(tmp_path / rows, make_layout("row_wise", 2, tables), make_truth(tables, ["row"]), delta_rows=rows)
        baseline = run.save(1)
        run.change("C1", range(0, 17_000, 17), 0.5)
        sizes[rows] = run.save(2).bytes / baseline.bytes
    assert sizes["fp32"] > 1 / 17
    assert sizes["int8"] <= 1 / 45


def test_a_value_that_is_not_finite_is_refused_in_an_encoded_delta_too(tmp_path: Path) -> None:
    run = Run(tmp_path / "ck", make_layout("row_wise", 2), make_truth(TABLES, ["row"]), delta_rows="int8")
    run.save(1)
    run.change("C1", [5], float("nan"))
    outcome = run.save(2)
    assert outcome.not_finite
    assert outcome.error is not None
    assert "table C1: weight of row 5, column 0, is nan" in outcome.error


def test_damage_to_encoded_rows_is_found_and_named(tmp_path: Path) -> None:
    run, chain = _saved(tmp_path / "ck")
    (name, tensor) = next(
        (f.name, e.tensors["weight"]) for f in chain.tip.files for e in f.entries if e.tensors["weight"].error
    )
    path = tmp_path / "ck" / name
    data = bytearray(path.read_bytes())
    data[tensor.offset_bytes + 70] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{name}.*damaged"):
        load_chain(chain, make_layout("table_wise", 1), run.truth, optimizer=OPTIMIZER)


def test_lossy_restores_are_counted_and_carried_on(tmp_path: Path) -> None:
    root, layout, truth = tmp_path / "ck", make_layout("row_wise", 2), make_truth(TABLES, ["row"])
    chain: Chain | None = None
    counts = []
    # the third start writes in fp32: what the second rounded is restored once more, and counts no more after that
    for start, rows in enumerate(("int8", "int8", "fp32", "fp32", "int8", "int8")):
        restores = 0 if chain is None else lossy_restores_after(chain.manifests)
        counts.append(restores)
        if chain is not None:
            truth = load(root, layout, truth)
        run = Run(root, layout, truth, resumed_from=chain, lossy_restores=restores, delta_rows=rows, baseline_ratio=100)
        for step in (1, 2):
            run.change("C1", [start, 40 + step], 0.5)
            assert run.save(10 * start + step).committed
        chain = find_chain(root)
        assert chain is not None
        assert chain.tip.lossy_restores == restores
    assert counts == [0, 1, 2, 2, 2, 3]


def test_from_the_expected_restores_on_rows_are_written_in_fp32(tmp_path: Path) -> None:
    layout, truth = make_layout("row_wise", 2), make_truth(TABLES, ["row"])
    for so_far, codecs in ((2, ["int8_rows"]), (3, [])):
        run = Run(tmp_path / str(so_far), layout, truth, delta_rows="int8", expected_restores=3, lossy_restores=so_far)
        run.save(1)
        run.change("C1", [1], 0.5)
        run.save(2)
        chain = find_chain(tmp_path / str(so_far))
        assert chain is not None
        assert stored_codecs(chain.manifests) == codecs


def test_a_codec_of_a_newer_version_is_refused_by_its_name(tmp_path: Path) -> None:
    _, chain = _saved(tmp_path / "ck", "table_wise", 1)
    (file,) = [f for f in chain.tip.files if f.role == "rank"]
    entry = file.entries[0]
    weight = entry.tensors["weight"]

    def with_weight(**changes: object) -> object:
        changed = entry.model_copy(update={"tensors": {**entry.tensors, "weight": weight.model_copy(update=changes)}})
        entries = (changed, *file.entries[1:])
        files = [f.model_copy(update={"entries": entries}) if f is file else f for f in chain.tip.files]
        return chain.tip.model_copy(update={"files": tuple(files), "minor": 2})

    with pytest.raises(CheckpointError, match=r"C1.*weight has the codec int4_rows, which format 1.1 hasn't"):
        check_manifest(with_weight(codec="int4_rows"))
    with pytest.raises(CheckpointError, match=r"weight is U8 \(\d+, 24\)"):
        check_manifest(with_weight(codec="bf16"))
    with pytest.raises(CheckpointError, match="encoded tensors in a lossless delta"):
        check_manifest(chain.tip.model_copy(update={"lossy": False}))


def test_rows_of_one_range_are_listed_twice_only_if_encoded_in_two_ways_and_by_ids(tmp_path: Path) -> None:
    _, chain = _saved(tmp_path / "ck", "table_wise", 1)
    (file,) = [f for f in chain.tip.files if f.role == "rank"]
    encoded, exact = [entry for entry in file.entries if entry.table == "C1"]
    others = tuple(entry for entry in file.entries if entry.table != "C1")

    def with_entries(*entries: EntryRecord) -> Manifest:
        changed = file.model_copy(update={"entries": (*entries, *others)})
        files = tuple(changed if f is file else f for f in chain.tip.files)
        return chain.tip.model_copy(update={"files": files})

    check_manifest(with_entries(encoded, exact))
    check_manifest(with_entries(exact, encoded))
    with pytest.raises(CheckpointError, match="C1: rows 0 to 97 of columns 0 to 16 are there twice"):
        check_manifest(with_entries(encoded, exact, exact))
    with pytest.raises(CheckpointError, match="C1: rows 0 to 97 of columns 0 to 16 are there twice"):
        check_manifest(with_entries(encoded, _more_rows(exact, 97 - encoded.rows + 1)))
    with pytest.raises(CheckpointError, match="C1: rows by ids in a baseline, which has all"):
        check_manifest(_exact_baseline(with_entries(exact)))


def _more_rows(entry: EntryRecord, rows: int) -> EntryRecord:
    tensors = {
        name: t.model_copy(
            update={"shape": (rows, *t.shape[1:]), "size_bytes": t.size_bytes // entry.rows * rows, "offset_bytes": 0}
        )
        for name, t in entry.tensors.items()
    }
    return entry.model_copy(update={"rows": rows, "tensors": tensors})


def _exact_baseline(manifest: Manifest) -> Manifest:
    """The entries of C1 alone, as a baseline."""
    files = tuple(
        f.model_copy(update={"entries": tuple(e for e in f.entries if e.table == "C1")}) for f in manifest.files
    )
    tables = tuple(table for table in manifest.tables if table.name == "C1")
    return manifest.model_copy(update={"files": files, "tables": tables, "kind": "baseline", "lossy": False})


def test_show_tells_what_each_table_has_lost(tmp_path: Path) -> None:
    _, chain = _saved(tmp_path / "ck", delta_state="bf16")
    runner = CliRunner()
    shown = json.loads(runner.invoke(app, ["show", str(tmp_path / "ck"), "2", "--json"]).output)
    tables = {table["name"]: table["encoded"] for table in shown["tables"]}
    weight = tables["C1"]["weight"]
    assert (weight["codec"], weight["rows"], weight["exact_rows"]) == ("int8_rows", 58, 2)
    errors = [e.tensors["weight"].error for e in _entries(chain, "C1")]
    assert weight["max_error"] == max(error.max_absolute for error in errors if error is not None)
    assert 0 < weight["mean_error"] < weight["max_error"]
    assert tables["C1"]["momentum1"]["codec"] == "bf16"
    assert (shown["lossy"], shown["lossy_restores"]) == (True, 0)
    baseline = json.loads(runner.invoke(app, ["show", str(tmp_path / "ck"), "1", "--json"]).output)
    assert [table["encoded"] for table in baseline["tables"]] == [{}, {}, {}, {}]
    words = runner.invoke(app, ["show", str(tmp_path / "ck"), "2"], env={"COLUMNS": "300"}).output
    assert "weight int8_rows:" in words
    assert "2 rows exact" in words
