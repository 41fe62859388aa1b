"""Small models whose whole steps say what micro-benchmarks can't: what a sharding type costs by being in use."""

from dataclasses import dataclass

import numpy as np
import torch

from dlrm_scale.batch import Batch, JaggedIds, make_batch
from dlrm_scale.config import Config
from dlrm_scale.planning.costs.dense_work import DenseWork
from dlrm_scale.planning.measuring.micro_lookups import skewed_ids
from dlrm_scale.planning.tables.table_set import TableSet, TableStats
from dlrm_scale.schema import CATEGORY_COLUMNS, INTEGER_COLUMNS
from dlrm_scale.sharding.shard_shapes import TableShape

__all__ = ["ProbeModel", "probe_batches", "probe_models"]

_MOST_IDS = 300_000
_MOST_VALUES = 2_500_000
_BATCHES = 3
_KINDS = ("table_wise", "row_wise", "one_rank", "mixed", "table_row_wise", "column_wise", "data_parallel", "mixed")


@dataclass(frozen=True, kw_only=True)
class ProbeModel:
    """A model, what its tables are asked for, and a plan.

    Attributes:
        tables: rows, columns and mean ids a bag.
        skews: of the ids of each table.
        plan: by table.
        batch_size_per_rank: rows.
        seed: of the ids.
    """

    tables: TableSet
    skews: tuple[float, ...]
    plan: tuple[TableShape, ...]
    batch_size_per_rank: int
    seed: int

    @property
    def dim(self) -> int:
        """Columns of every table."""
        return self.tables.tables[0].dim

    def config(self, ranks: int, ranks_per_host: int) -> Config:
        """Settings of a run with it."""
        return Config.model_validate(
            {
                "model": {"dim": self.dim, "dense_layers": (32, self.dim), "over_layers": (64, 1)},
                "data": {"batch_size": self.batch_size_per_rank * ranks},
                "sharding": {"allow_split_row_state": True, "ranks_per_host": ranks_per_host},
            }
        )

    def dense(self) -> DenseWork:
        """Its dense part."""
        return DenseWork.of_config(self.config(1, 1), len(self.tables.tables), self.batch_size_per_rank)


def probe_models(count: int, *, ranks: int, ranks_per_host: int) -> list[ProbeModel]:
    """Draw models of every kind of plan, a few in which types mix; the same ones every time.

    Args:
        count: how many; eight have every kind.
        ranks: of the process group.
        ranks_per_host: of them.
    """
    random = np.random.default_rng(77)
    return [_draw(random, _KINDS[n % len(_KINDS)], ranks, ranks_per_host, seed=n) for n in range(count)]


