"""Encodes rows and optimizer state of deltas in fewer bytes, and finds the rows that would lose too much.

`int8_rows` is row-wise asymmetric quantization between a row's least and largest value (Guan et al., "Post-Training
4-bit Quantization on Embedding Tables", 2019; Check-N-Run, NSDI 2022, uses it for checkpoints), laid out as fbgemm's
fused 8-bit rows: an error is at most half a step, (max - min) / 510, plus float32 rounding. `bf16` rounds to the
nearest; fp16 would turn most of row-wise Adagrad's momentum into 0.

All kernels are numba's on one thread: they hold no GIL, and take no threads from the training beside them.

Shapes: n rows of a block, C columns.
"""

from collections.abc import Iterator

import numba
import numpy as np
import numpy.typing as npt
import torch

from dlrm_scale.checkpoint.files.codec import SCALE_BIAS_BYTES, stored_form
from dlrm_scale.checkpoint.files.format import DTYPE_NAMES, TensorSource
from dlrm_scale.checkpoint.files.manifest import ErrorRecord

__all__ = ["LARGEST_ERROR_SHARE", "encoded_source", "lossy_rows"]

LARGEST_ERROR_SHARE = 1 / 16
"""A row is encoded as `int8_rows` if its error bound is at most this share of its median magnitude.

Rows of 64 normal values reach 1/70. One value 32 times as large as most drowns them; the mean would hide that in
narrow rows.
"""

_LEAST_NORMAL, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_LARGEST_KEY, _LEAST_KEY = 0x7F800000, -0x7F800001
"""Keys of plus and minus infinity, see `_bounds`."""


def encoded_source(source: TensorSource, codec: str) -> TensorSource:
    """A tensor to be written encoded.

    Args:
        source: of float32 `[rows]` or `[rows, columns]`, finite.
        codec: `int8_rows` or `bf16`.
    """
    form = stored_form(codec, DTYPE_NAMES[source.dtype], source.shape)
    if form is None:
        raise ValueError(f"{codec} can't hold {source.name}, {source.dtype} {source.shape}")
    errors = _Errors()

    def blocks() -> Iterator[torch.Tensor]:
        for block in source.blocks():
            yield _encode(codec, block, errors)

    dtype = torch.uint8 if codec == "int8_rows" else torch.bfloat16
    return TensorSource(
        name=source.name, dtype=dtype, shape=form[1], blocks=blocks, codec=codec, measured=errors.record
    )


def lossy_rows(codec: str, block: torch.Tensor) -> torch.Tensor:
    """Find the rows that must not be encoded.

    Those are, for `int8_rows`, rows whose range isn't finite or whose step would be a denormal number, and those over
    `LARGEST_ERROR_SHARE`; for `bf16`, rows with a denormal value or one that would become infinite. Rows with NaN or
    infinity count too.

    Args:
        codec: any.
        block: float32 `[n]` or `[n, C]`.

    Returns:
        `[n]` bool.
    """
    lossy = np.zeros(len(block), dtype=np.bool_)
    values = block.reshape(len(block), block.shape[1] if block.dim() == 2 else 1).numpy()
    if codec == "int8_rows":
        _mark_int8(values, values.view(np.int32), lossy)
    elif codec == "bf16":
        _mark_bf16(values.view(np.uint32), lossy)
    return torch.from_numpy(lossy)


class _Errors:
    """What the blocks of a tensor have lost so far."""

    def __init__(self) -> None:
        self.totals = np.zeros(2)  # largest, sum
        self.count = 0

    def record(self) -> ErrorRecord:
        return ErrorRecord(max_absolute=float(self.totals[0]), mean_absolute=float(self.totals[1] / max(self.count, 1)))


def _encode(codec: str, block: torch.Tensor, errors: _Errors) -> torch.Tensor:
    # One value a row is encoded as one long row: the work per row took 12 times as long as the values.
    values = block.reshape(block.shape if block.dim() == 2 else (1, len(block))).numpy()
    errors.count += values.size
    if codec == "bf16":
        halves = np.empty(values.shape, np.uint16)
        _encode_bf16(values, values.view(np.uint32), halves, errors.totals)
        return torch.from_numpy(halves).view(torch.bfloat16).reshape(block.shape)
    stored = np.empty((len(values), values.shape[1] + SCALE_BIAS_BYTES), np.uint8)
    scale_bias = np.empty((len(values), 2), np.float32)
    _encode_int8(values, values.view(np.int32), stored, scale_bias, errors.totals)
    stored[:, values.shape[1] :] = scale_bias.view(np.uint8)
    return torch.from_numpy(stored)


@numba.njit(cache=True, nogil=True, fastmath={"reassoc"})
def _magnitude(values: npt.NDArray[np.float32]) -> np.float32:
    """Sum of the absolute values of a row; in any order, so that it is vectorised."""
    total = np.float32(0)
    for value in values:
        total += abs(value)
    return total


