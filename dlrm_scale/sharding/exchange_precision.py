"""Pooled vectors and their gradients in 16 bits on their way between ranks."""

import math
from typing import Literal

import torch
from fbgemm_gpu.quantize_comm import QuantizationContext
from fbgemm_gpu.split_embedding_configs import SparseType
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    FbgemmQuantizedCommCodec,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.types import CommOp, QuantizedCommCodecs

__all__ = ["exchange_codecs"]


def exchange_codecs(
    precision: Literal["fp32", "fp16", "bf16"], rows_per_rank: int, device: torch.device
) -> dict[str, QuantizedCommCodecs] | None:
    """Make the codecs that TorchRec puts around its exchanges; None for fp32.

    A gradient of a mean over N rows is about 1 / N of a row's own. Below 6e-5 fp16 loses digits, below 6e-8
    everything, and row-wise Adagrad makes steps of full size of what is left. So gradients travel multiplied by the
    rows of a batch. TorchRec's own `backward_loss_scale` doesn't help: it divides while still in fp16.

    Args:
        precision: bf16 has fp32's range and isn't scaled. On CPU TorchRec sends fp16 in its place, which
            `rules.allowed_types` refuses before.
        rows_per_rank: of a full batch.
        device: of the model.
    """
    if precision == "fp32":
        return None
    if precision == "bf16":
        config = QCommsConfig(forward_precision=CommType.BF16, backward_precision=CommType.BF16)
        codecs: dict[str, QuantizedCommCodecs] | None = get_qcomm_codecs_registry(config, device=device)
        return codecs
    scale = 2.0 ** math.floor(math.log2(max(1, rows_per_rank)))  # a power of two costs no digit
    return {
        operation.name: QuantizedCommCodecs(
            forward=FbgemmQuantizedCommCodec(SparseType.FP16), backward=_ScaledFp16Codec(scale)
        )
        for operation in (CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER)
    }


class _ScaledFp16Codec(FbgemmQuantizedCommCodec):
    """fp16 of the values times `scale`; divided again in float32."""

    def __init__(self, scale: float) -> None:
        super().__init__(SparseType.FP16, is_fwd=False)
        self._scale = scale

    def encode(self, input_tensor: torch.Tensor, ctx: QuantizationContext | None = None) -> torch.Tensor:
        encoded: torch.Tensor = super().encode(input_tensor * self._scale, ctx)
        return encoded

    def decode(self, input_grad: torch.Tensor, ctx: QuantizationContext | None = None) -> torch.Tensor:
        decoded: torch.Tensor = super().decode(input_grad, ctx)
        return decoded / self._scale
