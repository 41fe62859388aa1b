"""Plans in files: the same bytes for the same plan, small for many ranks, and nothing wrong is read."""

import json
import re
from pathlib import Path

import pytest

from dlrm_scale.errors import PlanFileError
from dlrm_scale.schema import TableSpec
from dlrm_scale.sharding.plan_file import (
    PlanFile,
    Prediction,
    by_rank,
    load_plan,
    plan_of_layout,
    planned_table,
    runs_of,
    save_plan,
)
from dlrm_scale.sharding.shard_shapes import TableShape

_SHAPES = {
    "table_wise": (16, (3,)),
    "row_wise": (16, ()),
    "column_wise": (4, (3, 0, 0, 1)),
    "table_row_wise": (16, (1,)),
    "table_column_wise": (8, (3, 2)),
    "grid_shard": (8, (1, 0)),
    "data_parallel": (16, ()),
}


def _plan(**values: object) -> PlanFile:
    tables = tuple(
        planned_table(
            TableSpec(name=kind, rows=11, dim=16), TableShape(sharding_type=kind, columns=columns, places=places)
        )
        for kind, (columns, places) in _SHAPES.items()
    )
    fields = {
        "planner": "dlrm_scale",
        "ranks": 4,
        "ranks_per_host": 2,
        "optimizer": "sgd",
        "batch_size_per_rank": 8,
        "tables": tables,
        "prediction": Prediction(
            costs="a100x8",
            step_ms=4.5,
            bound_ms=4.25,
            gap=0.0588235,
            phases_ms={"lookup": runs_of([1.5, 1.5, 1.5, 0.25])},
            memory_bytes={"weights": runs_of([100, 100, 7, 7])},
        ),
    }
    return PlanFile.model_validate({**fields, **values})


def test_a_plan_of_every_type_reads_back_equal_with_the_same_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    save_plan(first, _plan())
    plan = load_plan(first)
    assert plan.model_copy(update={"fingerprint": ""}) == _plan()
    assert plan.layout() == _plan().layout()
    save_plan(second, plan)
    assert second.read_bytes() == first.read_bytes()
    prediction = plan.prediction
    assert prediction is not None
    assert by_rank(prediction.memory_bytes["weights"]) == [100, 100, 7, 7]
    assert by_rank(prediction.phases_ms["lookup"]) == [1.5, 1.5, 1.5, 0.25]


def test_a_plan_made_from_a_layout_has_that_layout() -> None:
    layout = _plan().layout()
    again = plan_of_layout(layout, planner="x", ranks_per_host=2, optimizer="sgd", batch_size_per_rank=8)
    assert again.layout() == layout
    assert again.tables == _plan().tables


def test_tables_come_in_the_order_asked_for() -> None:
    names = [table.name for table in reversed(_plan().tables)]
    assert [table.spec.name for table in _plan().layout(names).tables] == names


def test_26_tables_on_4096_ranks_take_few_bytes(tmp_path: Path) -> None:
    shapes = [TableShape(sharding_type=kind, columns=128) for kind in ("row_wise", "data_parallel")] * 13
    tables = [planned_table(TableSpec(name=f"t{i}", rows=40_000_000, dim=128), s) for i, s in enumerate(shapes)]
    prediction = Prediction(costs="x", step_ms=1.0, phases_ms={"lookup": runs_of([0.1] * 4096)})
    plan = _plan(ranks=4096, ranks_per_host=8, tables=tuple(tables), prediction=prediction)
    save_plan(tmp_path / "plan.json", plan)
    assert (tmp_path / "plan.json").stat().st_size < 5000
    assert len(load_plan(tmp_path / "plan.json").layout().tables[0].regions) == 4096


def _edited(path: Path, **values: object) -> Path:
    save_plan(path, _plan())
    content = json.loads(path.read_text())
    content.pop("fingerprint")
    path.write_text(json.dumps({**content, **values}))
    return path


