"""Ids of 80000000 and above go all the way: 32 unsigned bits, never a negative row (B01)."""

import random
from pathlib import Path

import numpy as np
import pytest

from dlrm_scale.data.dataset.dataset import Dataset
from tests.support.command_line import run_json
from tests.support.raw_rows import make_row, write_rows

ROWS = 200
_SETTINGS = (
    "model.dense_layers=[16]",
    "model.over_layers=[16, 1]",
    "data.batch_size=32",
    "train.device=cpu",
    "train.threads_per_rank=1",
    "checkpoint.every_steps=0",
    "train.epochs=2",
)


def _raw_rows() -> list[bytes]:
    """Every id is in 80000000..ffffffff; every fourth row has ffffffff in all columns, the one after it 80000000."""
    source = random.Random(1)
    pools = [[source.randrange(0x80000000, 0x100000000) for _ in range(6)] for _ in range(26)]
    return [
        make_row(
            row % 2,
            [source.randrange(50) for _ in range(13)],
            [{0: 0xFFFFFFFF, 1: 0x80000000}.get(row % 4, source.choice(pool)) for pool in pools],
        )
        for row in range(ROWS)
    ]


def _ids(dataset: Path) -> np.ndarray:
    opened = Dataset.open(dataset)
    return np.concatenate([opened.read(part, 0)[2] for part in range(len(opened.manifest.parts))], axis=1)


def _overrides(*settings: str) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


@pytest.mark.parametrize(
    "method",
    [
        ("--vocabulary", "frequency", "--threshold", "1"),
        ("--vocabulary", "hash", "--max-rows-per-table", "50"),
        ("--vocabulary", "modulo", "--max-rows-per-table", "50"),
    ],
    ids=["frequency", "hash", "modulo"],
)
def test_the_highest_ids_have_one_row_everywhere_and_train_evaluate_and_resume(
    method: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = write_rows(tmp_path / "rows.tsv", _raw_rows())
    dataset, later, run = tmp_path / "dataset", tmp_path / "later", tmp_path / "run"
    made = run_json(capsys, "preprocess", raw, "--out", dataset, "--validation", "0.2", *method)
    table_rows = np.array([column["table_rows"] for column in made["columns"]])
    ids = _ids(dataset)
    assert ids.shape == (26, ROWS)
    assert (ids >= 2).all()  # neither missing nor unknown, and no sign bit
    assert (ids < table_rows[:, None]).all()
    highest, lowest = ids[:, 0], ids[:, 1]
    assert (ids[:, 0::4] == highest[:, None]).all()
    assert (ids[:, 1::4] == lowest[:, None]).all()
    if method[1] == "modulo":
        assert set(highest) == {2 + 0xFFFFFFFF % 48}
        assert set(lowest) == {2 + 0x80000000 % 48}
    else:
        assert (highest != lowest).sum() >= 24  # a hash may collide

    # the same mapping on new rows: ffffffff, 80000000, and one that training never saw
    new = [make_row(0, (), [value] * 26) for value in (0xFFFFFFFF, 0x80000000, 0xFFFFFFFE)]
    run_json(
        capsys,
        *("preprocess", write_rows(tmp_path / "new.tsv", new), "--out", later),
        *("--vocabulary-from", dataset, "--validation", "none"),
    )
    mapped = _ids(later)
    assert np.array_equal(mapped[:, 0], highest)
    assert np.array_equal(mapped[:, 1], lowest)
    assert ((mapped >= 0) & (mapped < table_rows[:, None])).all()
    if method[1] == "frequency":
        assert (mapped[:, 2] == 1).all()

    places = (f"run.path={run}", f"data.path={dataset}")
    trained = run_json(
        capsys,
        *("train", "sample", "--nproc", "1"),
        *_overrides(*places, *_SETTINGS, "sharding.kind=table_wise", "train.max_steps=6"),
    )
    assert (trained["step"], trained["state"]) == (6, "finished")
    evaluated = run_json(capsys, "evaluate", run, "--nproc", "1")
    assert evaluated["rows"] == 40
    assert np.isfinite(evaluated["logloss"])
    assert run_json(capsys, "evaluate", run, "--data", later, "--split", "train", "--nproc", "1")["rows"] == 3
    resumed = run_json(
        capsys,
        *("train", "--resume", "auto", "--nproc", "1"),
        *_overrides(f"run.path={run}", "sharding.kind=row_wise", "train.max_steps=10"),
    )
    assert (resumed["start_step"], resumed["step"]) == (6, 10)
