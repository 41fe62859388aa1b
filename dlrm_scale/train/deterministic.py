"""`train.deterministic`: what torch can enforce so that a second run repeats the first one's bits.

On CPU a run repeats without it, on equal ranks, threads and processors: orders and initial values come from private
generators, a row's gradients are added in the order of the batch, and replicated gradients in the order of ranks. There
it only makes torch refuse operations without a repeatable kind. On a GPU torch and cuBLAS also choose repeatable
kernels, which are slower, and fbgemm's backward pass, which heeds the same switch, sums each row of a table in one
block; nccl's sums repeat on the same GPUs and links.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["deterministic_algorithms"]


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Use repeatable algorithms inside the block, if wanted; entered before anything computes on a GPU."""
    if not wanted:
        yield
        return
    # cuBLAS reads it when its first handle is made; one of the two values that torch allows
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    switch: Any = torch.utils.deterministic  # its one setting is a property that torch's stubs don't have
    before = torch.are_deterministic_algorithms_enabled(), switch.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # it would fill every new tensor with NaN, tables of many GiB among them; all that is read here is written before
    switch.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        switch.fill_uninitialized_memory = before[1]
