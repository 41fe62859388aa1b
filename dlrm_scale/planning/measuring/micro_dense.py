"""The dense part: layers, interaction, loss and optimizer, with pooled vectors that are there already."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torchrec.sparse.jagged_tensor import KeyedTensor

from dlrm_scale.config import DenseOptimizerConfig, ModelConfig, TrainConfig
from dlrm_scale.models.build import build_model
from dlrm_scale.models.size_estimate import dense_sizes
from dlrm_scale.planning.cluster.cluster import Constant, DenseCosts
from dlrm_scale.planning.measuring.calibration_fit import fit_times
from dlrm_scale.planning.measuring.micro_timing import RankTimer
from dlrm_scale.schema import CATEGORY_COLUMNS, INTEGER_COLUMNS, TableSpec
from dlrm_scale.sharding.dense_state import make_dense_optimizer
from dlrm_scale.sharding.ranks import Ranks

__all__ = ["measure_dense"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    tables: int
    dim: int
    rows: int
    layers: tuple[int, ...]
    precision: Literal["fp32", "bf16"] = "fp32"

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(dim=self.dim, dense_layers=(*self.layers, self.dim), over_layers=(*self.layers, 1))


_QUICK = (
    _Shape(tables=4, dim=16, rows=256, layers=(32,)),
    _Shape(tables=16, dim=64, rows=512, layers=(32,)),
    _Shape(tables=4, dim=16, rows=512, layers=(512, 256)),
    _Shape(tables=8, dim=32, rows=1024, layers=(256,)),
)
_ALL = (
    *_QUICK,
    _Shape(tables=26, dim=64, rows=1024, layers=(64,)),
    _Shape(tables=26, dim=16, rows=1024, layers=(512, 256)),
    _Shape(tables=2, dim=16, rows=128, layers=(1024, 1024)),
    _Shape(tables=26, dim=128, rows=512, layers=(512,)),
    _Shape(tables=4, dim=16, rows=2048, layers=(32,)),
)
_IN_BF16 = _Shape(tables=4, dim=16, rows=256, layers=(512, 512), precision="bf16")


def measure_dense(
    ranks: Ranks, timer: RankTimer, *, quick: bool, progress: Callable[[str], None]
) -> tuple[DenseCosts, dict[str, float]]:
    """Measure and fit forward and backward pass, loss and optimizer, without the all-reduce. A collective."""
    shapes = _QUICK if quick else _ALL
    times = [timer.time(_Step(shape, ranks).run)[0].milliseconds for shape in shapes]
    fit = fit_times([_features(shape) for shape in shapes], times)
    call, gflop, vector, parameter = fit.values
    (in_bf16,) = timer.time(_Step(_IN_BF16, ranks).run)
    one, gflops, vectors, parameters = _features(_IN_BF16)
    left = in_bf16.milliseconds - (one * call + vectors * vector + parameters * parameter)
    progress(f"dense part: {len(shapes) + 1} models")
    source = f"calibrate: {len(shapes)} models"
    costs = DenseCosts(
        call_ms=Constant(value=call, source=source),
        gflop_ms=Constant(value=gflop, source=source),
        bf16_gflop_ms=Constant(value=max(left, 0.0) / gflops, source="calibrate: one model in bf16, less the rest"),
        vector_ms=Constant(value=vector, source=source),
        parameter_ms=Constant(value=parameter, source=source),
    )
    return costs, {"dense": fit.error}


def _features(shape: _Shape) -> list[float]:
    sizes = dense_sizes(shape.model, shape.tables)
    return [
        1.0,
        6e-9 * shape.rows * sizes.multiply_adds_per_row,
        shape.rows * shape.tables * shape.dim / 1e6,
        sizes.parameters / 1e6,
    ]


class _Step:
    def __init__(self, shape: _Shape, ranks: Ranks) -> None:
        names = list(CATEGORY_COLUMNS[: shape.tables])
        tables = [TableSpec(name=name, rows=2, dim=shape.dim) for name in names]
        model = build_model(shape.model, tables, train=TrainConfig(precision=shape.precision))
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if not parameter.is_meta:
                    setattr(module, name, torch.nn.Parameter(parameter.to(ranks.device)))
        layers = {name: p for name, p in model.named_parameters() if not p.is_meta}
        self._part = model.dense_part
        self._optimizer = make_dense_optimizer(layers, DenseOptimizerConfig())
        device, rows = ranks.device, shape.rows
        self._numbers = torch.rand(rows, len(INTEGER_COLUMNS), device=device)
        self._vectors = torch.rand(rows, shape.tables * shape.dim, device=device, requires_grad=True)
        # Plans rarely keep the order of the tables: vectors are picked anew.
        came = names[1:] + names[:1]
        self._pooled = KeyedTensor(came, [shape.dim] * shape.tables, self._vectors, key_dim=1)
        self._labels = (torch.rand(rows, device=device) < 0.3).float()
        self._weights = torch.ones(rows, device=device)
        self._scale = torch.tensor(1.0 / rows, device=device)

    def run(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._vectors.grad = None
        loss, _ = self._part(self._numbers, self._pooled, self._labels, self._weights, self._scale)
        loss.backward()
        self._optimizer.step()
