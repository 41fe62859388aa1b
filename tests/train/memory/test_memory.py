"""A rank's memory is predicted before it is allocated, closely enough to refuse what won't fit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dlrm_scale.errors import PlanError
from dlrm_scale.host_memory import HostMemory
from dlrm_scale.layout import ShardLayout, ShardRegion, TableLayout
from dlrm_scale.schema import TableSpec
from dlrm_scale.sharding.memory_estimate import table_memory
from dlrm_scale.train.memory import memory_check
from dlrm_scale.train.memory.batch_memory import looked_up_ids
from dlrm_scale.train.memory.estimate_peak import MemoryEstimate, MemoryItem
from dlrm_scale.train.memory.memory_check import RankMemory, check_memory
from dlrm_scale.train.memory.memory_use import memory_rows
from dlrm_scale.train.memory.process_memory import peak_resident_bytes, resident_bytes
from dlrm_scale.train.run_folder import resolve_run
from dlrm_scale.train.run_result import RunResult
from dlrm_scale.train.stop import StopRequest
from dlrm_scale.train.trainer import train_rank
from dlrm_scale.units import GIB, MIB
from tests.support.datasets import make_dataset
from tests.support.rank_runner import run_ranks
from tests.support.training import SMALL_MODEL

LARGE = 1_500_000


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "dataset"
    split = {"train": [(0, 1800)], "validation": [(1800, 2000)]}
    make_dataset(path, 2000, table_rows=[LARGE, *[50] * 25], split=split)
    return path


def _train(run: str, dataset: str, settings: list[str], free_bytes: int | None = None) -> RunResult:
    if free_bytes is not None:
        memory_check.host_memory = lambda: HostMemory(total_bytes=GIB, free_bytes=free_bytes, limited=True)
    overrides = [f"run.path={run}", f"data.path={dataset}", *SMALL_MODEL, "train.max_steps=6", *settings]
    return train_rank(resolve_run("sample", overrides), StopRequest())


def _wide(dim: int) -> list[str]:
    return [f"model.dim={dim}", f"model.dense_layers=[{dim}]"]


CASES = {
    "row_wise": (2, ["sharding.kind=row_wise", *_wide(64)]),
    "table_wise": (2, ["sharding.kind=table_wise", *_wide(32)]),
    "data_parallel": (2, ["sharding.kind=data_parallel", *_wide(32)]),
    "large batch": (1, ["data.batch_size=1024", "model.over_layers=[2048, 1024, 1]"]),
}
SLOW = {
    "dense": (1, ["model.dense_layers=[4096, 4096, 16]", "dense_optimizer.kind=adam"]),
    "column_wise": (2, ["sharding.kind=column_wise", "sharding.allow_split_row_state=true", *_wide(64)]),
    "data_parallel on 3 ranks, sgd": (3, ["sharding.kind=data_parallel", "sparse_optimizer.kind=sgd", *_wide(64)]),
    "dcnv2": (1, ["model.kind=dcnv2", "model.dcn_low_rank_dim=64", "data.batch_size=512", *_wide(64)]),
    "above the staging limit": (1, ["sharding.kind=table_wise", *_wide(96)]),
}


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)], ids=lambda name: name
)
def test_the_prediction_is_close_to_what_a_fresh_process_takes(case: str, dataset: Path, tmp_path: Path) -> None:
    ranks, settings = (CASES | SLOW)[case]
    results = run_ranks(ranks, _train, str(tmp_path / "run"), str(dataset), settings, fresh=True)
    use: Any = results[0].memory["ranks"]
    assert [rank["rank"] for rank in use] == list(range(ranks))
    for rank in use:
        predicted, peak, held = rank["predicted_bytes"], rank["peak_bytes"], rank["held_bytes"]
        assert 0.8 * peak <= predicted <= 1.25 * peak, rank
        # what the run itself adds, which libraries would hide
        added, expected = peak - held, predicted - held
        assert 0.8 * added - 40 * MIB <= expected <= 1.25 * added + 40 * MIB, rank
    assert results[0].peak_memory_bytes == pytest.approx(max(rank["peak_bytes"] for rank in use), abs=MIB)
    names = [name for name, _ in memory_rows(results[0].memory)]
    assert names == ["predicted memory", "most of it for"]


@pytest.mark.parametrize(("ranks", "kind"), [(1, "table_wise"), (2, "row_wise")])
def test_a_validation_in_batches_far_larger_than_those_of_training_is_counted(
    ranks: int, kind: str, tmp_path: Path
) -> None:
    make_dataset(tmp_path / "data", 24_000, split={"train": [(0, 2000)], "validation": [(2000, 24_000)]})
    settings = [f"sharding.kind={kind}", "train.validation_batch_size=22000", *_wide(64)]
    results = run_ranks(ranks, _train, str(tmp_path / "run"), str(tmp_path / "data"), settings, fresh=True)
    use: Any = results[0].memory["ranks"]
    for rank in use:
        added, expected = rank["peak_bytes"] - rank["held_bytes"], rank["predicted_bytes"] - rank["held_bytes"]
        assert added > 300 * MIB  # a step of 32 rows needs 200
        assert 0.8 * added - 40 * MIB <= expected <= 1.25 * added + 40 * MIB, rank


def test_a_run_that_can_not_fit_is_refused_before_anything_is_allocated(dataset: Path, tmp_path: Path) -> None:
    # the planner is told of more memory than there is, as a wrong sharding.device_memory would
    settings = ["sharding.kind=row_wise", "sharding.device_memory=900000GiB", *_wide(65536)]
    run = tmp_path / "run"
    with pytest.raises(PlanError) as error:
        run_ranks(2, _train, str(run), str(dataset), settings)
    text = str(error.value)
    assert text.startswith("not enough memory: the host of ranks 0 to 1 has ")
    assert "GiB left, and " in text
    for rank in (0, 1):
        assert f"rank {rank}: 18" in text  # half of 1.5 M x 65,536 floats is 183 GiB
    assert "tables 183." in text
    assert "smaller model.dim" in text
    assert "divide the largest table" not in text
    assert not run.exists()


def test_layers_that_can_not_fit_are_refused_before_they_are_built(dataset: Path, tmp_path: Path) -> None:
    settings = ["model.dense_layers=[2000000, 2000000, 16]"]
    with pytest.raises(PlanError, match=r"dense parameters, gradients and state .* GiB") as error:
        run_ranks(1, _train, str(tmp_path / "run"), str(dataset), settings)
    assert "use smaller layers" in str(error.value)
    assert not (tmp_path / "run").exists()


def test_memory_that_is_short_is_only_warned_of_if_asked_for(dataset: Path, tmp_path: Path) -> None:
    settings = ["sharding.kind=row_wise", "train.memory_check=warn"]
    results = run_ranks(2, _train, str(tmp_path / "run"), str(dataset), settings, 10 * MIB, fresh=True)
    for result in results:
        assert result.step == 6
        assert "not enough memory: the host of ranks 0 to 1 has 10.0 MiB left" in result.warnings[0]
    with pytest.raises(PlanError, match=r"10\.0 MiB left"):
        run_ranks(2, _train, str(tmp_path / "other"), str(dataset), settings[:1], 10 * MIB, fresh=True)
    assert not (tmp_path / "other").exists()


def _rank(rank: int, host: int, free: int, device: int = 0, device_free: int | None = None) -> RankMemory:
    items = (
        MemoryItem(name="tables", size_bytes=host),
        MemoryItem(name="activations", size_bytes=device, on_device=True),
    )
    estimate = MemoryEstimate(rank=rank, items=items, held_bytes=5, largest_table="C3", largest_table_type="table_wise")
    return RankMemory(estimate=estimate, host_free_bytes=free, device_free_bytes=device_free)


def _check(views: list[RankMemory], local_ranks: int, policy: Any = "refuse") -> list[str]:
    return check_memory(views, local_ranks, policy)


def test_ranks_of_one_host_share_its_memory() -> None:
    views = [_rank(rank, 4 * GIB, 10 * GIB) for rank in range(4)]
    assert _check(views, local_ranks=2) == []
    with pytest.raises(PlanError, match=r"the host of ranks 0 to 3 has 10\.0 GiB left, and 16\.0 GiB are needed"):
        _check(views, local_ranks=4)
    views[3] = _rank(3, 7 * GIB, 10 * GIB)
    with pytest.raises(PlanError, match="the host of ranks 2 to 3") as error:
        _check(views, local_ranks=2)
    assert "rank 3: 7.0 GiB: tables 7.0 GiB" in str(error.value)
    assert 'sharding.tables.C3 = "row_wise"' in str(error.value)
    assert "rank 0:" not in str(error.value)
    assert len(_check(views, 2, "warn")) == 1


def test_each_gpu_is_compared_with_its_own_memory() -> None:
    views = [_rank(rank, GIB, 10 * GIB, device=30 * GIB, device_free=40 * GIB) for rank in range(2)]
    assert _check(views, local_ranks=2) == []
    views[1] = replace(views[1], device_free_bytes=20 * GIB)
    with pytest.raises(PlanError, match=r"the GPU of rank 1 has 20\.0 GiB left, and 30\.0 GiB are needed"):
        _check(views, local_ranks=2)


def test_exactly_enough_memory_is_enough() -> None:
    assert _check([_rank(0, GIB, GIB)], 1) == []
    with pytest.raises(PlanError):
        _check([_rank(0, GIB + 1, GIB)], 1)


def test_tables_are_counted_where_the_plan_puts_them() -> None:
    spec = TableSpec(name="C1", rows=100, dim=16)
    halves = tuple(
        ShardRegion(table="C1", row_start=50 * r, row_end=50 * (r + 1), column_start=0, column_end=16, rank=r)
        for r in range(2)
    )
    whole = ShardRegion(table="C2", row_start=0, row_end=10, column_start=0, column_end=16, rank=0)
    layout = ShardLayout(
        ranks=2,
        tables=(
            TableLayout(spec=spec, sharding_type="row_wise", regions=halves),
            TableLayout(
                spec=TableSpec(name="C2", rows=10, dim=16),
                sharding_type="data_parallel",
                regions=(whole,),
                replicated=True,
            ),
        ),
    )
    for rank in range(2):
        found = table_memory(layout, rank, "rowwise_adagrad")
        assert (found.weights, found.replicas, found.optimizer_state) == (50 * 64, 10 * 64, 60 * 4)
        assert found.touched_rows == 60
        assert found.largest_table == "C1"


def test_the_rank_that_has_a_table_of_long_bags_whole_receives_the_ids_of_all_ranks() -> None:
    def ids(kind: str, regions: list[tuple[int, int, int]], rank: int) -> float:
        spec = TableSpec(name="C1", rows=100, dim=16)
        table = TableLayout(
            spec=spec,
            sharding_type=kind,
            regions=tuple(
                ShardRegion(table="C1", row_start=start, row_end=end, column_start=0, column_end=16, rank=r)
                for r, start, end in regions
            ),
            replicated=kind == "data_parallel",
        )
        return looked_up_ids(ShardLayout(ranks=4, tables=(table,)), rank, 4, [50.0])

    assert [ids("table_wise", [(2, 0, 100)], rank) for rank in range(4)] == [0, 0, 4 * 50, 0]
    halves = [(0, 0, 50), (1, 50, 100)]
    assert [ids("row_wise", halves, rank) for rank in range(4)] == [2 * 50, 2 * 50, 0, 0]
    assert ids("data_parallel", [(0, 0, 100)], 3) == 50


def test_the_peak_of_a_process_is_at_least_what_it_holds() -> None:
    before = peak_resident_bytes()
    held = torch.ones(8 << 20)
    assert peak_resident_bytes() >= max(before, resident_bytes() - MIB)
    assert resident_bytes() >= held.nbytes
    del held, before
