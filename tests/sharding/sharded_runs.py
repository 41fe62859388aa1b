"""Runs of a small model under a plan, as ranks do them, and what they leave in global coordinates."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from dlrm_scale.batch import Batch
from dlrm_scale.config import Config
from dlrm_scale.layout import ShardRegion
from dlrm_scale.models.build import build_model
from dlrm_scale.models.initial_rows import fill_initial_rows
from dlrm_scale.schema import TableSpec
from dlrm_scale.sharding.pipeline import make_train_pipeline
from dlrm_scale.sharding.ranks import Ranks, init_ranks
from dlrm_scale.sharding.shard import ShardedModel, shard_model
from tests.support.random_batches import GlobalBatch, rank_batch

__all__ = [
    "TABLES",
    "Left",
    "Run",
    "build",
    "make_config",
    "rank_batches",
    "tables_for",
    "train",
    "train_runs",
    "whole_state",
    "whole_tables",
]

# Rows that don't divide, fewer rows than ranks, one row; sums and a mean.
TABLES = (
    TableSpec(name="C1", rows=103, dim=16),
    TableSpec(name="C2", rows=40, dim=16, pooling="mean"),
    TableSpec(name="C3", rows=3, dim=16),
    TableSpec(name="C4", rows=211, dim=16),
    TableSpec(name="C5", rows=1, dim=16),
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run."""

    config: Config
    pipeline: str = "plain"
    tables: tuple[TableSpec, ...] = TABLES
    multipliers: tuple[float, ...] = ()


@dataclass(kw_only=True)
class Left:
    """What a run left on one rank."""

    losses: list[float]
    shards: list[tuple[ShardRegion, torch.Tensor, dict[str, torch.Tensor]]]
    dense: dict[str, torch.Tensor]
    column_splits: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)


def make_config(
    kind: str = "table_wise", optimizer: str = "rowwise_adagrad", **sections: Mapping[str, object]
) -> Config:
    """Make the config of a small model; `sections` override single keys."""
    content: dict[str, dict[str, object]] = {
        "model": {"dim": 16, "dense_layers": (24, 16), "over_layers": (32, 1)},
        "data": {"batch_size": 32},
        # SGD: Adagrad's first steps turn gradients of nearly 0 into steps of full size, and rounding with them.
        "dense_optimizer": {"kind": "sgd", "learning_rate": 0.1},
        "sparse_optimizer": {"kind": optimizer, "learning_rate": 0.5 if optimizer == "sgd" else 0.1},
        "sharding": {"kind": kind, "min_columns_per_shard": 4, "allow_split_row_state": True},
    }
    for name, values in sections.items():
        content[name] = {**content.get(name, {}), **values}
    return Config.model_validate(content)


def tables_for(kind: str) -> tuple[TableSpec, ...]:
    """Take the tables; for grid_shard those that it isn't refused for (sums, more than one row)."""
    if kind != "grid_shard":
        return TABLES
    return tuple(TableSpec(name=t.name, rows=max(2, t.rows), dim=t.dim) for t in TABLES)


def build(config: Config, tables: Sequence[TableSpec], ranks: Ranks) -> ShardedModel:
    """Shard a model and fill its rows."""
    sharded = shard_model(build_model(config.model, tables, train=config.train), tables, config, ranks)
    specs = {t.name: t for t in tables}
    for shard in sharded.local_shards:
        fill_initial_rows(shard.weight, specs[shard.region.table], shard.region, config.model.seed)
    return sharded


def rank_batches(batches: Sequence[GlobalBatch], tables: Sequence[TableSpec], ranks: Ranks) -> Iterator[Batch]:
    """Cut out this rank's share of each batch."""
    return (rank_batch(batch, tables, ranks.rank, ranks.ranks) for batch in batches)


def train(run: Run, batches: Sequence[GlobalBatch], ranks: Ranks) -> Left:
    """Train over all batches."""
    sharded = build(run.config, run.tables, ranks)
    pipeline = make_train_pipeline(sharded, run.pipeline)
    source = rank_batches(batches, run.tables, ranks)
    losses = []
    for step in range(len(batches)):
        if run.multipliers:
            sharded.set_learning_rates(
                dense=run.config.dense_optimizer.learning_rate * run.multipliers[step],
                sparse=run.config.sparse_optimizer.learning_rate * run.multipliers[step],
            )
        batch, row_loss_sum, _ = pipeline.progress(source)
        total = row_loss_sum.clone()
        dist.all_reduce(total, group=ranks.control_group)
        losses.append(total.item() / batch.rows_global)
    return Left(
        losses=losses,
        shards=[
            (s.region, s.weight.clone(), {name: value.clone() for name, value in s.state.items()})
            for s in sharded.local_shards
        ],
        dense={name: p.detach().clone() for name, p in sharded.dense_parameters.items()},
        column_splits={t.spec.name: t.column_splits for t in sharded.layout.tables},
    )


def train_runs(runs: Sequence[Run], batches: Sequence[GlobalBatch]) -> list[Left]:
    """Do several runs in one process group: what a rank of `run_ranks` executes."""
    ranks = init_ranks("cpu", 60)
    return [train(run, batches, ranks) for run in runs]


def whole_tables(left_by_rank: Sequence[Left], tables: Sequence[TableSpec]) -> dict[str, torch.Tensor]:
    """Put the shards of all ranks together; a cell that no shard holds is NaN."""
    whole = {t.name: torch.full((t.rows, t.dim), torch.nan) for t in tables}
    for left in left_by_rank:
        for region, weight, _ in left.shards:
            cells = whole[region.table][region.row_start : region.row_end, region.column_start : region.column_end]
            known = ~cells.isnan()  # a replica must agree with the others
            assert torch.equal(cells[known], weight[known])
            cells.copy_(weight)
    return whole


def whole_state(
    left_by_rank: Sequence[Left], tables: Sequence[TableSpec]
) -> dict[str, dict[tuple[int, int], torch.Tensor]]:
    """Put row-wise Adagrad's sums together, by table and column range."""
    rows = {t.name: t.rows for t in tables}
    whole: dict[str, dict[tuple[int, int], torch.Tensor]] = {t.name: {} for t in tables}
    for left in left_by_rank:
        for region, _, state in left.shards:
            if not state or not region.rows:
                continue
            columns = (region.column_start, region.column_end)
            target = whole[region.table].setdefault(columns, torch.full((rows[region.table],), torch.nan))
            target[region.row_start : region.row_end] = state["momentum1"]
    return whole
