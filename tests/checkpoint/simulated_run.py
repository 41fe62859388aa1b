"""A run without a model: tables whose rows are changed by hand, cut into shards as any plan would.

`Run` holds the whole tables; each rank's `LocalShard`s are views or copies of its rectangles. Ranks are threads that
share a `HashStore`.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dlrm_scale.checkpoint import Chain, CheckpointEngine, SaveOutcome, find_chain, restore
from dlrm_scale.checkpoint.chain.starts import RunIdentity
from dlrm_scale.checkpoint.saving.staging import HostStaging
from dlrm_scale.config import CheckpointConfig
from dlrm_scale.layout import LocalShard, ShardLayout, ShardRegion, TableLayout
from dlrm_scale.schema import TableSpec
from dlrm_scale.touched_rows import TouchedRows

TABLES = (
    TableSpec(name="C1", rows=97, dim=16),
    TableSpec(name="C2", rows=3, dim=8),
    TableSpec(name="C3", rows=40, dim=16),
    TableSpec(name="C4", rows=1, dim=4),
)
SHARDING_TYPES = ("table_wise", "row_wise", "column_wise", "data_parallel", "table_row_wise", "grid_shard")


def _cut(total: int, parts: int) -> list[tuple[int, int]]:
    # As TorchRec does: equal pieces rounded up, the last ones short or empty.
    size = -(-total // parts)
    return [(min(i * size, total), min((i + 1) * size, total)) for i in range(parts)]


def table_layout(spec: TableSpec, sharding_type: str, ranks: int, index: int = 0) -> TableLayout:
    """One table under one sharding type; `index` moves its first rank."""
    whole_rows, whole_columns = [(0, spec.rows)], [(0, spec.dim)]
    half = [(0, spec.dim // 2), (spec.dim // 2, spec.dim)]
    rows, columns = {
        "table_wise": (whole_rows, whole_columns),
        "data_parallel": (whole_rows, whole_columns),
        "row_wise": (_cut(spec.rows, ranks), whole_columns),
        "table_row_wise": (_cut(spec.rows, max(1, ranks - 1)), whole_columns),
        "column_wise": (whole_rows, half),
        "grid_shard": (_cut(spec.rows, max(1, ranks // 2)), half),
    }[sharding_type]
    replicated = sharding_type == "data_parallel"
    regions = []
    for row_index, (row_start, row_end) in enumerate(rows):
        for column_index, (column_start, column_end) in enumerate(columns):
            rank = 0 if replicated else (index + row_index * len(columns) + column_index) % ranks
            if sharding_type == "row_wise":
                rank = row_index
            regions.append(
                ShardRegion(
                    table=spec.name,
                    row_start=row_start,
                    row_end=row_end,
                    column_start=column_start,
                    column_end=column_end,
                    rank=rank,
                )
            )
    return TableLayout(spec=spec, sharding_type=sharding_type, regions=tuple(regions), replicated=replicated)


def make_layout(kinds: str | Sequence[str], ranks: int, tables: Sequence[TableSpec] = TABLES) -> ShardLayout:
    """All tables under one type, or each under its own."""
    names = [kinds] * len(tables) if isinstance(kinds, str) else kinds
    cut = [table_layout(spec, kind, ranks, i) for i, (spec, kind) in enumerate(zip(tables, names, strict=True))]
    return ShardLayout(ranks=ranks, tables=tuple(cut))


@dataclass
class Truth:
    """The whole tables and their optimizer state."""

    weight: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)

    def equals(self, other: "Truth") -> bool:
        return all(torch.equal(self.weight[t], other.weight[t]) for t in self.weight) and all(
            torch.equal(values, other.state[t][name]) for t in self.state for name, values in self.state[t].items()
        )


def make_truth(tables: Sequence[TableSpec], states: Sequence[str], seed: int = 0) -> Truth:
    """Random tables; `states` may hold "row" and "element"."""
    generator = torch.Generator().manual_seed(seed)
    truth = Truth()
    for spec in tables:
        truth.weight[spec.name] = torch.randn(spec.rows, spec.dim, generator=generator)
        truth.state[spec.name] = {}
        if "row" in states:
            truth.state[spec.name]["momentum1"] = torch.rand(spec.rows, generator=generator)
        if "element" in states:
            truth.state[spec.name]["moment2"] = torch.rand(spec.rows, spec.dim, generator=generator)
    return truth


def shards_of(layout: ShardLayout, truth: Truth, rank: int, *, blank: bool = False) -> list[LocalShard]:
    """A rank's shards with the values of `truth`, or with NaN."""
    shards = []
    for region in layout.regions_of_rank(rank):
        rows, columns = slice(region.row_start, region.row_end), slice(region.column_start, region.column_end)
        weight = truth.weight[region.table][rows, columns].clone()
        state = {
            name: (values[rows] if values.dim() == 1 else values[rows, columns]).clone()
            for name, values in truth.state[region.table].items()
        }
        if blank:
            for tensor in (weight, *state.values()):
                tensor.fill_(float("nan"))
        replicated = layout.table(region.table).replicated
        shards.append(LocalShard(region=region, weight=weight, state=state, replicated=replicated))
    return shards


