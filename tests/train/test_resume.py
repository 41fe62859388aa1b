"""A run that stops anywhere and resumes ends as if it had never stopped."""

import errno
import shutil
from pathlib import Path

import numpy as np
import pytest

from dlrm_scale.checkpoint import find_chain
from dlrm_scale.checkpoint.saving.persist import SaveWriter
from dlrm_scale.errors import CheckpointError, ConfigError, DatasetError
from dlrm_scale.train.run_folder import resolve_run
from dlrm_scale.train.stop import StopRequest
from dlrm_scale.train.trainer import train_rank
from tests.support.datasets import make_dataset
from tests.support.rank_runner import run_ranks
from tests.support.training import SMALL_MODEL, assemble, log_records, losses, read_tables, run_training, same_tables

ROWS = (150, 77)  # 227 rows: 8 steps of 32 an epoch, the last with 3 rows
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
    # tables of 2 and 3 rows on up to 4 ranks: some shards are empty
    split = {"train": [(0, 227)], "validation": [(227, 277)]}
    make_dataset(path, (*ROWS, 50), table_rows=[3, 4, 10, 2, *[40] * 22], split=split)
    return path


def _sharding(kind: str) -> list[str]:
    return [
        f"sharding.kind={kind}",
        f"sharding.allow_split_row_state={str(kind in SPLIT_COLUMNS).lower()}",
        "train.epochs=2",
        "schedule.warmup_steps=4",
        "schedule.decay_start_step=6",
        "schedule.decay_steps=8",
    ]


@pytest.mark.parametrize("kind", TYPES)
def test_a_resumed_run_on_three_ranks_equals_the_uninterrupted_one_bit_for_bit(
    kind: str, dataset: Path, tmp_path: Path
) -> None:
    """Three ranks are the first number on which the order of a sum can differ."""
    settings = [*_sharding(kind), "model.over_layers=[64, 32, 16, 1]", "data.batch_size=12"]
    run_training(3, tmp_path / "straight", dataset, settings)
    run_training(3, tmp_path / "run", dataset, [*settings, "train.max_steps=17"])
    run_training(3, tmp_path / "run", dataset, ["train.max_steps=0"], resume=True)
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")
    split = kind in SPLIT_COLUMNS
    first, second = (read_tables(tmp_path / name, split_state=split) for name in ("run", "straight"))
    assert same_tables(first, second)


@pytest.mark.parametrize("kind", TYPES)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(kind: str, dataset: Path, tmp_path: Path) -> None:
    straight = run_training(2, tmp_path / "straight", dataset, _sharding(kind))
    for pipeline in ("plain", "sparse_dist"):
        run = tmp_path / pipeline
        settings = [*_sharding(kind), f"train.pipeline={pipeline}"]
        # checkpoints at 3, 6, ...; ends at step 10 in the second epoch, then once more at its very end
        first = run_training(2, run, dataset, [*settings, "train.max_steps=10"])
        second = run_training(2, run, dataset, ["train.max_steps=0"], resume=True)
        assert second[0].result.start_step == 10
        for rank in range(2):
            rows = first[rank].rows_per_step + second[rank].rows_per_step
            assert rows == straight[rank].rows_per_step
            rates = first[rank].learning_rates + second[rank].learning_rates
            assert rates == straight[rank].learning_rates
        assert losses(run) == losses(tmp_path / "straight")
        split = kind in SPLIT_COLUMNS
        assert same_tables(read_tables(run, split_state=split), read_tables(tmp_path / "straight", split_state=split))


def test_every_row_is_used_once_an_epoch_across_resumes_at_awkward_places(dataset: Path, tmp_path: Path) -> None:
    seen: list[list[int]] = []
    # in the middle, at an epoch's end (8), twice in a row without a step between, and on other rank counts
    for start, (ranks, stop) in enumerate([(2, 5), (2, 8), (1, 8), (3, 9), (4, 16)]):
        settings = [f"train.max_steps={stop}"] if start else [*_sharding("row_wise"), f"train.max_steps={stop}"]
        observed = run_training(ranks, tmp_path / "run", dataset, settings, resume=start > 0)
        for step in zip(*(o.rows_per_step for o in observed), strict=True):
            seen.append(sorted(row for rank_rows in step for row in rank_rows))
    straight = run_training(1, tmp_path / "straight", dataset, _sharding("row_wise"))
    assert seen == [sorted(rows) for rows in straight[0].rows_per_step]
    for epoch in (seen[:8], seen[8:]):
        assert sorted(row for step in epoch for row in step) == list(range(sum(ROWS)))