def _table(name: str, /, **values: object) -> list[dict[str, object]]:
    tables = [t.model_dump(mode="json", exclude_none=True) for t in _plan().tables]
    return [{**t, **values} if t["name"] == name else t for t in tables]


def _refusal(path: Path) -> PlanFileError:
    with pytest.raises(PlanFileError) as caught:
        load_plan(path)
    assert caught.value.exit_code == 2, "a wrong file, not a plan that doesn't fit"
    assert caught.value.remedy
    return caught.value


def test_a_changed_plan_is_refused_unless_its_fingerprint_is_taken_out(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(path, _plan())
    text = path.read_text()
    changed = text.replace('"rank": 3', '"rank": 2', 1)
    path.write_text(changed)
    error = _refusal(path)
    assert "plan.json: its fingerprint doesn't match its content" in error.message
    assert error.remedy == 'if the change is meant, take its line "fingerprint" out, or write "fingerprint": "" there'
    lines = changed.splitlines(keepends=True)
    without = [line for line in lines if not line.startswith('"fingerprint"')]
    emptied = ['"fingerprint": "",\n' if line.startswith('"fingerprint"') else line for line in lines]
    assert len(without) == len(lines) - 1
    for edited in (without, emptied):
        path.write_text("".join(edited))
        assert load_plan(path).tables[0].shape.places == (2,)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"version": 1}, "version 1; this release reads 2"),
        ({"replicas": 2}, "not a sharding plan: replicas"),
        ({"ranks": 3}, "2 ranks a host don't divide 3 ranks"),
        ({"ranks": 2}, "table table_wise: table_wise names rank 3 of 2"),
        ({"tables": _table("table_wise", kernel="dense")}, "table table_wise: its kernel aren't those of table_wise"),
        ({"tables": _table("row_wise", hosts=[0])}, "table row_wise: row_wise has no choice of places"),
        ({"tables": _table("column_wise", dim=32)}, "table column_wise: column_wise cuts 32 columns into equal shards"),
        ({"tables": _table("column_wise", name="table_wise")}, "table table_wise is there twice"),
        ({"tables": []}, "not a sharding plan: tables"),
        ({"prediction": {"costs": "x", "step_ms": 1, "phases_ms": {"a": [[1, 3]]}}}, "prediction a isn't of 4 ranks"),
        ({"surprise": 1}, "not a sharding plan: surprise"),
        ({"ranks": 2**61}, "not a sharding plan: ranks: .*less than or equal to 1048576"),
    ],
)
def test_a_file_that_is_no_whole_plan_is_refused(values: dict[str, object], words: str, tmp_path: Path) -> None:
    assert re.search(rf"plan\.json: .*{words}", _refusal(_edited(tmp_path / "plan.json", **values)).message)


def test_a_shard_that_would_leave_cells_out_is_refused(tmp_path: Path) -> None:
    shard = {"offset": [0, 0], "size": [10, 16], "rank": 3}
    error = _refusal(_edited(tmp_path / "plan.json", tables=_table("table_wise", shards=[shard])))
    assert "table table_wise: its shards aren't those of table_wise on 4 ranks" in error.message


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for text, words in (
        ("{", "not a sharding plan: not valid JSON: Expecting property name"),
        ('{"version": 2,\n}', "line 2 column 1"),
        ("[" * 100_000, "not a sharding plan: not valid JSON"),
        ('{"version": ' + "9" * 5000 + "}", "not a sharding plan: not valid JSON"),
        ("[2]", 'it has no "version"'),
        ("{}", 'it has no "version"'),
    ):
        path.write_text(text)
        assert words in _refusal(path).message
        assert len(_refusal(path).message) < 400
    path.write_bytes(b"\xff")
    assert _refusal(path).message == f"{path}: not text"
    assert "absent.json: No such file" in _refusal(tmp_path / "absent.json").message