def on_ranks(ranks: int, work: Callable[[int], Any]) -> list[Any]:
    """Run `work(rank)` for all ranks at once."""
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(work, range(ranks)))


class Run:
    """A trainer of `ranks` ranks on one root."""

    def __init__(
        self,
        root: Path,
        layout: ShardLayout,
        truth: Truth,
        *,
        resumed_from: Chain | None = None,
        run: RunIdentity | None = None,
        lossy_restores: int = 0,
        optimizer: str = "rowwise_adagrad",
        storages: Sequence[Any] | None = None,
        store: Any = None,
        staging_limit_bytes: int | Sequence[int] = 1 << 20,
        staging_is_short: bool = False,
        **config: Any,
    ) -> None:
        self.layout, self.truth, self.ranks = layout, truth, layout.ranks
        store = store if store is not None else torch.distributed.HashStore()
        self.shards = [shards_of(layout, truth, rank) for rank in range(self.ranks)]
        self.touched = [TouchedRows([s.region.rows for s in shards]) for shards in self.shards]
        for touched in self.touched:
            touched.enabled = True
        limits = [staging_limit_bytes] * self.ranks if isinstance(staging_limit_bytes, int) else staging_limit_bytes
        settings = CheckpointConfig(**{"vote_timeout_seconds": 60, **config})
        self.engines: list[CheckpointEngine] = on_ranks(
            self.ranks,
            lambda rank: CheckpointEngine(
                storages[rank] if storages else root,
                layout=layout,
                shards=self.shards[rank],
                touched=self.touched[rank],
                rank=rank,
                ranks=self.ranks,
                store=store,
                config=settings,
                optimizer=optimizer,
                resumed_from=resumed_from,
                run=run,
                lossy_restores=lossy_restores,
                staging=HostStaging(limits[rank]),
                staging_is_short=staging_is_short,
            ),
        )

    def change(self, table: str, ids: Sequence[int], value: float) -> None:
        """Add to rows and their state as a training step would, on the ranks that hold them, and mark them."""
        rows = torch.tensor(sorted(set(ids)), dtype=torch.int64)
        self.truth.weight[table][rows] += value
        for name, values in self.truth.state[table].items():
            values[rows] += abs(value) + len(name)
        for shards, touched in zip(self.shards, self.touched, strict=True):
            for index, shard in enumerate(shards):
                region = shard.region
                if region.table != table:
                    continue
                held = torch.tensor([i for i in ids if region.row_start <= i < region.row_end], dtype=torch.int64)
                touched.mark(index, held - region.row_start)
                whole = shards_of(self.layout, self.truth, region.rank)
                source = next(s for s in whole if s.region == region)
                shard.weight.copy_(source.weight)
                for name, values in source.state.items():
                    shard.state[name].copy_(values)

    def set_vote_timeout(self, seconds: float) -> None:
        """Shorten the wait for a vote that won't come."""
        for engine in self.engines:
            engine._ballot._timeout_seconds = seconds

    def save(self, step: int, **overrides: Any) -> SaveOutcome:
        """Save on all ranks and return rank 0's outcome."""
        return self.save_all(step, **overrides)[0]

    def save_all(self, step: int, **overrides: Any) -> list[SaveOutcome]:
        """Save on all ranks and return each one's outcome."""

        def one(rank: int) -> SaveOutcome:
            self.engines[rank].save(
                **{
                    "step": step,
                    "cursor": {"step": step},
                    "dense": {"over.weight": torch.full((3, 2), float(step))},
                    "rank_state": {"rng": torch.tensor([rank, step % 256], dtype=torch.uint8)},
                    "extra": {"note": "x"},
                    **overrides,
                }
            )
            return self.engines[rank].wait()[-1]

        return on_ranks(self.ranks, one)


def load(root: Path, layout: ShardLayout, like: Truth, *, optimizer: str = "rowwise_adagrad", **options: Any) -> Truth:
    """Restore the newest checkpoint on all ranks of `layout` and put the tables together again."""
    chain = find_chain(root, verify="full")
    assert chain is not None
    return load_chain(chain, layout, like, optimizer=optimizer, **options)


def load_chain(chain: Chain, layout: ShardLayout, like: Truth, *, optimizer: str, **options: Any) -> Truth:
    """As `load`, from a given chain."""
    found = Truth(
        weight={t: torch.full_like(w, float("nan")) for t, w in like.weight.items()},
        state={t: {n: torch.full_like(v, float("nan")) for n, v in s.items()} for t, s in like.state.items()},
    )
    for rank in range(layout.ranks):
        shards = shards_of(layout, like, rank, blank=True)
        restore(chain, layout=layout, shards=shards, rank=rank, ranks=layout.ranks, optimizer=optimizer, **options)
        for shard in shards:
            region = shard.region
            rows, columns = slice(region.row_start, region.row_end), slice(region.column_start, region.column_end)
            found.weight[region.table][rows, columns] = shard.weight
            for name, values in shard.state.items():
                where = found.state[region.table][name]
                if values.dim() == 1:
                    where[rows] = values
                else:
                    where[rows, columns] = values
    return found
