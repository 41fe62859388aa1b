"""TorchRec's plan among those that `auto` measures: taken as it is, or told why not."""

import pytest

from dlrm_scale.errors import PlanError
from dlrm_scale.planning.measuring import auto_choice
from dlrm_scale.planning.measuring.auto_choice import TORCHREC, AutoCandidate, torchrec_candidate
from dlrm_scale.planning.plan.cost_models import OurCosts
from dlrm_scale.planning.plan.torchrec_peer import plan_with_torchrec
from dlrm_scale.sharding.shard_shapes import TableShape
from dlrm_scale.sharding.torchrec_planner import TorchRecPlan
from dlrm_scale.units import GIB
from tests.planning.plan.small_requests import small_request


def _making(monkeypatch: pytest.MonkeyPatch, kind: str, columns: int | None = None) -> None:
    """Let TorchRec's planner shard all tables alike, those of `table_wise` and `column_wise` on the first ranks."""

    def make(request: object, limit_seconds: int) -> TorchRecPlan:
        shapes = []
        for table in small_request().tables.tables:
            width = columns or table.dim
            places = tuple(range(table.dim // width)) if kind in ("table_wise", "column_wise") else ()
            shapes.append(TableShape(sharding_type=kind, columns=width, places=places))
        return TorchRecPlan(shapes=tuple(shapes), seconds=1.0)

    monkeypatch.setattr(auto_choice, "torchrec_plan", make)


def test_torchrecs_own_plan_is_a_candidate_with_our_prediction() -> None:
    request = small_request()
    (found,), notes = torchrec_candidate(request, [])
    assert found.name == TORCHREC
    assert found.shapes == plan_with_torchrec(request)
    assert found.load == OurCosts(request).load(found.shapes)
    assert notes == []


def test_a_plan_that_is_measured_anyway_is_named_and_not_measured_twice() -> None:
    request = small_request()
    (theirs,), _ = torchrec_candidate(request, [])
    best = AutoCandidate(name="predicted best", shapes=theirs.shapes, load=theirs.load)
    assert torchrec_candidate(request, [best]) == ([], [f"{TORCHREC} is the same as predicted best"])


def test_where_torchrec_finds_no_plan_auto_goes_on_without_it() -> None:
    found, (note,) = torchrec_candidate(small_request(memory_bytes=GIB // 4), [])
    assert found == []
    assert note.startswith("TorchRec's plan: there is none: TorchRec's planner finds no plan for 5 tables")


@pytest.mark.parametrize("error", [ZeroDivisionError("a topology of no hosts"), PlanError("no way")])
def test_a_fault_of_torchrecs_planner_is_told_and_ends_nothing(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(request: object, limit_seconds: int) -> TorchRecPlan:
        raise error

    monkeypatch.setattr(auto_choice, "torchrec_plan", fail)
    found, (note,) = torchrec_candidate(small_request(), [])
    assert found == []
    assert note.startswith("TorchRec's plan: there is none: ")
    assert str(error) in note


def test_a_planner_that_is_stopped_by_the_clock_gives_its_best_so_far_and_that_is_told() -> None:
    request = small_request(ranks=256)
    (found,), (note,) = torchrec_candidate(request, [], limit_seconds=1)
    assert OurCosts(request).load(found.shapes).fits
    assert note.startswith("TorchRec's plan is the best that its planner had after ")


@pytest.mark.parametrize(
    ("kind", "columns", "settings", "why"),
    [
        ("table_wise", None, {"memory_bytes": 6 * GIB}, "its fullest rank needs "),
        ("column_wise", 16, {"wide": True}, "it has column shards narrower than 32"),
        ("table_wise", None, {"types": {"wide": ("row_wise",)}}, "table wide is table_wise there"),
    ],
)
def test_a_plan_that_may_not_be_kept_is_not_measured(
    kind: str, columns: int | None, settings: dict[str, object], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _making(monkeypatch, kind, columns)
    found, (note,) = torchrec_candidate(small_request(**settings), [], least_columns=32)  # type: ignore[arg-type]
    assert found == []
    assert note.startswith(f"TorchRec's plan: not measured, {why}")
