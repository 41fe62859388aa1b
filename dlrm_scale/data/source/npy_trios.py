"""Which .npy and .npz files belong together: dense features, ids and labels of the same rows lie in three files.

    day_0_dense.npy     day_0_labels.npy     and one of
    day_0_sparse.npy                         torchrec: npy_preproc_criteo, shuffle_preproc_criteo
    day_0_sparse_contig_freq.npy             torchrec: contiguous_preproc_criteo
    day_0_sparse_multi_hot.npz               MLPerf DLRM v2: materialize_synthetic_multihot_dataset

The files of a trio may lie in different folders: torchrec's and MLPerf's scripts write ids into a folder of their own.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dlrm_scale.errors import DataError

__all__ = ["NpyTrio", "group_trios", "trio_stem"]

_Role = Literal["dense", "sparse", "labels"]
_MEMBER = re.compile(
    r"(?P<stem>.+)_(?:(?P<role>dense|labels|sparse)\.npy|sparse_contig_freq\.npy|sparse_multi_hot\.npz)", re.IGNORECASE
)
_ABSENT: dict[_Role, str] = {
    "dense": "_dense.npy",
    "sparse": "_sparse.npy (or _sparse_multi_hot.npz)",
    "labels": "_labels.npy",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class NpyTrio:
    """Three files of the same rows.

    Attributes:
        stem: what their names have in common, `day_0`.
        dense: [n, 13] features.
        sparse: ids: .npy [n, 26], or .npz of 26 arrays [n, pooling].
        labels: [n] or [n, 1].
    """

    stem: str
    dense: Path
    sparse: Path
    labels: Path


def trio_stem(path: Path) -> str | None:
    """Return what the name has in common with the other files of its trio, None if it names no member of one."""
    match = _MEMBER.fullmatch(path.name)
    return None if match is None else match["stem"]


def group_trios(paths: Sequence[Path]) -> list[NpyTrio]:
    """Put the files together that have the same stem.

    Args:
        paths: files that end in .npy or .npz.

    Returns:
        The trios in the order in which the first file of each was given.

    Raises:
        DataError: a name isn't a member's, a trio lacks a file or has two for the same purpose.
    """
    found: dict[str, dict[_Role, Path]] = {}
    for path in paths:
        match = _MEMBER.fullmatch(path.name)
        if match is None:
            raise DataError(
                f"{path}: the name doesn't say what the file holds",
                remedy="name the three files of each day NAME_dense.npy, NAME_labels.npy and NAME_sparse.npy "
                "(or NAME_sparse_multi_hot.npz)",
            )
        role: _Role = match["role"].lower() if match["role"] else "sparse"  # type: ignore[assignment]
        members = found.setdefault(match["stem"], {})
        if role in members:
            raise DataError(
                f"{members[role]} and {path} are both the {role} file of {match['stem']}",
                remedy="name the files themselves, one of these two",
            )
        members[role] = path
    return [_trio(stem, members) for stem, members in found.items()]


def _trio(stem: str, members: dict[_Role, Path]) -> NpyTrio:
    for role, ending in _ABSENT.items():
        if role in members:
            continue
        given = ", ".join(str(path) for path in members.values())
        beside = next(iter(members.values())).with_name(f"{stem}_{role}.npy")
        raise DataError(
            f"{stem}{ending} is missing: the rows of {stem} need three files, given: {given}",
            remedy=f"name {beside} too, or the whole folder"
            if beside.is_file()
            else "name it too, or put it into the same folder",
        )
    return NpyTrio(stem=stem, dense=members["dense"], sparse=members["sparse"], labels=members["labels"])
