"""A benchmark's folder is whole or not there."""

import json
from pathlib import Path

import pytest

from dlrm_scale.errors import ConfigError
from dlrm_scale.planning.measuring.bench_folder import bench_files, check_folder, write_folder
from dlrm_scale.planning.measuring.bench_summary import summarize
from dlrm_scale.planning.measuring.plan_rounds import RoundsResult
from dlrm_scale.sharding.plan_file import load_plan
from tests.planning.measuring.small_bench import small_bench
from tests.planning.measuring.test_bench_summary import turns


def test_results_have_a_header_a_line_a_plan_and_round_and_the_plans_can_be_trained(tmp_path: Path) -> None:
    request = small_bench(names=["longest_first", "row_wise", "column_wise"])
    result = RoundsResult(turns=turns({"longest_first": 10.0, "row_wise": 20.0}, rounds=5))
    files = bench_files(request, result, summarize(request, result, cores=2), "<html>")
    write_folder(tmp_path / "out", files, force=False)
    lines = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["header"] + ["plan"] * 3 + ["round"] * 10 + ["summary"]
    assert lines[0]["tables_fingerprint"] == request.planned.tables.fingerprint()
    assert lines[0]["cluster_fingerprint"] == request.planned.cluster_fingerprint()
    assert lines[0]["versions"]["torch"]
    plan = load_plan(tmp_path / "out/plans/row_wise.json")
    assert [table.type for table in plan.tables] == ["row_wise"] * 4
    assert plan.prediction is not None
    assert plan.prediction.step_ms == pytest.approx(request.predictions["row_wise"].ours.step_ms, rel=1e-4)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_older_benchmark_is_replaced_only_by_force_and_nothing_else_ever(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    write_folder(folder, {"results.jsonl": "old\n", "more/old.json": ""}, force=False)
    with pytest.raises(ConfigError, match="exists already"):
        write_folder(folder, {"results.jsonl": "new\n"}, force=False)
    assert (folder / "results.jsonl").read_text() == "old\n"
    write_folder(folder, {"results.jsonl": "new\n"}, force=True)
    assert (folder / "results.jsonl").read_text() == "new\n"
    assert not (folder / "more").exists()
    (tmp_path / "photos").mkdir()
    with pytest.raises(ConfigError, match="replaces only the folder of a benchmark"):
        check_folder(tmp_path / "photos", force=True)
    with pytest.raises(ConfigError, match="doesn't exist"):
        check_folder(tmp_path / "absent/out", force=False)


def test_a_write_that_fails_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "out"
    write_folder(folder, {"results.jsonl": "old\n"}, force=False)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        write_folder(folder, {"results.jsonl": "new\n"}, force=True)
    assert (folder / "results.jsonl").read_text() == "old\n"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
