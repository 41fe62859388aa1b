"""What plans are measured with: a model for the tables, and batches that all plans get in the same order."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import nn

from dlrm_scale.batch import Batch, JaggedIds, jagged_features, make_batch
from dlrm_scale.config import Config
from dlrm_scale.models.build import build_model
from dlrm_scale.models.size_estimate import ACTIVATION_COPIES, DENSE_STATES
from dlrm_scale.planning.costs.dense_work import DenseWork
from dlrm_scale.planning.measuring.mixed_width_model import MixedWidthModel
from dlrm_scale.planning.tables.draw import BatchDrawer
from dlrm_scale.planning.tables.table_set import TableSet
from dlrm_scale.schema import INTEGER_COLUMNS
from dlrm_scale.sharding.ranks import Ranks

__all__ = ["PlanWorkload", "config_for_tables", "drawn_batches", "keep_batches", "pipeline_of", "real_batches"]

_LAYERS = (64, 32)
_MOST_DOTS = 100
"""Tables beyond which a model without dot products is measured: pairs would outweigh the tables."""


@dataclass(frozen=True, kw_only=True)
class PlanWorkload:
    """A model and its batches; the same on every rank.

    Attributes:
        tables: with their lookups.
        config: of the run that is imitated; `data.batch_size` is global.
        dataset: folder of the dataset whose rows are taken; "" for batches drawn from the tables' figures.
        from_config: the model is the config's; otherwise it is a small one made for the tables.
        batches: that are taken in turn.
        seed: of drawn batches.
    """

    tables: TableSet
    config: Config
    dataset: str = ""
    from_config: bool = False
    batches: int = 8
    seed: int = 0

    @property
    def takes_dots(self) -> bool:
        """Whether a DLRM can be built: tables of one width, and not very many."""
        return self.from_config or (
            len({table.dim for table in self.tables.tables}) == 1 and len(self.tables.tables) <= _MOST_DOTS
        )

    def model(self) -> nn.Module:
        """Build it, its tables without memory yet; values are the same on every rank and for every plan."""
        tables = [table.spec for table in self.tables.tables]
        if self.takes_dots:
            return build_model(self.config.model, tables, train=self.config.train)
        return MixedWidthModel(tables, _LAYERS, seed=self.config.model.seed)

    def dense(self, batch_size_per_rank: int) -> DenseWork:
        """Work of the dense part on one rank."""
        if self.takes_dots:
            return DenseWork.of_config(self.config, len(self.tables.tables), batch_size_per_rank)
        width = sum(table.dim for table in self.tables.tables)
        parameters = MixedWidthModel.count_parameters(width, _LAYERS)
        values = 2 * (2 * sum(_LAYERS) + 1) + width + _LAYERS[-1]
        states = DENSE_STATES[self.config.dense_optimizer.kind]
        return DenseWork(
            parameters=parameters,
            multiply_adds_per_row=parameters,
            memory_bytes=4 * parameters * (3 + states) + int(4 * values * batch_size_per_rank * ACTIVATION_COPIES),
        )


def config_for_tables(tables: TableSet, *, batch_size: int, wide: bool, ranks_per_host: int) -> Config:
    """Settings of a small model around a table set.

    Args:
        tables: all of one width, or else the model section isn't used.
        batch_size: of all ranks together.
        wide: allow types that cut columns.
        ranks_per_host: of the ranks at hand.
    """
    dim = tables.tables[0].dim
    return Config.model_validate(
        {
            "model": {"dim": dim, "dense_layers": (_LAYERS[0], dim), "over_layers": (*_LAYERS, 1)},
            "data": {"batch_size": batch_size},
            "sparse_optimizer": {"kind": tables.optimizer},
            "sharding": {"allow_split_row_state": wide, "ranks_per_host": ranks_per_host},
        }
    )


def pipeline_of(config: Config, device: torch.device) -> Literal["plain", "sparse_dist"]:
    """Settle `train.pipeline` as the trainer does."""
    if config.train.pipeline == "auto":
        return "sparse_dist" if device.type == "cuda" else "plain"
    return config.train.pipeline


def drawn_batches(workload: PlanWorkload, ranks: Ranks) -> list[Batch]:
    """Draw this rank's share of each batch; ids are those of the tables' figures, labels and dense features noise."""
    rows = max(1, workload.config.data.batch_size // ranks.ranks)
    drawer = BatchDrawer(workload.tables, seed=workload.seed)
    names = [table.name for table in workload.tables.tables]
    batches = []
    for number in range(workload.batches):
        share = number * ranks.ranks + ranks.rank
        bags = drawer.draw(rows, share)
        lengths = torch.from_numpy(np.concatenate([bags[name].lengths for name in names]))
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        torch.cumsum(lengths, 0, dtype=torch.int32, out=offsets[1:])
        ids = JaggedIds(
            values=torch.from_numpy(np.concatenate([bags[name].ids for name in names])),
            lengths=lengths,
            offsets=offsets,
            ids_per_key=[len(bags[name].ids) for name in names],
            true_rows=rows,
        )
        noise = torch.Generator().manual_seed(1_000_003 * workload.seed + share)
        batches.append(
            make_batch(
                dense_features=torch.rand(rows, len(INTEGER_COLUMNS), generator=noise),
                ids=ids,
                labels=(torch.rand(rows, generator=noise) < 0.3).float(),
                rows_global=rows * ranks.ranks,
                ranks=ranks.ranks,
                keys=names,
            )
        )
    return batches


def real_batches(workload: PlanWorkload, ranks: Ranks) -> list[Batch]:
    """Take this rank's share of the first batches of a run's first epoch; reading them isn't measured.

    Raises:
        DatasetError: the dataset is missing or damaged, ConfigError: it has fewer rows than a batch.
    """
    from dlrm_scale.data.dataset.dataset import Dataset
    from dlrm_scale.data.loading.loader import TrainLoader

    dataset = Dataset.open(Path(workload.dataset))
    loader = TrainLoader(dataset, workload.config.data, rank=ranks.rank, ranks=ranks.ranks, epochs=1)
    try:
        return keep_batches(iter(loader), min(workload.batches, loader.total_steps))
    finally:
        loader.close()


def keep_batches(source: Iterator[Batch], count: int) -> list[Batch]:
    """Take batches and copy them, for a loader uses its buffers again.

    Args:
        source: has at least `count` of them.
        count: how many.
    """
    return [_copied(next(source)) for _ in range(count)]


def _copied(batch: Batch) -> Batch:
    features = batch.sparse_features
    ids = JaggedIds(
        values=features.values().clone(),
        lengths=features.lengths().clone(),
        offsets=features.offsets().clone(),
        ids_per_key=list(features.length_per_key()),
        true_rows=batch.rows_local,
    )
    return replace(
        batch,
        dense_features=batch.dense_features.clone(),
        sparse_features=jagged_features(features.keys(), ids, len(batch.labels)),
        labels=batch.labels.clone(),
    )