def test_rows_and_state_survive_other_ranks_and_plans_exactly(dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_training(2, run, dataset, [*_sharding("row_wise"), "train.max_steps=7"])
    expected = read_tables(run)
    assert any(np.any(value > 0) for name, value in expected.items() if name.endswith("momentum1"))
    steps = 7
    for ranks, kind in [
        (1, "table_wise"),
        (4, "row_wise"),
        (2, "data_parallel"),
        (3, "table_row_wise"),
        (2, "row_wise"),
    ]:
        # compared as restored on these ranks; then one step more, saved from there, for the next
        steps += 1
        settings = [f"sharding.kind={kind}", f"train.max_steps={steps}", "checkpoint.baseline_ratio=0.000001"]
        observed = run_training(ranks, run, dataset, settings, resume=True)
        tables = {name: value for name, value in expected.items() if not name.startswith("dense.")}
        assert same_tables(assemble(observed, expected), tables), (ranks, kind)
        expected = read_tables(run)


def test_losses_after_a_restore_on_other_ranks_agree_to_rounding(dataset: Path, tmp_path: Path) -> None:
    straight = tmp_path / "straight"
    run_training(2, straight, dataset, _sharding("row_wise"))
    run = tmp_path / "run"
    run_training(2, run, dataset, [*_sharding("row_wise"), "train.max_steps=6"])
    run_training(1, run, dataset, ["train.max_steps=9", "sharding.kind=table_wise"], resume=True)
    run_training(4, run, dataset, ["train.max_steps=12", "sharding.kind=table_row_wise"], resume=True, ranks_per_host=2)
    run_training(2, run, dataset, ["train.max_steps=16", "sharding.kind=data_parallel"], resume=True)
    expected = losses(straight)
    assert losses(run).keys() == expected.keys()
    for step, loss in losses(run).items():
        assert loss == pytest.approx(expected[step], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "kind"), [(1, "table_wise"), (3, "row_wise"), (4, "table_row_wise")])
def test_a_hundred_steps_after_a_restore_on_other_ranks_have_the_same_losses_to_a_millionth(
    ranks: int, kind: str, dataset: Path, tmp_path: Path
) -> None:
    settings = [*_sharding("row_wise"), "train.epochs=14", "schedule.decay_steps=90"]
    straight = run_training(2, tmp_path / "straight", dataset, settings)
    run = tmp_path / "run"
    first = run_training(2, run, dataset, [*settings, "train.max_steps=10"])
    changed = ["train.max_steps=0", f"sharding.kind={kind}"]
    second = run_training(ranks, run, dataset, changed, resume=True, ranks_per_host=2 if ranks == 4 else None)
    assert second[0].result.step - second[0].result.start_step == 102
    expected = losses(tmp_path / "straight")
    assert losses(run).keys() == expected.keys()
    for step, loss in losses(run).items():
        assert loss == pytest.approx(expected[step], abs=1e-6)
    # learning rates and rows are exact
    assert first[0].learning_rates + second[0].learning_rates == straight[0].learning_rates
    for index, step in enumerate(zip(*(observed.rows_per_step for observed in second), strict=True), start=10):
        assert sorted(row for rows in step for row in rows) == sorted(
            row for observed in straight for row in observed.rows_per_step[index]
        )


