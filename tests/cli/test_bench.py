"""`dlrm-scale bench`: wrong calls are refused before anything starts; a right one leaves its folder."""

import json
from pathlib import Path

import pytest

from dlrm_scale.planning.cluster.cluster_file import save_cluster
from dlrm_scale.planning.tables.tables_file import save_tables
from tests.planning.costs.small_cluster import small_cluster
from tests.planning.measuring.small_bench import SMALL_SET
from tests.support.command_line import run_command, run_json


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    tables, cluster = tmp_path / "tables.toml", tmp_path / "cluster.toml"
    save_tables(SMALL_SET, tables)
    save_cluster(small_cluster(), cluster)
    return tables, cluster


def test_wrong_calls_are_refused_with_a_remedy(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables, cluster = files
    (tmp_path / "taken").mkdir()
    for arguments, words in (
        ([], "name either --tables or --data"),
        (["--tables", tables, "--data", "sample"], "name either --tables or --data"),
        (["--tables", tables], "--cluster is missing"),
        (["--tables", tables, "--cluster", cluster, "-o", tmp_path / "taken"], "exists already"),
        (["--tables", tables, "--cluster", cluster, "--rounds", "9", "--quick"], "contradict"),
        (["--tables", tables, "--cluster", cluster, "--plans", "row_wise,best"], "--plans best"),
        (["--tables", tables, "--cluster", "h100x8", "--plans", "row_wise"], "describes cuda ranks"),
        (["--data", tables, "--cluster", cluster], "names no config"),
        (["--tables", tables, "--cluster", cluster, "--plan", tmp_path / "no.json"], "no.json: No such file"),
        (["--tables", tables, "--cluster", cluster, "-o", "/proc/out"], "/proc/out can't be written"),
    ):
        assert run_command("bench", *arguments) == 2, words
        printed = capsys.readouterr().err
        assert words in printed
        assert "remedy:" in printed


def test_it_exits_with_3_where_no_plan_is_feasible(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = tmp_path / "tiny.toml"
    save_cluster(small_cluster(memory_bytes=4096), cluster)
    assert run_command("bench", "--tables", files[0], "--cluster", cluster, "--plans", "row_wise,longest_first") == 3
    printed = capsys.readouterr().err
    assert "row_wise: rank" in printed
    assert "2.0 KiB are there" in printed


@pytest.mark.slow
def test_a_benchmark_ranks_plans_and_writes_its_folder(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables, cluster = files
    names = "longest_first,row_wise,column_wise,small_data_parallel"
    out = tmp_path / "out"
    found = run_json(
        capsys, "bench", "--tables", tables, "--cluster", cluster, "--plans", names, "--rounds", "4", "-o", out,
        "--batch-size-per-rank", "16",
    )  # fmt: skip
    assert {plan["name"] for plan in found["plans"] if plan["time"]} == {
        "longest_first",
        "row_wise",
        "small_data_parallel",
    }
    assert "row state" in next(plan["reason"] for plan in found["plans"] if plan["name"] == "column_wise")
    assert found["rounds"] == 4
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert sum(line["kind"] == "round" for line in lines) == 12
    assert "<svg" in (out / "index.html").read_text()
    assert sorted(path.name for path in (out / "plans").iterdir()) == [
        "longest_first.json",
        "row_wise.json",
        "small_data_parallel.json",
    ]
