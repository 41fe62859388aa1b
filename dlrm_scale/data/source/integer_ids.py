"""Ids that a file holds as integers: raw ids of 32 bits, or rows of tables that somebody else assigned."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dlrm_scale.errors import DataError

__all__ = ["GIVEN_ID_MAX", "IdMeaning", "id_that_is_no_row", "outside_32_bits", "raw_ids", "refuse_raw_as_given"]

IdMeaning = Literal["given", "raw"]
"""`given`: the id is the row of its table. `raw`: the id has 32 bits without a sign, and a vocabulary maps it."""

GIVEN_ID_MAX = 2**31 - 2
"""A table has less than 2^31 rows."""


def outside_32_bits(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_] | None:
    """Tell which integers are no raw ids.

    Args:
        values: integers of any shape and type. An int32 is never outside: its 32 bits are the id, as torchrec's older
            scripts stored ids beyond 2^31.

    Returns:
        A mask, or None if there is no such value.
    """
    if (values.dtype.kind == "u" and values.dtype.itemsize <= 4) or values.dtype == np.int32:
        return None
    outside: npt.NDArray[np.bool_] = values < 0
    if values.dtype.itemsize > 4:
        outside |= values > np.iinfo(np.uint32).max
    return outside if outside.any() else None


def raw_ids(values: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """Return integers that aren't `outside_32_bits` as uint32; an int32 keeps its bits."""
    if values.dtype == np.int32 and values.dtype.isnative:
        return values.view(np.uint32)
    return values.astype(np.uint32)


def refuse_raw_as_given(values: npt.NDArray[Any], path: Path, column: str, first_row: int) -> None:
    """Check that the ids of one column can be rows of a table.

    Args:
        values: integers, [n] or [n, pooling].
        path: the file.
        column: the category column.
        first_row: number of the first row, from 1.

    Raises:
        DataError: one is negative or beyond any table; names file, row and column.
    """
    if not values.size or (values.min() >= 0 and values.max() <= GIVEN_ID_MAX):
        return
    wrong = (values < 0) | (values > GIVEN_ID_MAX)
    where = np.argwhere(wrong)[0]
    raise id_that_is_no_row(path, first_row + int(where[0]), column, int(values[tuple(where)]))


def id_that_is_no_row(path: Path, row: int, column: str, value: int) -> DataError:
    """Say that an id can't be a row of a table."""
    return DataError(
        f"{path}, row {row:,}, column {column}: expected the row of a table (--vocabulary given), "
        f"0 to {GIVEN_ID_MAX:,}, found {value:,}",
        remedy="if the file holds raw ids, let --vocabulary frequency, hash or modulo map them: the 32 bits are then "
        "read as the id without a sign",
    )
