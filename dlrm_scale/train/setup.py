"""From a config to a sharded model on this process's rank: what training and evaluation share."""

import os
from dataclasses import dataclass
from typing import Literal

import torch

from dlrm_scale.config import Config
from dlrm_scale.data.dataset import Dataset
from dlrm_scale.models.build import build_model
from dlrm_scale.models.initial_rows import fill_initial_rows
from dlrm_scale.models.tables import table_specs
from dlrm_scale.schema import TableSpec
from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.sharding.shard import ShardedModel, shard_model

__all__ = ["ModelOnRanks", "build_on_ranks", "device_kind", "pipeline_kind", "set_threads"]


@dataclass(frozen=True, kw_only=True)
class ModelOnRanks:
    """A sharded model with what describes it.

    Attributes:
        sharded: this rank's part.
        tables: every table, whole.
    """

    sharded: ShardedModel
    tables: tuple[TableSpec, ...]

    def fill_initial_rows(self, seed: int) -> None:
        """Give every local row its initial value, a function of (seed, table, global row, column)."""
        specs = {spec.name: spec for spec in self.tables}
        for shard in self.sharded.local_shards:
            fill_initial_rows(shard.weight, specs[shard.region.table], shard.region, seed)


def device_kind(config: Config) -> Literal["cpu", "cuda"]:
    """Settle `train.device = auto`."""
    if config.train.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.train.device


def pipeline_kind(config: Config, device: torch.device) -> Literal["plain", "sparse_dist"]:
    """Settle `train.pipeline = auto`: on CPU sparse_dist costs 10-17 % and hides nothing."""
    if config.train.pipeline == "auto":
        return "sparse_dist" if device.type == "cuda" else "plain"
    return config.train.pipeline


def set_threads(config: Config, local_ranks: int) -> None:
    """Share this host's cores among its ranks."""
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(config.train.threads_per_rank or max(1, cores // local_ranks))


def build_on_ranks(config: Config, dataset: Dataset, ranks: Ranks) -> ModelOnRanks:
    """Build the model for a dataset's tables and shard it; tables hold no values yet.

    Args:
        config: model, optimizers and sharding.
        dataset: its manifest sets the rows of the tables.
        ranks: the process group.

    Raises:
        ConfigError: a model that can't be built, PlanError: a plan that isn't allowed.
    """
    tables = table_specs(config.model, dataset.table_rows)
    model = build_model(config.model, tables)
    return ModelOnRanks(sharded=shard_model(model, tables, config, ranks), tables=tables)
