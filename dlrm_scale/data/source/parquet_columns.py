"""One column of a Parquet file as arrays: which types are accepted, and which of the values are no good.

    label      integer, boolean or floating point, 0 or 1
    I1..I13    integers that fit 32 bits, null is missing; or all thirteen floating point, ready-made features
    C1..C26    integers within 32 bits, or strings of 8 hexadecimal digits; null (or an empty string) is missing
               lists of these are multi-hot; a null or empty list is a missing field, a null within a list is wrong

Strings may be dictionary-encoded. Values are judged one by one, so that one bad value costs one row.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from numba import njit

from dlrm_scale.data.source.integer_ids import GIVEN_ID_MAX, IdMeaning, outside_32_bits, raw_ids
from dlrm_scale.data.source.raw_block import Bags

__all__ = ["Decoded", "IdKind", "decode_features", "decode_ids", "decode_integers", "decode_label", "id_kind"]

IdKind = Literal["integer", "text"]
Bools = npt.NDArray[np.bool_]

_GOOD, _MISSING, _BAD = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Decoded:
    """One column of n rows.

    Attributes:
        values: [n], 0 where missing or bad; None where `bags` is set.
        missing: [n] where the field is missing, or None if nowhere.
        bad: [n] rows with a value that isn't accepted, or None if nowhere.
        bags: ids of a multi-hot column.
    """

    values: npt.NDArray[Any]
    missing: Bools | None = None
    bad: Bools | None = None
    bags: Bags | None = None


def id_kind(kind: pa.DataType) -> tuple[IdKind | None, bool]:
    """Tell how a type of Parquet gives ids.

    Returns:
        "integer", "text", or None if it gives none; and whether a row has several.
    """
    several = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    inner = kind.value_type if several else kind
    if pa.types.is_dictionary(inner):
        inner = inner.value_type
    if pa.types.is_integer(inner):
        return "integer", several
    text = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_string_view,
        pa.types.is_binary,
        pa.types.is_large_binary,
        pa.types.is_binary_view,
        pa.types.is_fixed_size_binary,
        pa.types.is_null,
    )
    return ("text" if any(check(inner) for check in text) else None), several


def _nulls(column: pa.Array) -> Bools | None:
    if column.null_count == 0:
        return None
    nulls: Bools = column.is_null().to_numpy(zero_copy_only=False)
    return nulls


def _numbers(column: pa.Array) -> npt.NDArray[Any]:
    """Return numbers with 0 for null."""
    if pa.types.is_null(column.type):
        return np.zeros(len(column), np.int32)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    filled = column.fill_null(False if pa.types.is_boolean(column.type) else 0)
    return np.asarray(filled.to_numpy(zero_copy_only=False))


def _either(first: Bools | None, second: Bools | None) -> Bools | None:
    if first is None or second is None:
        return second if first is None else first
    return np.logical_or(first, second)


def _if_any(mask: Bools) -> Bools | None:
    return mask if mask.any() else None


def decode_label(column: pa.Array) -> Decoded:
    """Decode labels: [n] uint8."""
    numbers = _numbers(column)
    wrong = _if_any(~np.isin(numbers, (0, 1)))
    return Decoded((numbers == 1).astype(np.uint8), bad=_either(_nulls(column), wrong))


def decode_integers(column: pa.Array) -> Decoded:
    """Decode one of I1..I13: [n] int32."""
    numbers = _numbers(column)
    bad = None
    if numbers.dtype.itemsize > 4 or numbers.dtype == np.uint32:
        limits = np.iinfo(np.int32)
        bad = _if_any((numbers < limits.min) | (numbers > limits.max))
        if bad is not None:
            numbers = np.where(bad, 0, numbers)
    return Decoded(numbers.astype(np.int32, copy=False), missing=_nulls(column), bad=bad)


def decode_features(column: pa.Array) -> Decoded:
    """Decode one of I1..I13 that are floating point: [n] float32, rounded once.

    Null is refused: which feature stands for missing was decided by whoever made the features.
    """
    with np.errstate(over="ignore"):
        numbers = _numbers(column).astype(np.float32)
    return Decoded(numbers, bad=_either(_nulls(column), _if_any(~np.isfinite(numbers))))


def decode_ids(column: pa.Array, kind: IdKind, meaning: IdMeaning) -> Decoded:
    """Decode one of C1..C26.

    Args:
        column: of a type for which `id_kind` gives `kind`.
        kind: how the ids are stored.
        meaning: rows of tables, or raw ids. Rows of tables must be in every one-hot field.

    Returns:
        `values` [n] uint32, or `bags` with uint32 values.
    """
    if not id_kind(column.type)[1]:
        flat = _decode_flat(column, kind, meaning)
        if meaning == "given":
            return Decoded(flat.values, bad=_either(flat.missing, flat.bad))
        return flat
    nulls = _nulls(column)
    lengths = np.asarray(pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)).astype(np.int32)
    if nulls is not None:
        lengths[nulls] = 0
    offsets = np.zeros(len(column) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    flat = _decode_flat(column.flatten(), kind, meaning)
    bad = None
    if (wrong := _either(flat.missing, flat.bad)) is not None:
        bad = np.zeros(len(column), np.bool_)
        bad[np.searchsorted(offsets, np.flatnonzero(wrong), side="right") - 1] = True
    return Decoded(flat.values, missing=_if_any(lengths == 0), bad=bad, bags=Bags(flat.values, offsets))


def _decode_flat(column: pa.Array, kind: IdKind, meaning: IdMeaning) -> Decoded:
    if kind == "text":
        return _decode_text(column)
    numbers = _numbers(column)
    if meaning == "given":
        bad = _if_any((numbers < 0) | (numbers > GIVEN_ID_MAX))
    else:
        bad = outside_32_bits(numbers)
    if bad is not None:
        numbers = np.where(bad, 0, numbers)
    return Decoded(raw_ids(numbers), missing=_nulls(column), bad=bad)


def _decode_text(column: pa.Array) -> Decoded:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    plain = column.cast(pa.large_binary())
    rows = len(plain)
    _, offsets, data = plain.buffers()
    values = np.zeros(rows, np.uint32)
    states = np.full(rows, _MISSING, np.uint8)
    if rows and plain.null_count < rows:
        starts = np.frombuffer(offsets, np.int64, rows + 1, 8 * plain.offset)
        text = np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(1, np.uint8)
        nulls = _nulls(plain)
        _parse_ids(text, starts, np.zeros(rows, np.bool_) if nulls is None else nulls, values, states)
    return Decoded(values, missing=_if_any(states == _MISSING), bad=_if_any(states == _BAD))


@njit(cache=True, nogil=True)
def _parse_ids(text: Any, starts: Any, nulls: Any, values: Any, states: Any) -> None:  # pragma: no cover - compiled
    for i in range(values.shape[0]):
        start, end = starts[i], starts[i + 1]
        if nulls[i] or start == end:
            continue
        states[i] = 2
        if end - start != 8:
            continue
        value = np.uint32(0)
        valid = True
        for k in range(start, end):
            byte = text[k]
            if 48 <= byte <= 57:
                digit = byte - 48
            elif 97 <= byte <= 102:
                digit = byte - 87
            elif 65 <= byte <= 70:
                digit = byte - 55
            else:
                valid = False
                digit = 0
            value = (value << np.uint32(4)) | np.uint32(digit)
        if valid:
            values[i] = value
            states[i] = 0
