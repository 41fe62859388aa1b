"""No checkpoint holds a value that isn't finite: the save is refused and names where it is."""

import math
from pathlib import Path

import pytest
import torch

from dlrm_scale.checkpoint import find_chain
from dlrm_scale.checkpoint.files.finite_values import NotFiniteError, finite_blocks
from tests.checkpoint.simulated_run import TABLES, Run, load, make_layout, make_truth


def _place(row: int, column: int) -> str:
    return f"row {row}, column {column}"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [(0, 0), (6, 3), (9, 15)])
def test_a_bad_value_anywhere_in_any_block_is_found_and_placed(value: float, at: tuple[int, int]) -> None:
    whole = torch.randn(10, 16)
    assert torch.equal(torch.cat(list(finite_blocks(whole.split(4), _place))), whole)
    whole[at] = value
    with pytest.raises(NotFiniteError, match=f"row {at[0]}, column {at[1]} is {value}$"):
        list(finite_blocks(whole.split(4), _place))


def test_huge_values_integers_and_empty_tensors_pass() -> None:
    largest = torch.finfo(torch.float32).max
    tensors = [torch.full((4, 4), largest), torch.full((4, 4), -largest), torch.empty(0, 4), torch.tensor([2**62])]
    for tensor in (*tensors, torch.tensor(3.0)):
        assert next(iter(finite_blocks([tensor], _place))) is tensor


def test_one_value_without_a_dimension_is_looked_at_too() -> None:
    with pytest.raises(NotFiniteError, match="row 0, column 0 is nan"):
        list(finite_blocks([torch.tensor(math.nan)], _place))


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise"])
@pytest.mark.parametrize("staging_limit_bytes", [0, 1 << 20])
def test_a_save_with_a_bad_row_is_refused_on_all_ranks_naming_table_row_and_column(
    kind: str, staging_limit_bytes: int, tmp_path: Path
) -> None:
    root = tmp_path / "ck"
    run = Run(root, make_layout(kind, 2), make_truth(TABLES, ["row"]), staging_limit_bytes=staging_limit_bytes)
    assert run.save(1).committed
    good = load(root, make_layout(kind, 2), run.truth)
    run.change("C1", [3, 60], 1.0)
    row = 60
    for shards in run.shards:
        for shard in shards:
            region = shard.region
            holds = region.row_start <= row < region.row_end and region.column_start <= 5 < region.column_end
            if region.table == "C1" and holds:
                shard.weight[row - region.row_start, 5 - region.column_start] = math.nan
    outcomes = run.save_all(2)
    for outcome in outcomes:
        assert not outcome.committed
        assert outcome.not_finite
        assert "table C1: weight of row 60, column 5, is nan" in str(outcome.error)
    chain = find_chain(root, verify="full")
    assert chain is not None
    assert chain.step == 1
    assert load(root, make_layout(kind, 2), run.truth).equals(good)


def test_bad_optimizer_state_and_dense_values_are_refused_by_name(tmp_path: Path) -> None:
    run = Run(tmp_path / "ck", make_layout("row_wise", 2), make_truth(TABLES, ["row"]))
    bad = {"parameter/over.weight": torch.tensor([[0.0, 1.0], [math.inf, 2.0]])}
    outcome = run.save(1, dense=bad)
    assert outcome.not_finite
    assert "rank 0: parameter/over.weight: a value in row 1 is inf" in str(outcome.error)
    next(s for s in run.shards[1] if s.region.table == "C1").state["momentum1"][0] = math.nan
    first_row = next(s for s in run.shards[1] if s.region.table == "C1").region.row_start
    outcome = run.save(2)
    assert f"rank 1: table C1: momentum1 of row {first_row} is nan" in str(outcome.error)
    assert find_chain(tmp_path / "ck") is None


def test_other_failures_are_not_called_so(tmp_path: Path) -> None:
    run = Run(tmp_path / "ck", make_layout("row_wise", 2), make_truth(TABLES, ["row"]))
    (tmp_path / "ck" / "data").rmdir()
    outcome = run.save(1)
    assert not outcome.committed
    assert not outcome.not_finite
