"""The other ways to preprocess Criteo rows that `preprocess.py` measures; each as its own users would write it.

Each function takes raw files, one a day, and an empty folder, and leaves arrays or files behind. The two that read
into memory return (dense float32, ids) for a check of equal work.
"""

import contextlib
import io
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "facebookresearch_dlrm",
    "lean_per_row_pipeline",
    "pandas_read",
    "per_row_pipeline",
    "polars_read",
    "torchrec_three_steps",
    "torchrec_tsv_to_npys",
]

INTEGERS = 13
CATEGORIES = 26
Arrays = tuple[npt.NDArray[np.float32], npt.NDArray[Any]]


def torchrec_tsv_to_npys(files: list[Path], folder: Path) -> None:
    """`torchrec.datasets.criteo.BinaryCriteoUtils.tsv_to_npys`, as `npy_preproc_criteo.py` calls it for each day."""
    from torchrec.datasets.criteo import BinaryCriteoUtils

    for day, file in enumerate(files):
        dense, sparse, labels = (str(folder / f"day_{day}_{part}.npy") for part in ("dense", "sparse", "labels"))
        BinaryCriteoUtils.tsv_to_npys(str(file), dense, sparse, labels)


def torchrec_three_steps(files: list[Path], folder: Path, threshold: int) -> None:
    """`tsv_to_npys`, `sparse_to_contiguous` and `shuffle`: the three scripts that torchrec's DLRM example names.

    The last file is the validation day, which `shuffle` copies. Leaves `contiguous/` and `shuffled/`.
    """
    from torchrec.datasets.criteo import BinaryCriteoUtils

    for name in ("npys", "contiguous", "shuffled"):
        (folder / name).mkdir()
    torchrec_tsv_to_npys(files, folder / "npys")
    days = len(files)
    rows = {day: len(np.load(folder / "npys" / f"day_{day}_labels.npy")) for day in range(days - 1)}
    # They report every file on standard output.
    with contextlib.redirect_stdout(io.StringIO()):
        BinaryCriteoUtils.sparse_to_contiguous(
            [str(folder / "npys" / f"day_{day}_sparse.npy") for day in range(days)],
            str(folder / "contiguous"),
            frequency_threshold=threshold,
            output_file_suffix=".npy",
        )
        BinaryCriteoUtils.shuffle(
            str(folder / "npys"), str(folder / "contiguous"), str(folder / "shuffled"), rows, days=days
        )


def pandas_read(files: list[Path], folder: Path) -> Arrays:
    """`read_csv` with the C engine; ids as categoricals, so that each distinct text is converted once."""
    import pandas as pd

    integers = range(1, 1 + INTEGERS)
    categories = range(1 + INTEGERS, 1 + INTEGERS + CATEGORIES)
    dtypes: Any = {0: "int8", **dict.fromkeys(integers, "float64"), **dict.fromkeys(categories, "category")}
    dense, ids = [], []
    for file in files:
        frame = pd.read_csv(file, sep="\t", header=None, dtype=dtypes, engine="c")
        values = frame[list(integers)].to_numpy()
        dense.append(np.log1p(np.maximum(np.nan_to_num(values), 0)).astype(np.float32))
        columns = np.empty((len(frame), CATEGORIES), np.uint32)
        for place, column in enumerate(categories):
            found = frame[column].cat
            # A last entry for the code -1 of a missing id.
            numbers = np.array([*(int(text, 16) for text in found.categories), 0], np.uint32)
            columns[:, place] = numbers[found.codes.to_numpy()]
        ids.append(columns)
    return np.concatenate(dense), np.concatenate(ids)


def polars_read(files: list[Path], folder: Path) -> Arrays:
    """`read_csv`, ids by `str.to_integer(base=16)`."""
    import polars as pl

    names = [f"column_{k}" for k in range(1, 41)]
    integers, categories = names[1 : 1 + INTEGERS], names[1 + INTEGERS :]
    schema: Any = {names[0]: pl.UInt8, **dict.fromkeys(integers, pl.Int32), **dict.fromkeys(categories, pl.String)}
    dense, ids = [], []
    for file in files:
        frame = pl.read_csv(file, separator="\t", has_header=False, schema=schema)
        frame = frame.with_columns(
            pl.col(integers).fill_null(0).clip(0).cast(pl.Float64).log1p().cast(pl.Float32),
            pl.col(categories).str.to_integer(base=16, dtype=pl.UInt32).fill_null(0),
        )
        dense.append(frame.select(integers).to_numpy())
        ids.append(frame.select(categories).to_numpy())
    return np.concatenate(dense), np.concatenate(ids)


