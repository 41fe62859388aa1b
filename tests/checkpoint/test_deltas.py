"""A baseline and its deltas make the whole table again, whatever was touched between them."""

import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from dlrm_scale.checkpoint import find_chain
from dlrm_scale.checkpoint.files.manifest import Manifest
from tests.checkpoint.simulated_run import SHARDING_TYPES, TABLES, Run, load, make_layout, make_truth


def _run(tmp_path: Path, kind: str = "row_wise", ranks: int = 2, **options: object) -> Run:
    run = Run(tmp_path / "ck", make_layout(kind, ranks), make_truth(TABLES, ["row"]), **options)
    assert run.save(1).kind == "baseline"
    return run


def _tip(tmp_path: Path) -> Manifest:
    chain = find_chain(tmp_path / "ck")
    assert chain is not None
    return chain.tip


def test_an_interval_without_any_touched_row_is_a_valid_delta(tmp_path: Path) -> None:
    run = _run(tmp_path)
    outcome = run.save(2)
    assert (outcome.kind, outcome.committed, outcome.rows) == ("delta", True, 0)
    assert load(tmp_path / "ck", make_layout("table_wise", 3), run.truth).equals(run.truth)


def test_a_row_touched_twice_is_written_once_and_untouched_tables_not_at_all(tmp_path: Path) -> None:
    run = _run(tmp_path)
    run.change("C1", [7, 7, 7, 8], 1.0)
    run.change("C1", [7], 1.0)
    assert run.save(2).rows == 2
    rows = {e.table: e.rows for f in _tip(tmp_path).files for e in f.entries if f.rank == 0}
    assert rows == {"C1": 2, "C2": 0, "C3": 0, "C4": 0}


def test_rows_touched_only_on_rank_1_are_in_the_delta(tmp_path: Path) -> None:
    run = _run(tmp_path)
    run.change("C1", [60, 96], 1.0)
    assert run.save(2).rows == 2
    held = {(f.rank, e.rows) for f in _tip(tmp_path).files for e in f.entries if e.table == "C1"}
    assert held == {(0, 0), (1, 2)}
    assert load(tmp_path / "ck", make_layout("row_wise", 3), run.truth).equals(run.truth)


def test_a_replicated_table_is_written_by_rank_0_alone(tmp_path: Path) -> None:
    run = _run(tmp_path, "data_parallel", 3)
    run.change("C1", [4, 90], 1.0)
    assert run.save(2).rows == 2
    assert [len(f.entries) for f in _tip(tmp_path).files if f.role == "rank"] == [4, 0, 0]
    assert load(tmp_path / "ck", make_layout("row_wise", 2), run.truth).equals(run.truth)


def test_a_shard_touched_in_nine_tenths_of_its_rows_is_written_without_ids(tmp_path: Path) -> None:
    run = _run(tmp_path)
    run.change("C1", range(45), 1.0)
    run.change("C1", range(49, 90), 1.0)
    run.save(2)
    entries = {f.rank: e for f in _tip(tmp_path).files for e in f.entries if e.table == "C1"}
    assert (entries[0].has_ids, entries[0].rows) == (False, 49)
    assert (entries[1].has_ids, entries[1].rows) == (True, 41)
    assert load(tmp_path / "ck", make_layout("table_wise", 1), run.truth).equals(run.truth)


def test_rows_marked_while_a_save_is_in_flight_belong_to_the_next_delta(tmp_path: Path) -> None:
    run = _run(tmp_path, "table_wise", 1)
    run.change("C1", [1], 1.0)
    run.engines[0].save(step=2, cursor={}, dense={}, rank_state={}, extra={})
    run.change("C1", [2], 1.0)
    run.engines[0].save(step=3, cursor={}, dense={}, rank_state={}, extra={})
    first, second = run.engines[0].wait()
    assert (first.rows, second.rows) == (1, 1)
    assert load(tmp_path / "ck", make_layout("table_wise", 1), run.truth).equals(run.truth)


def test_a_delta_holds_the_optimizer_state_of_its_rows(tmp_path: Path) -> None:
    run = _run(tmp_path)
    run.change("C3", [5], 0.0)
    run.save(2)
    entry = next(e for f in _tip(tmp_path).files for e in f.entries if e.table == "C3" and e.rows)
    file = next(f for f in _tip(tmp_path).files if entry in f.entries)
    with safe_open(tmp_path / "ck" / file.name, framework="pt") as opened:
        stored = opened.get_tensor(entry.tensors["momentum1"].name)
        ids = opened.get_tensor(entry.tensors["ids"].name)
    assert ids.tolist() == [5]
    assert torch.equal(stored, run.truth.state["C3"]["momentum1"][5:6])


def test_a_new_baseline_follows_once_deltas_outgrow_the_last_one(tmp_path: Path) -> None:
    run = _run(tmp_path, baseline_ratio=1.0, keep_baselines=5)
    kinds, delta_bytes = [], 0
    baseline_bytes = _tip(tmp_path).size_bytes
    for step in range(2, 12):
        run.change("C1", range(0, 97, 2), 0.5)
        expected = "baseline" if delta_bytes > baseline_bytes else "delta"
        outcome = run.save(step)
        kinds.append(outcome.kind)
        assert outcome.kind == expected
        delta_bytes = 0 if outcome.kind == "baseline" else delta_bytes + outcome.bytes
    assert "baseline" in kinds
    assert load(tmp_path / "ck", make_layout("row_wise", 3), run.truth).equals(run.truth)


def test_data_files_open_with_the_safetensors_library(tmp_path: Path) -> None:
    run = _run(tmp_path)
    for file in _tip(tmp_path).files:
        path = tmp_path / "ck" / file.name
        header_bytes = struct.unpack("<Q", path.read_bytes()[:8])[0]
        assert header_bytes % 8 == 0
        with safe_open(path, framework="pt") as opened:
            names = {t.name for e in file.entries for t in e.tensors.values()} | {t.name for t in file.tensors.values()}
            assert set(opened.keys()) == names
            for entry in file.entries:
                whole = opened.get_tensor(entry.tensors["weight"].name)
                assert torch.equal(whole, run.truth.weight[entry.table][entry.row_start : entry.row_end])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(SHARDING_TYPES),
    ranks=st.integers(1, 4),
    steps=st.lists(
        st.dictionaries(st.sampled_from(["C1", "C2", "C3", "C4"]), st.lists(st.integers(0, 96), max_size=30)),
        max_size=4,
    ),
    staging=st.sampled_from([0, 1 << 20]),
)
def test_baseline_and_deltas_equal_the_full_table_for_any_touches(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    ranks: int,
    steps: list[dict[str, list[int]]],
    staging: int,
) -> None:
    root = tmp_path_factory.mktemp("run") / "ck"
    run = Run(root, make_layout(kind, ranks), make_truth(TABLES, ["element"]), staging_limit_bytes=staging)
    run.save(0)
    rows = {spec.name: spec.rows for spec in TABLES}
    for number, step in enumerate(steps):
        for table, ids in step.items():
            run.change(table, [i % rows[table] for i in ids], 0.5 + number)
        run.save(number + 1)
    assert load(root, make_layout("row_wise", 3), run.truth).equals(run.truth)
