"""A plan from a file trains as it says, on every rank alike, or is refused by name (B21, B22, B25)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from dlrm_scale.config import Config
from dlrm_scale.errors import ConfigError, DlrmScaleError, PlanError, PlanFileError
from dlrm_scale.layout import ShardLayout
from dlrm_scale.schema import TableSpec
from dlrm_scale.sharding.given_plan import check_given_plan
from dlrm_scale.sharding.plan_file import PlanFile, load_plan, plan_of_layout, planned_table, save_plan
from dlrm_scale.sharding.ranks import init_ranks
from dlrm_scale.sharding.shard_shapes import TableShape
from dlrm_scale.sharding.sharder import ALL_SHARDING_TYPES
from tests.sharding.sharded_runs import (
    TABLES,
    Left,
    Run,
    build,
    make_config,
    tables_for,
    train_runs,
    whole_state,
    whole_tables,
)
from tests.support.random_batches import random_batches
from tests.support.rank_runner import run_ranks
from tests.support.reference import train_reference

_RANKS, _PER_HOST = 4, 2
_ROWS_PER_STEP = (32, 31, 5, 1)
# Places that no planner would choose: out of order, several shards on a rank, ranks without any; every width of 16.
_HAND_MADE: dict[str, Mapping[str, tuple[int, tuple[int, ...]]]] = {
    "table_wise": {name: (16, (3 - i % 2,)) for i, name in enumerate(("C1", "C2", "C3", "C4", "C5"))},
    "column_wise of 4": {name: (4, (3, 1, 1, 2)) for name in ("C1", "C2", "C3", "C4", "C5")},
    "column_wise of 8": {name: (8, (2, 0)) for name in ("C1", "C2", "C3", "C4", "C5")},
    "table_column_wise of 4": {name: (4, (3, 3, 2, 3)) for name in ("C1", "C2", "C3", "C4", "C5")},
    "table_column_wise of 8": {name: (8, (1, 0)) for name in ("C1", "C2", "C3", "C4", "C5")},
    "table_row_wise": {name: (16, (1 - i % 2,)) for i, name in enumerate(("C1", "C2", "C3", "C4", "C5"))},
    "grid_shard of 4": {name: (4, (1, 0, 0, 1)) for name in ("C1", "C2", "C3", "C4", "C5")},
    "grid_shard of 8": {name: (8, (1, 0)) for name in ("C1", "C2", "C3", "C4", "C5")},
    "row_wise": {name: (16, ()) for name in ("C1", "C2", "C3", "C4", "C5")},
    "data_parallel": {name: (16, ()) for name in ("C1", "C2", "C3", "C4", "C5")},
}


def _plan(tables: Sequence[TableSpec], shapes: Mapping[str, TableShape], optimizer: str, **values: object) -> PlanFile:
    fields = {
        "planner": "forced",
        "ranks": _RANKS,
        "ranks_per_host": _PER_HOST,
        "optimizer": optimizer,
        "batch_size_per_rank": 8,
        "tables": tuple(planned_table(t, shapes[t.name]) for t in tables),
    }
    return PlanFile.model_validate({**fields, **values})


def _shapes(case: str) -> dict[str, TableShape]:
    kind = case.split(" ")[0]
    return {
        name: TableShape(sharding_type=kind, columns=columns, places=places)
        for name, (columns, places) in _HAND_MADE[case].items()
    }


def _with_plan(path: Path, optimizer: str = "rowwise_adagrad", **sharding: object) -> Config:
    own = {"kind": "auto", "plan": str(path), "ranks_per_host": _PER_HOST}
    return make_config("auto", optimizer, sharding={**own, **sharding})


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_hand_made_plans_of_every_type_and_width_equal_the_unsharded_reference(optimizer: str, tmp_path: Path) -> None:
    for of_grid in (False, True):
        cases = [case for case in _HAND_MADE if case.startswith("grid") == of_grid]
        tables = tables_for("grid_shard" if of_grid else "table_wise")
        batches = random_batches(tables, _ROWS_PER_STEP, most_ids_per_bag=3)
        runs = []
        for case in cases:
            path = tmp_path / f"{case}.json"
            # in another order than the model's tables
            save_plan(path, _plan(tables[::-1], _shapes(case), optimizer))
            runs.append(Run(config=_with_plan(path, optimizer), tables=tables))
        by_run = list(zip(*run_ranks(_RANKS, train_runs, runs, batches), strict=True))
        for case, run, found in zip(cases, runs, by_run, strict=True):
            left = list(found)
            _placed_as_planned(left, case)
            splits = left[0].column_splits if optimizer == "rowwise_adagrad" else {}
            expected = train_reference(run.config, tables, batches, column_splits=splits)
            assert left[0].losses == pytest.approx(expected.losses, abs=1e-5), case
            for name, weight in whole_tables(left, tables).items():
                torch.testing.assert_close(weight, expected.tables[name], atol=1e-5, rtol=0, msg=f"{case}: {name}")
            if optimizer == "rowwise_adagrad":
                for name, states in whole_state(left, tables).items():
                    for columns, state in states.items():
                        torch.testing.assert_close(state, expected.row_states[name][columns], atol=1e-5, rtol=1e-5)


def _placed_as_planned(left: Sequence[Left], case: str) -> None:
    kind, places = case.split(" ")[0], {name: places for name, (_, places) in _HAND_MADE[case].items()}
    held = {name: [0] * _RANKS for name in places}
    for rank, of_rank in enumerate(left):
        for region, _, _ in of_rank.shards:
            held[region.table][rank] += 1
    for name, shards in held.items():
        if kind in ("row_wise", "data_parallel"):
            assert shards == [1] * _RANKS, (case, name)
        elif kind in ("table_row_wise", "grid_shard"):
            assert shards == [places[name].count(rank // _PER_HOST) for rank in range(_RANKS)], (case, name)
        else:
            assert shards == [places[name].count(rank) for rank in range(_RANKS)], (case, name)


def _train_and_save(runs: Sequence[Run], batches: object, paths: Sequence[str]) -> list[tuple[Left, ShardLayout]]:
    ranks = init_ranks("cpu", 60)
    found = []
    for run, path in zip(runs, paths, strict=True):
        sharded = build(run.config, run.tables, ranks)
        if ranks.rank == 0:
            save_plan(Path(path), sharded.plan)
        found.append(sharded.layout)
    left = train_runs(runs, batches)  # type: ignore[arg-type]
    return list(zip(left, found, strict=True))


def test_a_saved_plan_of_the_trainer_trains_bit_for_bit_as_the_trainer(tmp_path: Path) -> None:
    for tables in (TABLES, tables_for("grid_shard")):
        kinds = [kind for kind in ALL_SHARDING_TYPES if tables_for(kind) == tables] + ["auto"]
        batches = random_batches(tables, _ROWS_PER_STEP, most_ids_per_bag=3)
        paths = [str(tmp_path / f"{kind}.json") for kind in kinds]
        runs = [Run(config=make_config(kind, sharding={"ranks_per_host": _PER_HOST}), tables=tables) for kind in kinds]
        first = run_ranks(_RANKS, _train_and_save, runs, batches, paths)
        again = [Run(config=_with_plan(Path(path)), tables=tables) for path in paths]
        second = run_ranks(_RANKS, train_runs, again, batches)
        for rank in range(_RANKS):
            for kind, (left, layout), from_file in zip(kinds, first[rank], second[rank], strict=True):
                assert from_file.losses == left.losses, kind
                assert load_plan(tmp_path / f"{kind}.json").layout() == layout
                for (region, weight, state), (other, same_weight, same_state) in zip(
                    left.shards, from_file.shards, strict=True
                ):
                    assert region == other
                    assert torch.equal(weight, same_weight), kind
                    assert all(torch.equal(state[name], same_state[name]) for name in state), kind


def test_a_plan_that_torchrec_made_keeps_its_shards_in_the_file() -> None:
    layout = _plan(TABLES, _shapes("column_wise of 4"), "sgd").layout()
    plan = plan_of_layout(layout, planner="torchrec", ranks_per_host=_PER_HOST, optimizer="sgd", batch_size_per_rank=8)
    assert plan.layout() == layout


# refusals ------------------------------------------------------------------------------------------------------------


def _refusal(config: Config, plan: PlanFile, tables: Sequence[TableSpec] = TABLES, **ranks: int) -> DlrmScaleError:
    with pytest.raises(DlrmScaleError) as caught:
        check_given_plan(plan, tables, config, **{"ranks": _RANKS, "ranks_per_host": _PER_HOST, **ranks})
    return caught.value


def test_a_plan_for_something_else_is_refused_with_every_changed_field() -> None:
    plan = _plan(TABLES, _shapes("row_wise"), "rowwise_adagrad")
    config = _with_plan(Path("/p.json"), "sgd")
    tables = (
        TableSpec(name="C1", rows=104, dim=16),
        TableSpec(name="C2", rows=40, dim=16),
        *TABLES[2:4],
        TableSpec(name="C6", rows=1, dim=16),
    )
    error = _refusal(config, plan, tables, ranks=8, ranks_per_host=4)
    assert isinstance(error, PlanFileError)
    assert error.exit_code == 2
    assert error.message.splitlines() == [
        "sharding.plan /p.json was made for something else:",
        "  ranks: the plan's 4, here 8",
        "  ranks a host: the plan's 2, here 4",
        "  sparse_optimizer.kind: the plan's rowwise_adagrad, here sgd",
        "  table C1: rows in the plan 103, here 104",
        "  table C2: pooling in the plan mean, here sum",
        "  table C6: not in the plan",
        "  table C5: only in the plan",
    ]
    assert "dlrm-scale plan" in (error.remedy or "")


def test_a_plan_for_other_hosts_names_the_setting_that_makes_them_equal() -> None:
    plan = _plan(TABLES, _shapes("table_row_wise"), "rowwise_adagrad")
    error = _refusal(_with_plan(Path("p")), plan, ranks_per_host=4)
    assert error.remedy == "set sharding.ranks_per_host = 2 if hosts are meant to be of that size"


def test_settings_that_ask_for_another_type_are_refused_and_those_that_repeat_the_plan_are_not() -> None:
    plan = _plan(TABLES, _shapes("row_wise"), "rowwise_adagrad")
    error = _refusal(_with_plan(Path("p"), kind="table_wise"), plan)
    assert isinstance(error, ConfigError)
    assert 'sharding.kind = "table_wise", but sharding.plan p has table C1 as row_wise' in error.message
    assert "--force-kind table_wise" in (error.remedy or "")
    error = _refusal(_with_plan(Path("p"), tables={"C3": "data_parallel"}), plan)
    assert 'sharding.tables.C3 = "data_parallel", but' in error.message
    assert "--constrain C3=data_parallel" in (error.remedy or "")
    repeated = _with_plan(Path("p"), kind="row_wise", tables={"C3": "row_wise"})
    check_given_plan(plan, TABLES, repeated, ranks=_RANKS, ranks_per_host=_PER_HOST)


def test_a_plan_that_splits_row_states_needs_the_permission_by_name() -> None:
    plan = _plan(TABLES, _shapes("column_wise of 4"), "rowwise_adagrad")
    error = _refusal(_with_plan(Path("p"), allow_split_row_state=False), plan)
    assert "table C1: column_wise would give each column shard a row state of its own" in error.message
    assert "sharding.allow_split_row_state = true" in (error.remedy or "")


def test_widths_below_the_planners_least_are_taken_from_a_file() -> None:
    plan = _plan(TABLES, _shapes("column_wise of 4"), "rowwise_adagrad")
    config = _with_plan(Path("p"), min_columns_per_shard=8)
    check_given_plan(plan, TABLES, config, ranks=_RANKS, ranks_per_host=_PER_HOST)


def _refused_everywhere(path: str) -> str:
    with pytest.raises(PlanError) as caught:
        build(_with_plan(Path(path), ranks_per_host=0), TABLES, init_ranks("cpu", 60))
    return caught.value.message


def test_a_plan_for_other_ranks_or_an_absent_file_stops_every_rank_alike(tmp_path: Path) -> None:
    save_plan(tmp_path / "plan.json", _plan(TABLES, _shapes("table_wise"), "rowwise_adagrad"))
    messages = run_ranks(2, _refused_everywhere, str(tmp_path / "plan.json"))
    assert messages[0] == messages[1]
    assert "ranks: the plan's 4, here 2" in messages[0]
    messages = run_ranks(2, _refused_everywhere, str(tmp_path / "absent.json"))
    assert messages[0] == messages[1]
    assert "absent.json: No such file or directory" in messages[0]


def _by_own_path(path: str) -> str:
    ranks = init_ranks("cpu", 60)
    # only rank 0's host has the file
    own = Path(path) if ranks.rank == 0 else Path("/nowhere/plan.json")
    return build(_with_plan(own), TABLES, ranks).layout.fingerprint()


def test_only_rank_0_reads_the_file(tmp_path: Path) -> None:
    plan = _plan(TABLES, _shapes("table_wise"), "rowwise_adagrad")
    save_plan(tmp_path / "plan.json", plan)
    fingerprints = run_ranks(_RANKS, _by_own_path, str(tmp_path / "plan.json"))
    assert set(fingerprints) == {plan.layout([t.name for t in TABLES]).fingerprint()}


def _one_without_a_file(path: str) -> str:
    ranks = init_ranks("cpu", 60)
    config = _with_plan(Path(path)) if ranks.rank else make_config("auto", sharding={"ranks_per_host": _PER_HOST})
    with pytest.raises(PlanError) as caught:
        build(config, TABLES, ranks)
    return caught.value.message


def test_a_rank_that_was_started_without_the_plan_stops_all(tmp_path: Path) -> None:
    save_plan(tmp_path / "plan.json", _plan(TABLES, _shapes("table_wise"), "rowwise_adagrad"))
    messages = run_ranks(_RANKS, _one_without_a_file, str(tmp_path / "plan.json"))
    expected = "tables, sharding config, device or ranks a host: rank 1, 2, 3 of 4 differs from rank 0"
    assert messages == [expected] * _RANKS