def per_row_pipeline(files: list[Path], folder: Path, threshold: int) -> None:
    """The stages of facebookresearch/dlrm's `data_utils.py`, written anew with a frequency threshold.

    Lines are counted; each day is split, converted into rows of numpy arrays and counted, a dictionary a column, and
    saved compressed; ids get numbers (0: too rare); each day is loaded, mapped value by value and saved compressed;
    the training days are shuffled together and saved compressed. The last file is the validation day. The logarithm,
    which the original takes while training, is taken once. Leaves `day_{k}_mapped.npz` and `shuffled.npz`.
    """
    counts: list[dict[Any, int]] = [{} for _ in range(CATEGORIES)]
    for day, file in enumerate(files):
        with file.open(encoding="ascii") as lines:
            rows = sum(1 for _ in lines)
        labels = np.zeros(rows, np.int32)
        integers = np.zeros((rows, INTEGERS), np.int32)
        ids = np.zeros((rows, CATEGORIES), np.int64)
        with file.open(encoding="ascii") as lines:
            for row, line in enumerate(lines):
                fields = [field if field not in ("", "\n") else "0" for field in line.split("\t")]
                labels[row] = np.int32(fields[0])
                integers[row] = np.array(fields[1 : 1 + INTEGERS], np.int32)
                ids[row] = np.array([int(field, 16) for field in fields[1 + INTEGERS :]], np.int64)
                for column in range(CATEGORIES):
                    number = ids[row][column]
                    counts[column][number] = counts[column].get(number, 0) + 1
        np.savez_compressed(folder / f"day_{day}.npz", labels=labels, integers=integers, ids=ids.T)
    numbers = [_numbers(counted, threshold) for counted in counts]
    for day in range(len(files)):
        with np.load(folder / f"day_{day}.npz") as arrays:
            labels, integers, ids = (arrays[name] for name in ("labels", "integers", "ids"))
        mapped = np.zeros(ids.shape, np.int32)
        for column, known in enumerate(numbers):
            for row, number in enumerate(ids[column]):
                mapped[column, row] = known.get(number, 0)
        dense = np.log1p(np.maximum(integers, 0)).astype(np.float32)
        np.savez_compressed(folder / f"day_{day}_mapped.npz", labels=labels, dense=dense, ids=mapped.T)
    _shuffle(folder, len(files) - 1, np.savez_compressed)


def lean_per_row_pipeline(files: list[Path], folder: Path, threshold: int) -> None:
    """The same work in plain Python written for speed: lists, no numpy scalars, comprehensions, nothing compressed."""
    counts: list[Counter[int]] = [Counter() for _ in range(CATEGORIES)]
    for day, file in enumerate(files):
        labels, integers, categories = [], [], []
        with file.open(encoding="ascii") as lines:
            for line in lines:
                fields = line.rstrip("\n").split("\t")
                labels.append(int(fields[0]))
                integers.append([int(field) if field else 0 for field in fields[1 : 1 + INTEGERS]])
                categories.append([int(field, 16) if field else 0 for field in fields[1 + INTEGERS :]])
        ids = np.array(categories, np.int64).T
        for column, counted in enumerate(counts):
            counted.update(ids[column].tolist())
        dense = np.log1p(np.maximum(np.array(integers, np.int32), 0)).astype(np.float32)
        np.savez(folder / f"day_{day}.npz", labels=np.array(labels, np.int32), dense=dense, ids=ids)
    numbers = [_numbers(counted, threshold) for counted in counts]
    for day in range(len(files)):
        with np.load(folder / f"day_{day}.npz") as arrays:
            of_day = {name: arrays[name] for name in ("labels", "dense", "ids")}
        mapped = [
            [known.get(number, 0) for number in of_day["ids"][column].tolist()] for column, known in enumerate(numbers)
        ]
        np.savez(folder / f"day_{day}_mapped.npz", **{**of_day, "ids": np.array(mapped, np.int32).T})
    _shuffle(folder, len(files) - 1, np.savez)


def facebookresearch_dlrm(files: list[Path], folder: Path, clone: str) -> None:
    """`getCriteoAdData` of a clone of facebookresearch/dlrm, with the settings of its 1TB run.

    Ids are taken modulo 10,000,000 there, which also keeps them within the int32 that it stores them in.
    """
    for day, file in enumerate(files):
        (folder / f"day_{day}").symlink_to(file)
    sys.path.insert(0, clone)
    from data_utils import getCriteoAdData

    with contextlib.redirect_stdout(io.StringIO()):
        getCriteoAdData(
            f"{folder}/day",
            "out",
            max_ind_range=10_000_000,
            days=len(files),
            data_split="train",
            randomize="total",
            criteo_kaggle=False,
            memory_map=True,
        )


def _numbers(counted: dict[Any, int], threshold: int) -> dict[Any, int]:
    kept = (number for number, count in counted.items() if count >= threshold)
    return {number: place for place, number in enumerate(kept, 1)}


def _shuffle(folder: Path, days: int, save: Callable[..., None]) -> None:
    parts: dict[str, list[npt.NDArray[Any]]] = {"labels": [], "dense": [], "ids": []}
    for day in range(days):
        with np.load(folder / f"day_{day}_mapped.npz") as arrays:
            for name, found in parts.items():
                found.append(arrays[name])
    order = np.random.default_rng(0).permutation(sum(len(part) for part in parts["labels"]))
    save(folder / "shuffled.npz", **{name: np.concatenate(found)[order] for name, found in parts.items()})
