"""The model and its optimizers in plain torch, in one process, with whole tables: what every sharded run must equal.

Initial values come from the package (they are tested on their own); the mathematics is written down again here.
Shapes: N rows, K tables, D columns.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from dlrm_scale.config import Config, ModelConfig
from dlrm_scale.layout import ShardRegion
from dlrm_scale.models.build import build_model
from dlrm_scale.models.initial_rows import fill_initial_rows
from dlrm_scale.schema import TableSpec
from tests.support.random_batches import GlobalBatch

__all__ = ["Trained", "initial_dense", "initial_tables", "reference_logits", "reference_loss", "train_reference"]

ColumnSplits = Mapping[str, Sequence[tuple[int, int]]]


class Trained(NamedTuple):
    """What a run leaves.

    Attributes:
        losses: mean loss of each step, before its update.
        tables: `[rows, D]` by table name.
        row_states: row-wise Adagrad's sums `[rows]` by table name and column range; empty for SGD.
        dense: dense parameters by the names that `build_model` gives them.
    """

    losses: list[float]
    tables: dict[str, torch.Tensor]
    row_states: dict[str, dict[tuple[int, int], torch.Tensor]]
    dense: dict[str, torch.Tensor]


def train_reference(
    config: Config,
    tables: Sequence[TableSpec],
    batches: Sequence[GlobalBatch],
    *,
    column_splits: ColumnSplits | None = None,
    multipliers: Sequence[float] | None = None,
) -> Trained:
    """Train from the initial weights, one step a batch.

    Args:
        config: model and optimizers.
        tables: the whole tables.
        batches: one a step.
        column_splits: with row-wise Adagrad, tables whose column ranges each keep a row state of their own.
        multipliers: factor of both learning rates in each step; default 1.
    """
    weights = initial_tables(config.model, tables)
    dense = initial_dense(config.model, tables)
    optimizer = _dense_optimizer(config, list(dense.values()))
    ranges = {t.name: list((column_splits or {}).get(t.name, [(0, t.dim)])) for t in tables}
    row_states: dict[str, dict[tuple[int, int], torch.Tensor]] = {}
    if config.sparse_optimizer.kind == "rowwise_adagrad":
        row_states = {t.name: {columns: torch.zeros(t.rows) for columns in ranges[t.name]} for t in tables}
    losses = []
    for step, batch in enumerate(batches):
        factor = multipliers[step] if multipliers else 1.0
        for group in optimizer.param_groups:
            group["lr"] = config.dense_optimizer.learning_rate * factor
        for parameter in (*weights.values(), *dense.values()):
            parameter.grad = None
        loss = reference_loss(config.model, tables, weights, dense, batch)
        loss.backward()
        optimizer.step()
        rate = config.sparse_optimizer.learning_rate * factor
        for name, weight in weights.items():
            _update_table(config, weight, rate, row_states.get(name))
        losses.append(loss.item())
    return Trained(losses, _detached(weights), row_states, _detached(dense))


def initial_tables(config: ModelConfig, tables: Sequence[TableSpec]) -> dict[str, torch.Tensor]:
    """Make the whole tables with their initial rows, requiring gradients."""
    weights = {}
    for spec in tables:
        weights[spec.name] = torch.empty(spec.rows, spec.dim)
        whole = ShardRegion(
            table=spec.name, row_start=0, row_end=spec.rows, column_start=0, column_end=spec.dim, rank=0
        )
        fill_initial_rows(weights[spec.name], spec, whole, config.seed)
        weights[spec.name].requires_grad_()
    return weights


def initial_dense(config: ModelConfig, tables: Sequence[TableSpec]) -> dict[str, torch.Tensor]:
    """Take the initial dense parameters from the package's model."""
    named = build_model(config, tables).named_parameters()
    return {name: p.detach().clone().requires_grad_() for name, p in named if not p.is_meta}


