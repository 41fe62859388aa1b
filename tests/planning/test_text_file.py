"""The planner's files: what can't be read or written is said before anything is done."""

import os
from pathlib import Path

import pytest

from dlrm_scale.errors import ConfigError
from dlrm_scale.planning.text_file import check_new, check_outputs, read_values, value_text, write_text


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", '{"a": ' + "9" * 5000 + "}", "4300 digits"),
        ("a.toml", "a = " + "9" * 5000, "4300 digits"),
        ("a.json", '{"a": ' + "[" * 200_000, "too deep to read"),
    ],
)
def test_what_python_does_not_read_is_a_message(name: str, text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=words) as error:
        read_values(tmp_path / name)
    assert error.value.remedy


def test_one_file_under_two_names_is_refused_and_two_files_are_not(tmp_path: Path) -> None:
    file, link = tmp_path / "a", tmp_path / "b"
    file.write_text("kept")
    link.symlink_to(file)
    with pytest.raises(ConfigError, match="-o and --html name the same file"):
        check_outputs({"-o": file, "--html": link}, force=True)
    check_outputs({"-o": tmp_path / "c", "--html": tmp_path / "d", "--more": None}, force=False)
    assert file.read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_folder_that_takes_no_files_is_told_beforehand() -> None:
    with pytest.raises(ConfigError, match=r"/proc/x\.json can't be written") as error:
        check_new(Path("/proc/x.json"), force=False)
    assert "name a file in a folder that can be written" in str(error.value.remedy)


def test_what_is_no_file_is_never_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for call in (lambda: check_new(pipe, force=True), lambda: write_text(pipe, "x", force=True)):
        with pytest.raises(ConfigError, match="is a device, pipe or socket"):
            call()
    assert pipe.is_fifo()


def test_text_of_values_is_json_and_toml_alike() -> None:
    assert value_text('a "b" \x7f ü') == '"a \\"b\\" \\u007f ü"'
    assert value_text([1, 2.5, True]) == "[1, 2.5, true]"
    with pytest.raises(ValueError, match="not JSON compliant"):
        value_text(float("nan"))