def probe_batches(probe: ProbeModel, rank: int, ranks: int) -> tuple[list[Batch], TableSet]:
    """Draw a rank's batches.

    Args:
        probe: the model.
        rank: whose.
        ranks: how many.

    Returns:
        Batches in turn, and the tables with what the ids of all ranks look up: distinct rows of a rank's and of the
        global batch, and where they lie.
    """
    drawn = [[_ids(probe, which, turn) for turn in range(_BATCHES)] for which in range(ranks)]
    rows = probe.batch_size_per_rank
    generator = torch.Generator().manual_seed(probe.seed)
    batches = []
    for ids in drawn[rank]:
        lengths = torch.cat([torch.full((rows,), len(of_table) // rows, dtype=torch.int32) for of_table in ids])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int32), torch.cumsum(lengths, 0, dtype=torch.int32)])
        bags = JaggedIds(
            values=torch.cat(ids),
            lengths=lengths,
            offsets=offsets,
            ids_per_key=[len(of_table) for of_table in ids],
            true_rows=rows,
        )
        batches.append(
            make_batch(
                dense_features=torch.rand(rows, len(INTEGER_COLUMNS), generator=generator),
                ids=bags,
                labels=(torch.rand(rows, generator=generator) < 0.3).float(),
                rows_global=rows * ranks,
                ranks=ranks,
                keys=[t.name for t in probe.tables.tables],
            )
        )
    whole = [torch.cat([drawn[which][0][number] for which in range(ranks)]) for number in range(len(probe.skews))]
    stats = [
        _with_lookups(table, rows, ranks, drawn[rank][0][number], whole[number])
        for number, table in enumerate(probe.tables.tables)
    ]
    return batches, probe.tables.model_copy(update={"tables": tuple(stats)})


def _ids(probe: ProbeModel, rank: int, turn: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10_000 * probe.seed + 100 * rank + turn)
    return [
        skewed_ids(table.rows, probe.batch_size_per_rank * int(table.lookups_per_sample), skew, generator)
        for table, skew in zip(probe.tables.tables, probe.skews, strict=True)
    ]


def _with_lookups(table: TableStats, rows: int, ranks: int, own: torch.Tensor, whole: torch.Tensor) -> TableStats:
    """Count distinct rows, and lookups before the rows at which row-wise shards begin."""
    distinct = {rows: float(len(np.unique(own.numpy()))), rows * ranks: float(len(np.unique(whole.numpy())))}
    block = -(-table.rows // ranks)
    cuts = sorted({min(index * block, table.rows) for index in range(1, ranks)} - {0, table.rows})
    before = tuple((cut, float((whole < cut).double().mean())) for cut in cuts)
    return table.model_copy(update={"unique_rows": tuple(sorted(distinct.items())), "lookups_before_row": before})


def _draw(random: np.random.Generator, kind: str, ranks: int, ranks_per_host: int, seed: int) -> ProbeModel:
    rows = int(random.choice([256, 512, 1024]))
    dim, count = int(random.choice([16, 32, 64])), int(random.choice([2, 4, 8, 16]))
    while 2 * rows * dim * count > _MOST_VALUES:
        count //= 2
    most = int(random.choice([1, 1, 5, 20, 40]))
    bags = [int(random.integers(1, most + 1)) for _ in range(count)]
    while rows * sum(bags) > _MOST_IDS:
        bags = [max(1, ids // 2) for ids in bags]
    largest = 4.0 if kind == "data_parallel" else 5.7
    tables = tuple(
        TableStats(name=CATEGORY_COLUMNS[i], rows=int(10 ** random.uniform(2, largest)), dim=dim, lookups_per_sample=n)
        for i, n in enumerate(bags)
    )
    skew = float(random.choice([1.0, 2.0, 3.0, 4.0]))
    return ProbeModel(
        tables=TableSet(name=f"probe {seed}", tables=tables, source="calibrate"),
        skews=(skew,) * count,
        plan=tuple(_shape(random, kind, table, i, ranks, ranks_per_host) for i, table in enumerate(tables)),
        batch_size_per_rank=rows,
        seed=seed,
    )


def _shape(
    random: np.random.Generator, kind: str, table: TableStats, index: int, ranks: int, ranks_per_host: int
) -> TableShape:
    if kind == "mixed":
        offered = ["table_wise", "row_wise", "table_row_wise", "column_wise", "table_column_wise"]
        offered += ["data_parallel"] if table.rows <= 10_000 else []
        kind = str(random.choice(offered))
    if kind in ("table_wise", "one_rank"):
        return TableShape(
            sharding_type="table_wise", columns=table.dim, places=(0 if kind == "one_rank" else index % ranks,)
        )
    if kind == "table_row_wise":
        return TableShape(sharding_type=kind, columns=table.dim, places=(index % (ranks // ranks_per_host),))
    if kind in ("column_wise", "table_column_wise"):
        first = 0 if kind == "column_wise" else index % (ranks // ranks_per_host) * ranks_per_host
        within = ranks if kind == "column_wise" else ranks_per_host
        places = (first + index % within, first + (index + 1) % within)
        return TableShape(sharding_type=kind, columns=table.dim // 2, places=places)
    return TableShape(sharding_type=kind, columns=table.dim)
