"""`dlrm-scale plan` as a user runs it: files, exit codes, messages, and a plan that trains."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dlrm_scale.cli import main
from dlrm_scale.recipes import load_config
from dlrm_scale.sharding.plan_file import load_plan
from tests.support.datasets import make_dataset
from tests.support.training import SMALL_MODEL, log_records, run_training

_TABLES = """
name = "mine"
dim = 64
tables = [
  {name = "large", rows = 20_000_000, lookups_per_sample = 20},
  {name = "middle", rows = 300_000, lookups_per_sample = 2},
  {name = "tiny", rows = 3},
]
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["plan", *arguments])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


@pytest.fixture
def asked(tmp_path: Path) -> list[str]:
    (tmp_path / "tables.toml").write_text(_TABLES)
    return [
        *("--tables", str(tmp_path / "tables.toml"), "--cluster", "a100x8", "--world-size", "16"),
        *("--batch-size-per-rank", "512", "--effort", "0.02"),
    ]


def test_json_has_both_planners_in_both_costs_and_differs_only_in_the_timing(run: Run, asked: list[str]) -> None:
    found = []
    for _ in range(2):
        code, out, err = run(*asked, "--json", "--no-what-if")
        assert code == 0, err
        values = json.loads(out)
        for plan in values["plans"]:
            plan.pop("solve_seconds")
        found.append(values)
    assert found[0] == found[1]
    by_planner = {plan["planner"]: plan for plan in found[0]["plans"]}
    assert list(by_planner) == ["dlrm_scale", "dlrm_scale, for the costs of torchrec", "torchrec"]
    for plan in by_planner.values():
        for costs in ("dlrm_scale", "torchrec"):
            rating = plan["costs"][costs]
            assert rating["bottleneck_ms"] == pytest.approx(sum(rating["slowest_ms"].values()))
            assert rating["gap"] == pytest.approx(rating["bottleneck_ms"] / rating["bound_ms"] - 1)
            assert "objective_ms" not in rating
            assert {len(times) for times in rating["phases_ms_by_rank"].values()} == {16}
            assert {len(sizes) for sizes in rating["memory_bytes_by_rank"].values()} == {16}
    assert found[0]["timing_fields"] == ["plans[].solve_seconds"]


def test_a_plan_is_written_once_and_replaced_by_force_with_equal_bytes(
    run: Run, asked: list[str], tmp_path: Path
) -> None:
    out, page = tmp_path / "plan.json", tmp_path / "plan.html"
    arguments = [*asked, "--no-torchrec", "--no-what-if", "-o", str(out), "--html", str(page)]
    code, text, err = run(*arguments)
    assert code == 0, err
    assert f"train with --set sharding.plan={out}" in text
    first = out.read_bytes(), page.read_bytes()
    assert "allow_split_row_state" not in text
    code, _, err = run(*arguments)
    assert code == 2
    assert "plan.json exists already" in err
    wide = [*arguments, "--force", "--allow-split-row-state", "--constrain", "large=column_wise"]
    assert f"sharding.plan={out} --set sharding.allow_split_row_state=true" in run(*wide)[1]
    assert run(*arguments, "--force")[0] == 0
    assert (out.read_bytes(), page.read_bytes()) == first


