"""The command `dlrm-scale synth`."""

import json
from pathlib import Path

import pytest

from dlrm_scale.cli.app import main


def _run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["synth", *map(str, arguments)])
    output = capsys.readouterr()
    return int(ended.value.code or 0), output.out, output.err


def test_synth_prints_a_summary_and_does_nothing_the_second_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (tmp_path / "raw", "--rows", 400, "--days", 2, "--gzip")
    code, out, err = _run(capsys, *arguments)
    assert (code, err) == (0, "")
    assert "day_1.tsv.gz" in out
    assert "wrote 400 rows" in out
    code, out, _ = _run(capsys, *arguments)
    assert code == 0
    assert "already holds these files; nothing written" in out


def test_synth_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(capsys, tmp_path, "--rows", 400, "--days", 2, "--preset", "terabyte", "--json")
    summary = json.loads(out)
    assert code == 0
    assert summary["written"] is True
    assert summary["parameters"]["preset"] == "terabyte"
    stored = json.loads((tmp_path / "synthetic.json").read_text())
    assert {key: summary[key] for key in stored} == stored


def test_synth_names_a_wrong_argument_with_its_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = _run(capsys, tmp_path, "--rows", 3, "--days", 4)
    assert code == 2
    assert "3 rows can't fill 4 days" in err
    assert "remedy: give --rows 4 or more, or fewer --days" in err
    assert list(tmp_path.iterdir()) == []


def test_synth_writes_bags_and_names_the_next_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "my raw"
    code, text, _ = _run(capsys, out, "--rows", 200, "--days", 1, "--multi-hot", "C20=12,C3=5")
    assert code == 0
    assert f"next: dlrm-scale preprocess '{out}' --multi-hot C3,C20 --out DATASET" in text
    assert max(line.split("\t")[33].count(",") for line in (out / "day_0.tsv").read_text().splitlines()) > 12
    code, _, err = _run(capsys, out, "--multi-hot", "C3")
    assert code == 2
    assert "remedy: give --multi-hot mlperf, or columns with their mean" in err
