"""`dlrm-scale preprocess` and `dlrm-scale dataset`."""

import json
from pathlib import Path

import pytest

from dlrm_scale.cli import main
from tests.support.raw_rows import make_rows, write_rows


def _run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


def test_preprocess_prints_a_summary_and_says_up_to_date_the_second_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = write_rows(tmp_path / "x.tsv", make_rows(70)), tmp_path / "out"
    code, text, _ = _run(capsys, "preprocess", file, "--out", out)
    assert code == 0
    assert "70 rows in 1 parts" in text
    assert "train 60, validation 10, test 0" in text
    assert "C26" in text
    code, text, _ = _run(capsys, "preprocess", file, "--out", out)
    assert (code, text) == (0, f"{out}: up to date, 70 rows\n")


def test_json_holds_the_splits_and_the_statistics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = write_rows(tmp_path / "x.tsv", [*make_rows(70), b"bad"]), tmp_path / "out"
    code, text, err = _run(capsys, "preprocess", file, "--out", out, "--max-bad-rows", 1, "--json")
    about = json.loads(text)
    assert code == 0
    assert (about["rows"], about["up_to_date"]) == (70, False)
    assert about["split_rows"] == {"train": 61, "validation": 9, "test": 0}
    assert set(about["columns"][0]["statistics"]) >= {"missing_rate", "unique_ids", "coverage", "hot_row_curve"}
    assert "note: 1 bad rows were left out" in err
    code, text, _ = _run(capsys, "dataset", "show", out, "--json")
    assert json.loads(text)["fingerprint"] == about["fingerprint"]


def test_hash_options_reach_the_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_rows(tmp_path / "x.tsv", make_rows(20))
    options = ("--vocabulary", "hash", "--max-rows-per-table", 33, "--validation", "none", "--jobs", 1)
    code, text, _ = _run(capsys, "preprocess", file, "--out", tmp_path / "out", *options, "--json")
    about = json.loads(text)
    assert code == 0
    assert {(column["method"], column["table_rows"]) for column in about["columns"]} == {("hash", 33)}
    assert about["split_rows"]["train"] == 20


def test_a_bad_row_is_one_message_and_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = make_rows(3)
    file = write_rows(tmp_path / "x.tsv", [*rows, rows[0].rsplit(b"\t", 1)[0]])
    code, out, err = _run(capsys, "preprocess", file, "--out", tmp_path / "out")
    assert (code, out) == (1, "")
    assert err.startswith(f"error: bad row: {file}, line 4, column row: expected 40 tab-separated fields, found 39")
    assert "--pad-short-rows" in err
    assert "Traceback" not in err
    code, _, err = _run(capsys, "preprocess", file, "--out", tmp_path / "out", "--pad-short-rows")
    assert code == 0
    assert "1 short rows were padded" in err


def test_contradicting_options_exit_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_rows(tmp_path / "x.tsv", make_rows(3))
    code, _, err = _run(capsys, "preprocess", file, "--out", tmp_path / "out", "--vocabulary", "modulo")
    assert code == 2
    assert "add --max-rows-per-table N" in err


def test_verify_and_vocabulary_from_notice_missing_damaged_and_foreign_vocabularies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out, other = write_rows(tmp_path / "x.tsv", make_rows(70)), tmp_path / "out", tmp_path / "other"
    assert _run(capsys, "preprocess", file, "--out", out)[0] == 0
    assert _run(capsys, "preprocess", file, "--out", other, "--threshold", 3)[0] == 0
    vocabulary = out / "vocabulary-C3.parquet"
    whole = vocabulary.read_bytes()
    for content, says in (
        (None, "vocabulary-C3.parquet"),
        (b"x" * 100, "vocabulary-C3.parquet"),
        ((other / "vocabulary-C3.parquet").read_bytes(), "not those that the dataset was made with"),
    ):
        vocabulary.unlink()
        if content is not None:
            vocabulary.write_bytes(content)
        for command in (
            ("dataset", "verify", out),
            ("preprocess", file, "--out", tmp_path / "new", "--vocabulary-from", out),
        ):
            code, _, err = _run(capsys, *command)
            assert (code, says in err) == (1, True), err
        vocabulary.write_bytes(whole)
    assert _run(capsys, "dataset", "verify", out)[0] == 0


def test_verify_passes_whole_datasets_and_names_damaged_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = write_rows(tmp_path / "x.tsv", make_rows(20)), tmp_path / "out"
    _run(capsys, "preprocess", file, "--out", out)
    code, text, _ = _run(capsys, "dataset", "verify", out)
    assert code == 0
    assert ": ok, 1 parts" in text
    code, text, _ = _run(capsys, "dataset", "verify", out, "--json")
    assert json.loads(text)["ok"] is True
    part = out / "part-00000.arrow"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    code, _, err = _run(capsys, "dataset", "verify", out)
    assert code == 1
    assert "part-00000.arrow" in err
    code, _, err = _run(capsys, "dataset", "show", tmp_path / "absent")
    assert code == 1
    assert "no such folder" in err
