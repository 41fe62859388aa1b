"""Multi-hot columns from generated text to an evaluated model, through the command line alone."""

import json
from pathlib import Path

import pytest

from tests.support.command_line import run_json


def test_multi_hot_columns_go_from_text_to_an_evaluated_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, dataset, run = tmp_path / "raw", tmp_path / "dataset", tmp_path / "run"
    run_json(capsys, "synth", raw, "--rows", 18_000, "--days", 3, "--multi-hot", "C3=5,C20=3")
    flag = json.loads((raw / "synthetic.json").read_text())["preprocess_flag"].split()
    assert flag == ["--multi-hot", "C3,C20"]
    made = run_json(capsys, "preprocess", raw, "--out", dataset, *flag)
    columns = {column["name"]: column for column in made["columns"]}
    assert [name for name, column in columns.items() if column["multi_hot"]] == ["C3", "C20"]
    assert columns["C3"]["statistics"]["pooling"] == pytest.approx(5, rel=0.1)
    assert columns["C20"]["statistics"]["pooling"] == pytest.approx(3, rel=0.3)
    assert columns["C1"]["statistics"]["pooling"] == 1
    settings = ("data.batch_size=256", "train.log_every_steps=1000", f"data.path={dataset}", f"run.path={run}")
    sets = [word for setting in settings for word in ("--set", setting)]
    trained = run_json(capsys, "train", "sample", *sets, "--nproc", "2")
    assert trained["state"] == "finished"
    assert trained["rows"] == made["split_rows"]["train"]
    evaluated = run_json(capsys, "evaluate", run, "--nproc", "1")
    assert evaluated["rows"] == made["split_rows"]["validation"]
    assert evaluated["auc"] > 0.6
    assert evaluated["logloss"] == pytest.approx(trained["validation"]["logloss"], rel=1e-5)