def test_forced_plans_and_kinds_and_constraints_are_obeyed(run: Run, asked: list[str], tmp_path: Path) -> None:
    quick = [*asked, "--no-torchrec", "--no-what-if", "--json"]
    out = tmp_path / "rows.json"
    code, text, err = run(*quick, "--force-kind", "row_wise", "-o", str(out))
    assert code == 0, err
    assert json.loads(text)["plans"][0]["types"] == {"row_wise": 3}
    code, text, err = run(*quick, "--force-plan", str(out))
    assert code == 0, err
    forced, ours = json.loads(text)["plans"]
    assert (forced["planner"], forced["types"]) == ("forced", {"row_wise": 3})
    assert forced["costs"]["dlrm_scale"]["bottleneck_ms"] >= ours["costs"]["dlrm_scale"]["bottleneck_ms"]
    code, text, err = run(*quick, "--constrain", "large=table_wise,tiny=row_wise|table_wise")
    assert code == 0, err
    kinds = {table["table"]: table["type"] for table in json.loads(text)["plans"][0]["tables"]}
    assert kinds["large"] == "table_wise"
    assert kinds["tiny"] in ("row_wise", "table_wise")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--world-size", "0"], "--world-size 0 is not allowed"),
        (["--world-size", "8..16"], "--world-size 8..16: several numbers need --simulate"),
        (["--world-size", "12"], "12 ranks don't divide into hosts of 8"),
        (["--cluster", "a100"], "no cluster or file 'a100'"),
        (["--constrain", "larg=row_wise"], "--constrain larg: mine has no such table"),
        (["--force-kind", "row_wise", "--constrain", "tiny=row_wise"], "contradict each other"),
        (["--force-kind", "rows"], "--force-kind rows: no such sharding type; did you mean row_wise?"),
        (["--simulate", "-o", "x.json"], "-o needs one number of ranks"),
        (["--memory", "much"], "is not a size"),
        (["--memory", "9" * 400], "is too large a size"),
        (["--batch-size-per-rank", "1" + "0" * 300], "allowed are 1 to 2,147,483,647"),
        (["--world-size", "8" + "0" * 30], "at most 1,048,576 are allowed"),
        (["--world-size", "1000000000039"], "a plan for 1000000000039 ranks: at most 1,048,576 are allowed"),
        (["--world-size", "9" * 5000], "is not allowed"),
        (["--world-size", "8..8" + "0" * 30, "--simulate"], "at most 1,048,576 are allowed"),
    ],
)
def test_wrong_requests_are_refused_with_2(arguments: list[str], words: str, run: Run, asked: list[str]) -> None:
    code, _, err = run(*asked, *arguments)
    assert (code, words in err) == (2, True), err


def test_a_forced_plan_that_is_missing_or_for_other_ranks_is_refused_with_2(
    run: Run, asked: list[str], tmp_path: Path
) -> None:
    quick, path = [*asked, "--no-torchrec", "--no-what-if"], tmp_path / "plan.json"
    code, _, err = run(*quick, "--force-plan", str(path))
    assert (code, "plan.json: No such file" in err) == (2, True), err
    assert run(*quick, "-o", str(path))[0] == 0
    code, _, err = run(*quick, "--force-plan", str(path), "--world-size", "8")
    assert (code, "ranks: the plan's 16, here 8" in err) == (2, True), err


def test_a_table_without_a_legal_type_is_refused_with_3(run: Run, asked: list[str]) -> None:
    code, _, err = run(*asked, "--constrain", "large=column_wise")
    assert (code, "table large: no legal way to shard it is left" in err) == (3, True), err


def test_outputs_that_cannot_all_be_written_are_refused_before_planning(
    run: Run, asked: list[str], tmp_path: Path
) -> None:
    same, link = tmp_path / "x.json", tmp_path / "link"
    link.symlink_to(tmp_path)
    for outputs, words in (
        (["-o", str(same), "--html", str(same)], "-o and --html name the same file"),
        (["-o", str(same), "--html", str(link / "x.json")], "-o and --html name the same file"),
        (["-o", "/proc/x.json"], "/proc/x.json can't be written"),
        (["--html", str(tmp_path / ("x" * 300))], "can't be written: File name too long"),
        (["-o", "/dev/null", "--force"], "/dev/null is a device"),
    ):
        code, _, err = run(*asked, *outputs)
        assert (code, words in err) == (2, True), err
        assert "planning" not in err, "it says so before it plans"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "tables.toml"]


def test_what_is_missing_is_named(run: Run) -> None:
    for given, missing in (([], "--world-size"), (["--world-size", "8"], "--tables")):
        code, _, err = run(*given)
        assert code == 2
        assert f"{missing} is missing" in err