PLANS = ("table_wise", "row_wise", "data_parallel", "table_row_wise")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(len(PLANS)), ids=PLANS)
def test_from_1_to_2_to_4_to_1_ranks_rows_are_exact_and_a_hundred_losses_the_same_to_a_millionth(
    first: int, dataset: Path, tmp_path: Path
) -> None:
    """Each of the four starts has another plan, and in each case another one of the four."""
    run, straight = tmp_path / "run", tmp_path / "straight"
    settings = ["train.epochs=14", "schedule.decay_steps=90"]
    run_training(1, straight, dataset, [*_sharding("table_wise"), *settings])
    run_training(1, run, dataset, [*_sharding(PLANS[first]), *settings, "train.max_steps=10"])
    for start, (ranks, stop) in enumerate([(2, 44), (4, 78), (1, 0)], start=1):
        kind = PLANS[(first + start) % len(PLANS)]
        before = read_tables(run)
        changed = [f"sharding.kind={kind}", f"train.max_steps={stop}"]
        observed = run_training(ranks, run, dataset, changed, resume=True, ranks_per_host=2 if ranks == 4 else None)
        tables = {name: value for name, value in before.items() if not name.startswith("dense.")}
        restored = assemble(observed, before)
        assert restored.keys() == tables.keys()
        for name, values in tables.items():
            assert np.array_equal(restored[name].view(np.int32), values.view(np.int32)), (ranks, kind, name)
    expected = losses(straight)
    assert losses(run).keys() == expected.keys() == set(range(1, 113))
    for step, loss in losses(run).items():
        assert loss == pytest.approx(expected[step], abs=1e-6)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_losses_do_not_depend_on_the_number_of_ranks(ranks: int, dataset: Path, tmp_path: Path) -> None:
    run_training(1, tmp_path / "one", dataset, _sharding("table_wise"))
    run_training(ranks, tmp_path / "many", dataset, _sharding("table_wise"))
    one, many = losses(tmp_path / "one"), losses(tmp_path / "many")
    assert len(one) == len(many) == 16
    for step, loss in many.items():
        assert loss == pytest.approx(one[step], abs=1e-5)


def test_evaluating_in_the_middle_changes_no_row_loss_or_weight(dataset: Path, tmp_path: Path) -> None:
    for pipeline in ("plain", "sparse_dist"):
        settings = [*_sharding("row_wise"), f"train.pipeline={pipeline}"]
        without = run_training(2, tmp_path / f"{pipeline}-without", dataset, settings)
        evaluating = [*settings, "train.validate_every_steps=5", "train.validation_rows=40"]
        with_it = run_training(2, tmp_path / f"{pipeline}-with", dataset, evaluating)
        assert [o.rows_per_step for o in with_it] == [o.rows_per_step for o in without]
        assert losses(tmp_path / f"{pipeline}-with") == losses(tmp_path / f"{pipeline}-without")
        first, second = read_tables(tmp_path / f"{pipeline}-with"), read_tables(tmp_path / f"{pipeline}-without")
        assert same_tables(first, second)
        rows = [record["rows"] for record in log_records(tmp_path / f"{pipeline}-with", "validation")]
        assert rows == [40, 40, 40, 50]


