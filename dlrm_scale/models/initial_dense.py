"""Initial weights of the MLPs and the cross network: a function of the seed and the parameter's name."""

import hashlib
import math

import torch
from torch import nn

__all__ = ["fill_initial_dense"]


def fill_initial_dense(module: nn.Module, seed: int, *, skip: nn.Module | None = None) -> None:
    """Fill every dense parameter of `module` in place.

    Linear layers get torch's own default, uniform within `1 / sqrt(inputs)` for weight and bias. The low-rank
    kernels of a cross network get the Xavier normal of `torchrec.modules.crossnet`, its biases zero. A parameter's
    values depend on `seed`, its name and its shape alone: ranks agree without a broadcast, and a layer
    more doesn't change the others.

    Args:
        module: what is filled; parameters are float32 on CPU.
        seed: `model.seed`.
        skip: a part of `module` that is left alone (the embedding tables).
    """
    skipped = {id(p) for p in skip.parameters()} if skip is not None else set()
    parameters = {name: p for name, p in module.named_parameters() if id(p) not in skipped}
    with torch.no_grad():
        for name, parameter in parameters.items():
            generator = torch.Generator().manual_seed(_seed_of(seed, name))
            owner, _, leaf = name.rpartition(".")
            if owner.endswith(".bias"):  # ParameterList `bias` of a cross network
                parameter.zero_()
            elif leaf in ("weight", "bias"):
                inputs = parameters[f"{owner}.weight"].shape[1]
                parameter.uniform_(-1 / math.sqrt(inputs), 1 / math.sqrt(inputs), generator=generator)
            else:
                parameter.normal_(0, math.sqrt(2 / sum(parameter.shape)), generator=generator)


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"dense/{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