@numba.njit(cache=True, nogil=True)
def _bounds(bits: npt.NDArray[np.int32], bounds: npt.NDArray[np.int32]) -> np.bool_:
    """Put the bits of a row's least and largest value into `bounds`; say whether all values are finite.

    Bits of float32, those of negative numbers inverted but for the sign, order as the numbers do. Comparing them as
    integers is vectorised; comparing floats isn't, as a NaN must not get lost.
    """
    low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    for word in bits:
        key = word ^ ((word >> np.int32(31)) & np.int32(0x7FFFFFFF))
        low = min(low, key)
        high = max(high, key)
    bounds[0] = low ^ ((low >> np.int32(31)) & np.int32(0x7FFFFFFF))
    bounds[1] = high ^ ((high >> np.int32(31)) & np.int32(0x7FFFFFFF))
    return low > _LEAST_KEY and high < _LARGEST_KEY


@numba.njit(cache=True, nogil=True)
def _mark_int8(values: npt.NDArray[np.float32], bits: npt.NDArray[np.int32], lossy: npt.NDArray[np.bool_]) -> None:
    """Mark the rows of `values` [n, C], with their `bits`, that `int8_rows` would spoil."""
    words = np.zeros(2, np.int32)
    bounds = words.view(np.float32)
    columns = values.shape[1]
    for row in range(len(values)):
        finite = _bounds(bits[row], words)
        reach = np.float64(bounds[1]) - np.float64(bounds[0])
        if not finite or (reach > 0 and reach < 255 * _LEAST_NORMAL) or reach > _LARGEST:
            lossy[row] = True
        else:
            least = np.float32(reach / (510 * LARGEST_ERROR_SHARE))
            small = 0
            for value in values[row]:
                small += abs(value) < least
            lossy[row] = 2 * small > columns


@numba.njit(cache=True, nogil=True)
def _encode_int8(
    values: npt.NDArray[np.float32],
    bits: npt.NDArray[np.int32],
    stored: npt.NDArray[np.uint8],
    scale_bias: npt.NDArray[np.float32],
    totals: npt.NDArray[np.float64],
) -> None:
    """Fill the codes of `stored` [n, C + 8] and `scale_bias` [n, 2] from `values` [n, C]; add to largest and sum."""
    words = np.zeros(2, np.int32)
    bounds = words.view(np.float32)
    columns = values.shape[1]
    errors = np.empty(columns, np.float32)
    for row in range(len(values)):
        _bounds(bits[row], words)
        low = bounds[0]
        scale = (bounds[1] - low) / np.float32(255)
        steps = np.float32(1) / scale if scale > 0 else np.float32(0)
        codes = stored[row]
        for column in range(columns):
            value = values[row, column]
            # Rounded half up: no call, unlike rint. The least code is 0, and the largest 255.49 at most.
            code = np.uint8((value - low) * steps + np.float32(0.5))
            codes[column] = code
            # In float32 as `codec.decode` does it.
            errors[column] = abs((np.float32(code) * scale + low) - value)
        scale_bias[row, 0] = scale
        scale_bias[row, 1] = low
        _bounds(errors.view(np.int32), words)
        totals[0] = max(totals[0], np.float64(bounds[1]))
        totals[1] += _magnitude(errors)


@numba.njit(cache=True, nogil=True)
def _mark_bf16(bits: npt.NDArray[np.uint32], lossy: npt.NDArray[np.bool_]) -> None:
    """Mark the rows of `bits` [n, C] with a value whose exponent `bf16` can't keep."""
    for row in range(len(bits)):
        spoilt = False
        for word in bits[row]:
            magnitude = word & np.uint32(0x7FFFFFFF)
            # denormal, or rounded up to infinity, or infinite or NaN
            spoilt |= (magnitude != 0 and magnitude < np.uint32(0x00800000)) or magnitude >= np.uint32(0x7F7F8000)
        lossy[row] |= spoilt


@numba.njit(cache=True, nogil=True)
def _encode_bf16(
    values: npt.NDArray[np.float32],
    bits: npt.NDArray[np.uint32],
    halves: npt.NDArray[np.uint16],
    totals: npt.NDArray[np.float64],
) -> None:
    """Round `values` [n, C], with their `bits`, to the nearest of bfloat16, ties to even; add to largest and sum."""
    columns = values.shape[1]
    words = np.empty(columns, np.uint32)
    rounded = words.view(np.float32)
    bounds = np.zeros(2, np.int32)
    errors = np.empty(columns, np.float32)
    for row in range(len(values)):
        for column in range(columns):
            word = bits[row, column]
            half = (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            halves[row, column] = np.uint16(half)
            words[column] = half << np.uint32(16)
        for column in range(columns):
            errors[column] = abs(rounded[column] - values[row, column])
        _bounds(errors.view(np.int32), bounds)
        totals[0] = max(totals[0], np.float64(bounds.view(np.float32)[1]))
        totals[1] += _magnitude(errors)