def test_a_new_run_takes_weights_and_state_but_starts_its_data_anew(dataset: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    run_training(2, first, dataset, [*_sharding("row_wise"), "train.max_steps=6"])
    later = tmp_path / "later"
    make_dataset(later, 96, table_rows=[3, 4, 10, 2, *[40] * 22], seed=5)
    observed = run_training(1, tmp_path / "second", later, _sharding("table_wise")[:1], init_from=str(first))
    assert observed[0].result.start_step == 0
    assert sorted(row for rows in observed[0].rows_per_step for row in rows) == list(range(96))
    run_training(1, tmp_path / "scratch", later, _sharding("table_wise")[:1])
    assert losses(tmp_path / "second")[1] != losses(tmp_path / "scratch")[1]
    before, after = read_tables(first), read_tables(tmp_path / "second")
    momenta = [name for name in before if name.endswith("momentum1")]
    # row-wise Adagrad's state only grows: it went on from the first run's, and somewhere it did grow
    assert all((after[name] >= before[name]).all() for name in momenta)
    assert any((after[name] > before[name]).any() for name in momenta)


def test_a_run_from_another_that_died_before_its_first_checkpoint_still_takes_its_weights(
    dataset: Path, tmp_path: Path
) -> None:
    first, straight, died = (tmp_path / name for name in ("first", "straight", "died"))
    settings = [*_sharding("row_wise"), "train.max_steps=6"]
    run_training(2, first, dataset, settings)
    run_training(2, straight, dataset, settings, init_from=str(first))
    run_training(2, died, dataset, settings, init_from=str(first))
    shutil.rmtree(died / "checkpoints")
    (died / "log.jsonl").unlink()
    (died / "best.json").unlink()
    run_training(2, died, dataset, [], resume=True)
    assert losses(died) == losses(straight)
    assert same_tables(read_tables(died), read_tables(straight))


def test_rows_trained_are_counted_over_all_starts(dataset: Path, tmp_path: Path) -> None:
    run_training(1, tmp_path / "run", dataset, [*_sharding("table_wise"), "train.max_steps=3"])
    run_training(1, tmp_path / "run", dataset, ["train.max_steps=10"], resume=True)
    chain = find_chain(tmp_path / "run" / "checkpoints")
    assert chain is not None
    assert chain.tip.rows_consumed == sum(ROWS) + 2 * 32


def test_an_older_checkpoint_can_be_named(dataset: Path, tmp_path: Path) -> None:
    run, straight = tmp_path / "run", tmp_path / "straight"
    run_training(2, straight, dataset, _sharding("row_wise"))
    run_training(2, run, dataset, [*_sharding("row_wise"), "train.max_steps=10"])
    observed = run_training(2, run, dataset, ["train.max_steps=0"], resume=True, step=6)
    assert observed[0].result.start_step == 6
    assert same_tables(read_tables(run), read_tables(straight))
    with pytest.raises(CheckpointError, match="no whole checkpoint of step 7"):
        run_training(2, run, dataset, [], resume=True, step=7)


def test_a_run_that_has_lost_its_checkpoints_does_not_begin_again_in_silence(dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_training(1, run, dataset, [*_sharding("table_wise"), "train.max_steps=3"])
    for manifest in (run / "checkpoints" / "manifests").iterdir():
        manifest.unlink()
    with pytest.raises(CheckpointError, match="tells of committed checkpoints"):
        run_training(1, run, dataset, [], resume=True)
    assert list((run / "checkpoints" / "data").iterdir())


def test_a_dataset_that_does_not_fit_is_refused_by_name(dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_training(1, run, dataset, [*_sharding("table_wise"), "train.max_steps=3"])
    other = tmp_path / "other"
    make_dataset(other, ROWS, table_rows=[3, 4, 12, 1, *[40] * 22])
    with pytest.raises((CheckpointError, DatasetError), match=r"C3|fingerprint"):
        run_training(1, run, other, [f"data.path={other}"], resume=True)
    with pytest.raises(CheckpointError, match="C3"):
        run_training(1, tmp_path / "new", other, ["train.max_steps=3"], init_from=str(run))
    with pytest.raises(ConfigError, match=r"model\.dim is 8, there 16"):
        run_training(1, tmp_path / "wide", dataset, ["model.dim=8", "model.dense_layers=[8]"], init_from=str(run))


def test_an_existing_run_is_neither_overwritten_nor_changed_unsafely(dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_training(1, run, dataset, [*_sharding("table_wise"), "train.max_steps=3"])
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    with pytest.raises(ConfigError, match="holds a run already"):
        run_training(1, run, dataset, _sharding("table_wise"))
    for override in ("data.batch_size=64", "model.seed=3", "data.seed=1", "sparse_optimizer.kind=sgd"):
        with pytest.raises(ConfigError, match=override.split("=")[0]):
            run_training(1, run, dataset, [override], resume=True)
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def _train_on_a_full_disk(run: str, dataset: str) -> None:
    def full(self: SaveWriter, request: object) -> object:
        raise OSError(errno.ENOSPC, "No space left on device")

    write = SaveWriter.write
    SaveWriter.write = full
    try:
        settings = [f"run.path={run}", f"data.path={dataset}", *SMALL_MODEL, "train.max_steps=7"]
        train_rank(resolve_run("sample", settings), StopRequest())
    finally:
        SaveWriter.write = write


def test_a_run_trains_on_through_failed_saves_but_does_not_end_well(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"the last checkpoint, of step 7, is not saved: .*No space left"):
        run_ranks(2, _train_on_a_full_disk, str(tmp_path / "run"), str(dataset))
    assert [r["step"] for r in log_records(tmp_path / "run", "train")] == list(range(1, 8))
    saves = log_records(tmp_path / "run", "checkpoint")
    assert [(r["step"], r["committed"]) for r in saves] == [(3, False), (6, False), (7, False)]


def test_resuming_a_finished_run_trains_nothing_and_keeps_its_result(dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_training(1, run, dataset, _sharding("table_wise"))
    before = (run / "result.json").read_bytes()
    observed = run_training(1, run, dataset, [], resume=True)
    assert observed[0].rows_per_step == []
    assert observed[0].result.validation is not None
    assert (run / "result.json").read_bytes() == before
