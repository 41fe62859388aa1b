"""The low-rank cross network of DCNv2 with fewer passes over memory."""

import torch
from torchrec.modules.crossnet import LowRankCrossNet

__all__ = ["CrossNetwork"]


class CrossNetwork(LowRankCrossNet):
    """TorchRec's `LowRankCrossNet` (Wang et al., arXiv 2008.13535): the same parameters under the same names.

    `x_0 * (W V x + b) + x` is one matrix product with the bias in its epilogue and one fused multiply-add, where
    TorchRec makes four passes over `[B, N]`. Under autocast the residual stays float32 as in TorchRec's.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Cross `[B, N]` features; the result has the same shape."""
        first = crossed = input
        for low, high, bias in zip(self.V_kernels, self.W_kernels, self.bias, strict=True):
            inner = torch.nn.functional.linear(crossed, low)
            crossed = torch.addcmul(crossed, first, torch.nn.functional.linear(inner, high, bias))
        return crossed