def test_nothing_that_fits_exits_with_3_and_tells_what_would_fit_in_json_too(run: Run, asked: list[str]) -> None:
    tight = [*asked, "--no-torchrec", "--memory", "300M", "--json"]
    code, out, err = run(*tight)
    assert code == 3
    values = json.loads(out)
    assert values["error"] == "no feasible plan"
    assert values["missing_bytes"] > 0
    memory = next(change for change in values["changes"] if change["change"] == "memory_bytes")
    assert memory["option"] in err
    code, out, err = run(*tight[:-3], "--memory", str(memory["value"]), "--json", "--no-what-if")
    assert code == 0, err


def test_a_simulation_tells_each_size_and_the_knee(run: Run, asked: list[str], tmp_path: Path) -> None:
    page = tmp_path / "sizes.html"
    code, out, err = run(*asked, "--simulate", "--world-size", "8..32", "--json", "--html", str(page))
    assert code == 0, err
    values = json.loads(out)
    assert [scale["ranks"] for scale in values["scales"]] == [8, 16, 32]
    assert values["scales"][0]["efficiency"] == 1.0
    assert values["knee"] in (8, 16, 32)
    assert "1.5 times the samples a second" in values["knee_rule"]
    assert values["wide_space_at_knee"]["ranks"] == values["knee"]
    assert values["cluster"]["source"] == "a100x8: data sheets and assumptions, nothing measured"
    assert "<svg" in page.read_text()
    code, _, err = run(*asked, "--simulate", "--world-size", "8..16", "--memory", "50M")
    assert code == 3
    assert "no sharding plan fits on any of 8, 16 devices" in err


def test_two_plans_are_told_apart(run: Run, asked: list[str], tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    quick = [*asked, "--no-torchrec", "--no-what-if", "-o"]
    assert run(*quick, str(first), "--force-kind", "table_wise")[0] == 0
    assert run(*quick, str(second), "--force-kind", "row_wise")[0] == 0
    code, out, err = run("diff", str(first), str(second), "--json")
    assert code == 0, err
    values = json.loads(out)
    assert {move["table"] for move in values["moves"]} == {"large", "middle", "tiny"}
    assert values["moves"][0]["table"] == "large"
    # 15 of 16 ranks get their 1,250,000 rows of 64 values and a state; the 16th has them
    assert values["moves"][0]["moved_bytes"] == 15 * 1_250_000 * (4 * 64 + 4)
    code, out, _ = run("diff", str(first), str(first))
    assert "every shard stays where it is" in out
    code, _, err = run("diff", str(first), str(tmp_path / "absent.json"))
    assert code == 2
    assert "absent.json: No such file" in err


def test_a_plan_for_a_dataset_trains_and_the_runs_plan_is_its_equal(run: Run, tmp_path: Path) -> None:
    dataset, plan = tmp_path / "dataset", tmp_path / "plan.json"
    make_dataset(dataset, (300,), table_rows=[3, 4, 10, 2, *[40] * 22], split={"train": [(0, 300)]})
    settings = [f"data.path={dataset}", *SMALL_MODEL]
    code, _, err = run(
        *("--tables", "sample", *(word for setting in settings for word in ("--set", setting))),
        *("--cluster", "a100x8", "--world-size", "2", "--batch-size-per-rank", "16", "--effort", "0"),
        *("--constrain", "C5=row_wise,C6=table_wise", "--no-torchrec", "--no-what-if", "-o", str(plan)),
    )
    assert code == 0, err
    tables = {table.name: table for table in load_plan(plan).tables}
    assert (tables["C5"].type, tables["C6"].type) == ("row_wise", "table_wise")
    run_training(2, tmp_path / "run", dataset, [f"sharding.plan={plan}", "train.max_steps=3"])
    assert (tmp_path / "run" / "plan.json").read_bytes() == plan.read_bytes()
    assert log_records(tmp_path / "run", "end")
    assert load_config(tmp_path / "run" / "config.toml").sharding.plan == str(plan)
    assert run("diff", str(plan), str(tmp_path / "run" / "plan.json"))[0] == 0
