"""Two separate runs of one config have the same losses and the same tables, bit for bit."""

from pathlib import Path

import pytest
import torch

from dlrm_scale.train.deterministic import deterministic_algorithms
from dlrm_scale.train.loop import TrainingLoop
from dlrm_scale.train.run_folder import resolve_run
from dlrm_scale.train.stop import StopRequest
from dlrm_scale.train.trainer import train_rank
from tests.support.datasets import make_dataset
from tests.support.rank_runner import run_ranks
from tests.support.training import SMALL_MODEL, losses, read_tables, same_tables

TYPES = (
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
    "data_parallel",
)
SPLIT_COLUMNS = {"column_wise", "table_column_wise", "grid_shard"}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "dataset"
    # bags of up to 12 ids out of 10 rows: ids repeat within a bag and over a batch
    make_dataset(path, 700, table_rows=[10, 3, *[40] * 24], multi_hot={"C1": 12, "C3": 5})
    return path


def _train(run: str, dataset: str, settings: list[str]) -> bool:
    """Train, and return whether the first step ran with torch's switch on."""
    seen: list[bool] = []
    note = TrainingLoop._note

    def watched(self: TrainingLoop, *arguments: object) -> None:
        seen.append(torch.are_deterministic_algorithms_enabled())
        note(self, *arguments)

    TrainingLoop._note = watched
    try:
        overrides = [f"run.path={run}", f"data.path={dataset}", *SMALL_MODEL, "data.batch_size=64", *settings]
        train_rank(resolve_run("sample", overrides), StopRequest())
    finally:
        TrainingLoop._note = note
    assert len(set(seen)) == 1
    return seen[0]


def _runs_agree(ranks: int, dataset: Path, tmp_path: Path, kind: str, *settings: str, switch: bool = True) -> None:
    given = [f"sharding.kind={kind}", "sharding.allow_split_row_state=true", *settings]
    given.append(f"train.deterministic={str(switch).lower()}")
    runs = [tmp_path / f"{kind}-{n}" for n in range(2)]
    for number, run in enumerate(runs):
        # one in processes of its own: nothing that the other left in memory can make them agree
        enabled = run_ranks(ranks, _train, str(run), str(dataset), given, fresh=number == 1)
        assert enabled == [switch] * ranks
    assert losses(runs[0]) == losses(runs[1])
    assert len(losses(runs[0])) == 11
    first, second = (read_tables(run, split_state=kind in SPLIT_COLUMNS) for run in runs)
    assert same_tables(first, second)


def test_a_deterministic_run_repeats_in_other_processes(dataset: Path, tmp_path: Path) -> None:
    _runs_agree(2, dataset, tmp_path, "data_parallel")


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("switch", [True, False])
def test_every_sharding_type_repeats_on_three_ranks_with_two_threads(
    kind: str, switch: bool, dataset: Path, tmp_path: Path
) -> None:
    _runs_agree(3, dataset, tmp_path, kind, "train.threads_per_rank=2", switch=switch)


def test_a_run_on_cpu_repeats_by_default_and_equals_the_deterministic_one(dataset: Path, tmp_path: Path) -> None:
    _runs_agree(2, dataset, tmp_path, "row_wise", switch=False)
    run = tmp_path / "switched"
    settings = ["sharding.kind=row_wise", "sharding.allow_split_row_state=true", "train.deterministic=true"]
    run_ranks(2, _train, str(run), str(dataset), settings)
    assert losses(run) == losses(tmp_path / "row_wise-0")
    assert same_tables(read_tables(run), read_tables(tmp_path / "row_wise-0"))


def test_the_switch_goes_back_after_the_run_and_leaves_new_memory_alone() -> None:
    fill = torch.utils.deterministic.fill_uninitialized_memory
    with deterministic_algorithms(True):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory == fill
    with deterministic_algorithms(False):
        assert not torch.are_deterministic_algorithms_enabled()
