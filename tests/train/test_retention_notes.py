"""A run that keeps a single chain is told what that costs, when it starts and in a dry run."""

from pathlib import Path

import pytest

from tests.support.command_line import run_command, run_json
from tests.support.datasets import make_dataset
from tests.support.training import SMALL_MODEL


@pytest.mark.parametrize(("keep", "warnings"), [(1, 1), (2, 0)])
def test_a_single_chain_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keep: int, warnings: int
) -> None:
    make_dataset(tmp_path / "data", 64, table_rows=[50] * 26, split={"train": [(0, 64)], "validation": []})
    values = [f"run.path={tmp_path / 'run'}", f"data.path={tmp_path / 'data'}", *SMALL_MODEL]
    values += [f"checkpoint.keep_baselines={keep}", "train.max_steps=1"]
    words = ["train", "sample", "--nproc", "1", *(word for value in values for word in ("--set", value))]
    said = "one damaged file of its baseline loses every checkpoint"
    found = run_json(capsys, *words, "--dry-run")
    assert sum(said in note for note in found["notes"]) == warnings
    assert run_command(*words) == 0
    told = capsys.readouterr()
    assert (told.out + told.err).count(said) == warnings
