"""Tables files: what hands write, what programs write, and what is said of mistakes."""

from pathlib import Path

import pytest

from dlrm_scale.errors import ConfigError
from dlrm_scale.planning.tables.table_set import TableSet, TableStats
from dlrm_scale.planning.tables.tables_file import read_tables, save_tables

_SET = TableSet(
    name='quotes " and ünïcode',
    optimizer="adam",
    source="two\nlines, \x7f",
    tables=(
        TableStats(name="C1", rows=2**31, dim=128, lookups_per_sample=1e-07, lookups_per_sample_p99=1.0),
        TableStats(
            name="C 2 😀",
            rows=1000,
            dim=4,
            pooling="mean",
            lookups_per_sample=2.5,
            unique_rows=((64, 150.25), (512, 700.5)),
            hot_rows=((1, 0.25), (10, 0.5)),
            lookups_before_row=((7, 0.0), (8, 0.25)),
        ),
    ),
)


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_a_saved_set_reads_back_equal_and_has_equal_bytes(tmp_path: Path, suffix: str) -> None:
    first, second = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    save_tables(_SET, first)
    assert read_tables(first) == _SET
    save_tables(read_tables(first), second)
    assert first.read_bytes() == second.read_bytes()
    lines = first.read_text().split("\n")
    assert sum("rows" in line for line in lines) == len(_SET.tables)


def test_a_file_by_hand_needs_little(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('dim = 8\ntables = [\n {name = "a", rows = 1_000},\n {name = "b", rows = 5, dim = 4}, # small\n]\n')
    read = read_tables(file)
    assert (read.name, read.optimizer) == ("mine", "rowwise_adagrad")
    assert [(t.name, t.rows, t.dim, t.lookups_per_sample) for t in read.tables] == [("a", 1000, 8, 1), ("b", 5, 4, 1)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{name = "C7", rows = 9, dim = 10}', "table C7 (number 1): dim = 10: must be a multiple of 4 (the nearest"),
        ('{name = "C7", rows = 9, dim = 10}', "8 or 12"),
        ('{name = "C7", rows = 9, dim = 8, lookup_per_sample = 2}', "did you mean lookups_per_sample?"),
        ('{name = "C7", rows = 9, dim = 8, pooling = "main"}', "pooling = 'main' is not allowed; did you mean mean?"),
        ('{name = "C7", dim = 8}', "table C7 (number 1): rows is absent"),
        ("{rows = 5, dim = 8}", "table number 1: name is absent"),
        ('{name = "C7", rows = 9.5, dim = 8}', "table C7 (number 1): rows = 9.5"),
        ('{name = "C7", rows = 9, dim = 8, lookups_per_sample = nan}', "lookups_per_sample"),
        ('{name = "C7", rows = 9, dim = 8, unique_rows = [[4, 5.0]]}', "(number 1): unique_rows: 4 samples have 4"),
        ('{name = "C7", rows = 9, dim = 8}, {name = "C7", rows = 9, dim = 8}', "tables 1 and 2 are both named 'C7'"),
        ('{name = "C7", rows = 9, dim = 8}]\noptimiser = "sgd" #', "unknown key 'optimiser'; did you mean optim"),
        ('{name = "C7", rows = 9, dim = 8, lookups_per_sample = 1e300}', "lookups_per_sample = 1e+300: Input"),
        ('{name = "C7", rows = 1' + "0" * 300 + ", dim = 8}", "… (301 characters): allowed are 1 to 2,147,483,648"),
        ('{name = "C\\n7", rows = 9, dim = 8}', "character 2 is the control character '\\n'; names are of one line"),
        ('{name = "C\\u001b[31m", rows = 9, dim = 8}', "character 2 is the control character '\\x1b'"),
        ("", "tables has 0 entries; at least 1 needed"),
        ("3", "table number 1: "),
    ],
)
def test_a_mistake_is_named_with_file_table_key_and_remedy(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f"tables = [{text}]\n".replace("#]", ""))
    with pytest.raises(ConfigError) as refused:
        read_tables(file)
    assert said in refused.value.message
    assert str(file) in refused.value.message
    assert refused.value.remedy
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.toml", b"tables = [", "not valid TOML"),
        ("a.json", b"{", "not valid JSON"),
        ("a.json", b"[]", "found list"),
        ("a.toml", b"\xff", "not UTF-8"),
        ("a.csv", b"", "ends in .toml or .json"),
        ("a.toml", b"format_version = 2", "this dlrm-scale reads 1"),
    ],
)
def test_what_is_no_tables_file_is_refused(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_tables(tmp_path / name)


def test_an_existing_file_is_replaced_by_force_alone(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("kept")
    with pytest.raises(ConfigError, match="exists already"):
        save_tables(_SET, file)
    assert file.read_text() == "kept"
    save_tables(_SET, file, force=True)
    assert read_tables(file) == _SET
    assert [f.name for f in tmp_path.iterdir()] == ["a.toml"]
