"""How values of a delta may be stored in fewer bytes, and how they are read again.

    none        the values themselves
    int8_rows   of float32 [n, columns]: uint8 [n, columns + 8], each row its codes, then float32 scale and bias;
                value = scale * code + bias. The bytes are those of fbgemm's fused 8-bit row-wise format
    bf16        of float32 of any shape: bfloat16

The encoders are in `quantize`.
"""

import numba
import numpy as np
import numpy.typing as npt
import torch

__all__ = ["CODECS", "SCALE_BIAS_BYTES", "decode", "decode_into", "stored_form"]

CODECS = ("none", "int8_rows", "bf16")
"""What this version reads and writes."""

SCALE_BIAS_BYTES = 8
"""Of each row of `int8_rows`, after its codes."""


def stored_form(codec: str, dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
    """Type, by safetensors' name, and shape that values have in the file; None if the codec can't hold them."""
    if codec == "none":
        return dtype, shape
    if dtype != "F32":
        return None
    if codec == "bf16":
        return "BF16", shape
    if codec == "int8_rows" and len(shape) == 2:
        return "U8", (shape[0], shape[1] + SCALE_BIAS_BYTES)
    return None


def decode(codec: str, stored: torch.Tensor) -> torch.Tensor:
    """The values of a stored block: itself for `none`, else new float32 memory."""
    if codec == "none":
        return stored
    if codec == "bf16":
        return stored.float()
    values = torch.empty(stored.shape[0], stored.shape[1] - SCALE_BIAS_BYTES)
    return decode_into(codec, stored, values)


def decode_into(codec: str, stored: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """As `decode`, into a float32 tensor of the values' shape, which is returned.

    Each value is float32(float32(scale * code) + bias): two roundings, the same on every machine, so that all ranks
    and a later restore get the same bits. The measured errors are of these values.
    """
    if codec != "int8_rows":
        return values.copy_(stored)
    columns = stored.shape[1] - SCALE_BIAS_BYTES
    # A copy in any case: the slice of a single row is contiguous where it lies, at an odd place for float32.
    scale_bias = stored[:, columns:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    if values.is_contiguous() and values.device.type == "cpu":
        _decode_int8(stored.numpy(), scale_bias.numpy(), values.numpy())
        return values
    return values.copy_(decode(codec, stored))


@numba.njit(cache=True, nogil=True)
def _decode_int8(
    stored: npt.NDArray[np.uint8], scale_bias: npt.NDArray[np.float32], values: npt.NDArray[np.float32]
) -> None:
    """Fill `values` [n, C] from the codes of `stored` [n, C + 8] and `scale_bias` [n, 2]."""
    columns = values.shape[1]
    for row in range(len(values)):
        scale, bias = scale_bias[row]
        for column in range(columns):
            values[row, column] = np.float32(stored[row, column]) * scale + bias
