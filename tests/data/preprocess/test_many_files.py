"""More files than a process may have open."""

import os
import subprocess
import sys
from pathlib import Path

from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.data.recently_opened import RecentlyOpened
from tests.support.raw_rows import make_rows, write_rows

FILES = 120

_WITH_100_DESCRIPTORS = """
import os, resource, sys
from pathlib import Path

# Nothing dies here, and hundreds of small files are written.
os.fsync = lambda descriptor: None

resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.data.preprocess.preprocess import PreprocessOptions, preprocess

folder = Path(sys.argv[1])
days = sorted(folder.glob("day_*.tsv"))
preprocess(days, folder / "dataset", PreprocessOptions())
dataset = Dataset.open(folder / "dataset")
# Twice, so that the first parts are opened again.
for part in [*range(len(days))] * 2:
    print(part, dataset.read(part, 0).labels.tolist())
"""


def test_more_files_than_descriptors_are_preprocessed_and_read(tmp_path: Path) -> None:
    labels = {}
    for day in range(FILES):
        rows = make_rows(3 + day % 5, seed=day)
        write_rows(tmp_path / f"day_{day:03}.tsv", rows)
        labels[day] = [int(row[:1]) for row in rows]
    done = subprocess.run(
        [sys.executable, "-c", _WITH_100_DESCRIPTORS, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{day} {labels[day]}" for _ in range(2) for day in range(FILES)]
    # What all files together hold was counted.
    statistics = Dataset.open(tmp_path / "dataset").manifest.columns[0].statistics
    assert statistics["rows"] == sum(len(labels[day]) for day in range(FILES - 1))


def test_the_least_recently_used_file_is_closed(tmp_path: Path) -> None:
    closed: list[str] = []
    opened: RecentlyOpened[str] = RecentlyOpened(closed.append, most=2)
    for key in ("a", "b", "a", "c", "a", "b"):
        assert opened.get(key, lambda key=key: key) == key
    assert closed == ["b", "c"]
    opened.close()
    assert sorted(closed) == ["a", "b", "b", "c"]


def test_a_file_that_cannot_be_opened_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "late"
    opened: RecentlyOpened[int] = RecentlyOpened(os.close, most=1)
    for content in (None, b"here"):
        if content is not None:
            path.write_bytes(content)
        try:
            assert os.pread(opened.get(path, lambda: os.open(path, os.O_RDONLY)), 9, 0) == content
        except FileNotFoundError:
            assert content is None
    opened.close()