def reference_loss(
    config: ModelConfig,
    tables: Sequence[TableSpec],
    weights: Mapping[str, torch.Tensor],
    dense: Mapping[str, torch.Tensor],
    batch: GlobalBatch,
) -> torch.Tensor:
    """Mean binary cross-entropy over the batch, `log(1 + exp(z)) - y z`."""
    logits = reference_logits(config, tables, weights, dense, batch)
    return (functional.softplus(logits) - torch.from_numpy(batch.labels) * logits).mean()


def reference_logits(
    config: ModelConfig,
    tables: Sequence[TableSpec],
    weights: Mapping[str, torch.Tensor],
    dense: Mapping[str, torch.Tensor],
    batch: GlobalBatch,
) -> torch.Tensor:
    """Score a batch: `[N]` logits."""
    pooled = [
        functional.embedding_bag(
            torch.from_numpy(batch.ids[k]),
            weights[spec.name],
            torch.cat((torch.zeros(1, dtype=torch.long), torch.from_numpy(batch.lengths[k]).long().cumsum(0)[:-1])),
            mode=spec.pooling,
        )
        for k, spec in enumerate(tables)
    ]
    bottom = _mlp(dense, "dlrm.dense_arch.model", torch.from_numpy(batch.dense_features))
    vectors = torch.stack([bottom, *pooled], dim=1)  # [N, K + 1, D]
    match config.kind:
        case "dlrm":
            products = torch.einsum("nid,njd->nij", vectors, vectors)
            pairs = [products[:, i, i + 1 :] for i in range(vectors.shape[1])]
            crossed = torch.cat([bottom, *pairs], dim=1)
        case "projection":
            left = _mlp(dense, "dlrm.inter_arch.interaction_branch1.model", vectors.flatten(1))
            right = _mlp(dense, "dlrm.inter_arch.interaction_branch2.model", vectors.flatten(1))
            left, right = left.unflatten(1, (-1, config.dim)), right.unflatten(1, (config.dim, -1))
            crossed = torch.cat([bottom, torch.einsum("nid,ndj->nij", left, right).flatten(1)], dim=1)
        case "dcnv2":
            crossed = first = vectors.flatten(1)
            for layer in range(config.dcn_num_layers):
                v, w, bias = (
                    dense[f"dlrm.inter_arch.crossnet.{n}.{layer}"] for n in ("V_kernels", "W_kernels", "bias")
                )
                crossed = first * (crossed @ v.T @ w.T + bias) + crossed
    hidden = _mlp(dense, "dlrm.over_arch.model.0", crossed)
    return (hidden @ dense["dlrm.over_arch.model.1.weight"].T + dense["dlrm.over_arch.model.1.bias"]).squeeze(1)


def _mlp(dense: Mapping[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    layer = 0
    while (weight := dense.get(f"{name}._mlp.{layer}._linear.weight")) is not None:
        x = torch.relu(x @ weight.T + dense[f"{name}._mlp.{layer}._linear.bias"])
        layer += 1
    return x


def _dense_optimizer(config: Config, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    dense = config.dense_optimizer
    match dense.kind:
        case "sgd":
            return torch.optim.SGD(parameters, lr=dense.learning_rate)
        case "adagrad":
            return torch.optim.Adagrad(parameters, lr=dense.learning_rate, eps=dense.eps)
        case "adam":
            return torch.optim.Adam(parameters, lr=dense.learning_rate, betas=(dense.beta1, dense.beta2), eps=dense.eps)


def _update_table(
    config: Config, weight: torch.Tensor, rate: float, row_state: dict[tuple[int, int], torch.Tensor] | None
) -> None:
    gradient = weight.grad
    assert gradient is not None
    with torch.no_grad():
        match config.sparse_optimizer.kind:
            case "sgd":
                weight -= rate * gradient
            case "rowwise_adagrad":
                assert row_state is not None
                for (start, end), total in row_state.items():
                    part = gradient[:, start:end]
                    total += part.square().mean(dim=1)
                    weight[:, start:end] -= rate / (total.sqrt() + config.sparse_optimizer.eps)[:, None] * part
            case "adam":
                raise NotImplementedError("no table optimizer of this kind on CPU to compare with")


def _detached(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in tensors.items()}
