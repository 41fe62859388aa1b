"""What a step can't be faster than on this machine: its matrix products and its random reads of table rows, alone.

The products are those of a forward and a backward pass with the step's sizes, by `torch.mm` and `torch.bmm` into memory
that exists; in bf16 operands are bf16 already. Table rows are gathered three times for each lookup: the forward pass
reads them, and the update reads and writes them.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from shapes import Shape

from dlrm_scale.batch import Batch
from dlrm_scale.config import ModelConfig
from dlrm_scale.schema import INTEGER_COLUMNS

__all__ = ["gather_floor", "matrix_products", "product_floor", "products_flops"]

GATHERS_A_LOOKUP = 3

Product = tuple[int, int, int, int]
"""Batch of matrices (1 for a plain product), rows, inner size, columns."""


def matrix_products(model: ModelConfig, shape: Shape) -> list[Product]:
    """List the products of a step: each layer's output, its weights' gradient, its input's where one is needed."""
    rows, vectors = shape.batch_size, len(shape.table_rows) + 1
    products = _layers(rows, len(INTEGER_COLUMNS), model.dense_layers, input_gradient=False)
    if model.kind == "dlrm":
        joined = model.dim + vectors * (vectors - 1) // 2
        products += [(rows, vectors, model.dim, vectors), (rows, vectors, vectors, model.dim)]
    else:
        joined = vectors * model.dim
        for _ in range(model.dcn_num_layers):
            products += _layers(rows, joined, (model.dcn_low_rank_dim, joined), input_gradient=True)
    return products + _layers(rows, joined, model.over_layers, input_gradient=True)


def _layers(rows: int, inputs: int, sizes: Sequence[int], *, input_gradient: bool) -> list[Product]:
    products: list[Product] = []
    for number, size in enumerate(sizes):
        products += [(1, rows, inputs, size), (1, size, rows, inputs)]
        if input_gradient or number:
            products.append((1, rows, size, inputs))
        inputs = size
    return products


def products_flops(products: Sequence[Product]) -> int:
    """Count multiplications and additions."""
    return sum(2 * batch * rows * inner * columns for batch, rows, inner, columns in products)


def product_floor(products: Sequence[Product], dtype: torch.dtype) -> Callable[[], float]:
    """Make a step that does the products and nothing else."""
    operands = {}
    for batch, rows, inner, columns in products:
        key = (batch, rows, inner, columns)
        shapes = ((rows, inner), (inner, columns), (rows, columns))
        operands[key] = [torch.randn(*((batch, *s) if batch > 1 else s)).to(dtype) for s in shapes]

    def step() -> float:
        with torch.no_grad():
            for product in products:
                left, right, out = operands[product]
                if product[0] > 1:
                    torch.bmm(left, right, out=out)
                else:
                    torch.mm(left, right, out=out)
        return 0.0

    return step


def gather_floor(tables: Mapping[str, torch.Tensor], batch: Batch) -> Callable[[], float]:
    """Make a step that reads the rows that a step looks up, three times.

    Args:
        tables: the weights, by category column.
        batch: whose ids are read.
    """
    features = batch.sparse_features
    ends = features.offset_per_key()
    ids = [features.values()[start:end] for start, end in pairwise(ends)]
    weights = [tables[name].detach() for name in features.keys()]
    outs = [torch.empty(len(i), weight.shape[1]) for i, weight in zip(ids, weights, strict=True)]

    def step() -> float:
        for _ in range(GATHERS_A_LOOKUP):
            for weight, i, out in zip(weights, ids, outs, strict=True):
                torch.index_select(weight, 0, i, out=out)
        return 0.0

    return step
