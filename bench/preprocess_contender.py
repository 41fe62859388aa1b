"""One measured run of one contender of `preprocess.py`, in a process of its own, so that peak memory is its own.

    python preprocess_contender.py '{"name": …, "files": […], "warm_up_files": […], "options": {…}}'

prints one line of JSON. The contender runs once on the small files first: imports and numba's compiling (or loading
from its cache) stay out of the times, not out of the peak memory.
"""

import contextlib
import dataclasses
import io
import json
import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import preprocess_peers as peers

Options = dict[str, Any]
Contender = Callable[[list[Path], Path, Options], object]


def main() -> None:
    """Run what the argument says."""
    request = json.loads(sys.argv[1])
    run, options = CONTENDERS[request["name"]], request["options"]
    files, warm_up_files = ([Path(file) for file in request[name]] for name in ("files", "warm_up_files"))
    with tempfile.TemporaryDirectory(dir=request["folder"]) as folder:
        out = Path(folder)
        for name in ("warm-up", "measured"):
            (out / name).mkdir()
        if request["name"] != "dlrm_scale command":
            run(warm_up_files, out / "warm-up", options)
        before_bytes = _memory_bytes("VmHWM")
        cpu, wall = cpu_seconds(), time.perf_counter()
        run(files, out / "measured", options)
        cpu, wall = cpu_seconds() - cpu, time.perf_counter() - wall
    found = {"cpu_seconds": cpu, "seconds": wall, "peak_bytes": _memory_bytes("VmHWM"), "before_bytes": before_bytes}
    sys.stdout.write(json.dumps(found) + "\n")


def cpu_seconds() -> float:
    """Processor time of all threads and of processes that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _memory_bytes(entry: str) -> int:
    # Not ru_maxrss, which a child inherits from the process that forked it.
    match = re.search(rf"{entry}:\s*(\d+)", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def parse_and_transform(files: list[Path], folder: Path, options: Options, *, keep: bool = False) -> list[Any]:
    """Read rows and make features, on one thread; ids stay raw. Nothing is written."""
    from dlrm_scale.data.preprocess.transforms import dense_features
    from dlrm_scale.data.source.tsv import TextSource

    kept = []
    for file in files:
        with TextSource(file) as source:
            for piece in source.pieces():
                block = source.parse(piece)
                _equal("a synthetic file's rows", not block.bad_rows)
                dense = dense_features(block.integers)
                if keep:
                    kept.append((dense.T, block.categories.T))
    return kept


def dataset(files: list[Path], folder: Path, options: Options) -> None:
    """Call what `dlrm-scale preprocess` calls."""
    from dlrm_scale.data.preprocess.preprocess import PreprocessOptions, preprocess

    known = {field.name for field in dataclasses.fields(PreprocessOptions)}
    if unknown := options.keys() - known:
        raise SystemExit(f"skipped: preprocess has no option {', '.join(unknown)}")
    preprocess(files, folder / "dataset", PreprocessOptions(**options))


def command(files: list[Path], folder: Path, options: Options) -> None:
    """Run a `dlrm-scale` command in this process, which holds nothing else; `{input}` and `{folder}` are filled in."""
    from dlrm_scale.cli import main as run

    arguments: list[str] = []
    for word in options["arguments"]:
        arguments += map(str, files) if word == "{input}" else [word.replace("{folder}", str(folder))]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            run(arguments)
        except SystemExit as end:
            code = end.code
    if code == 2:
        raise SystemExit(f"skipped: {' '.join(said.getvalue().split())}")
    if code:
        raise SystemExit(said.getvalue())


def check(files: list[Path], folder: Path, options: Options) -> None:
    """Raise unless all contenders make the same of a small input: features, raw ids, and who shares a table row."""
    from dlrm_scale.data.dataset.dataset import Dataset

    blocks = parse_and_transform(files, folder, {}, keep=True)
    dense, ids = (np.concatenate([block[k] for block in blocks]) for k in (0, 1))
    for name, read in (("pandas", peers.pandas_read), ("polars", peers.polars_read)):
        try:
            peer_dense, peer_ids = read(files, folder)
        except ImportError:
            continue
        _equal(f"{name}'s features", bool(np.allclose(peer_dense, dense, rtol=1e-6)))
        _equal(f"{name}'s ids", np.array_equal(peer_ids, ids))
    # Counting over all days, as torchrec does.
    dataset(files, folder, {"vocabulary": "frequency", "threshold": 2, "validation": "none"})
    ours = Dataset.open(folder / "dataset")
    rows = np.concatenate([ours.read(part, 0)[2].T for part in range(len(files))])
    for name, pipeline in (("full", peers.per_row_pipeline), ("lean", peers.lean_per_row_pipeline)):
        (folder / name).mkdir()
        pipeline(files, folder / name, 2)
        parts = [np.load(folder / name / f"day_{day}_mapped.npz") for day in range(len(files))]
        _equal(
            "a per-row pipeline's features", np.array_equal(np.concatenate([part["dense"] for part in parts]), dense)
        )
        _equal("a per-row pipeline's ids", _same_sharing(rows, np.concatenate([part["ids"] for part in parts]), 0))
    try:
        peers.torchrec_three_steps(files, folder, 2)
    except ImportError:
        return
    raw = np.concatenate([np.load(folder / "npys" / f"day_{day}_sparse.npy") for day in range(len(files))])
    _equal("torchrec's ids", np.array_equal(raw.astype(np.uint32), ids))
    parts = [np.load(folder / "contiguous" / f"day_{day}_sparse.npy") for day in range(len(files))]
    _equal("torchrec's contiguous ids", _same_sharing(rows, np.concatenate(parts), 1))


def _same_sharing(ours: Any, theirs: Any, their_rare: int) -> bool:
    """Whether ids that are there are rare together, and frequent ones correspond one to one, in each column."""
    for column in range(ours.shape[1]):
        there = ours[:, column] != 0
        mine, other = ours[there, column], theirs[there, column]
        if not np.array_equal(mine == 1, other == their_rare):
            return False
        pairs = np.unique(np.stack([mine, other]), axis=1)
        if any(len(np.unique(side)) != pairs.shape[1] for side in pairs):
            return False
    return True


def _equal(what: str, equal: bool) -> None:
    if not equal:
        raise SystemExit(f"{what} aren't those that they should be")


CONTENDERS: dict[str, Contender] = {
    "check": check,
    "dlrm_scale parse": parse_and_transform,
    "dlrm_scale dataset": dataset,
    "dlrm_scale command": command,
    "torchrec tsv_to_npys": lambda files, folder, options: peers.torchrec_tsv_to_npys(files, folder),
    "torchrec three steps": lambda files, folder, options: peers.torchrec_three_steps(files, folder, **options),
    "pandas": lambda files, folder, options: peers.pandas_read(files, folder),
    "polars": lambda files, folder, options: peers.polars_read(files, folder),
    "per-row pipeline": lambda files, folder, options: peers.per_row_pipeline(files, folder, **options),
    "lean per-row pipeline": lambda files, folder, options: peers.lean_per_row_pipeline(files, folder, **options),
    "facebookresearch/dlrm": lambda files, folder, options: peers.facebookresearch_dlrm(files, folder, **options),
}

if __name__ == "__main__":
    main()
