"""The models and batches of the step benches: random rows, our sharded model, and its weights put back to the start."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from dlrm_scale.batch import Batch, JaggedIds, make_batch
from dlrm_scale.config import Config
from dlrm_scale.models.build import build_model
from dlrm_scale.models.compiled_layers import compile_dense_part, use_eager_layers
from dlrm_scale.models.dense_part import DensePart
from dlrm_scale.models.initial_rows import fill_initial_rows
from dlrm_scale.models.tables import table_specs
from dlrm_scale.schema import INTEGER_COLUMNS
from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.sharding.shard import ShardedModel, shard_model
from dlrm_scale.units import GIB

__all__ = [
    "LayerVariants",
    "Precision",
    "ResettableModel",
    "Shape",
    "check_memory",
    "cycle",
    "random_batches",
]

Precision = Literal["fp32", "bf16"]
Layers = Callable[..., torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Tables and batch.

    Attributes:
        table_rows: by category column.
        ids_per_bag: by category column, the same for every row.
        dim: columns of every table.
        batch_size: rows of the global batch.
    """

    table_rows: dict[str, int]
    ids_per_bag: dict[str, int]
    dim: int
    batch_size: int

    @property
    def table_bytes(self) -> int:
        """Bytes of all weights."""
        return 4 * self.dim * sum(self.table_rows.values())

    @property
    def lookups(self) -> int:
        """Rows read for one row of a batch."""
        return sum(self.ids_per_bag.values())


def random_batches(shape: Shape, count: int, *, rank: int = 0, ranks: int = 1) -> list[Batch]:
    """Make batches with uniform ids; the ranks' parts together are the batches that one rank would get."""
    generator = torch.Generator().manual_seed(0)
    return [_batch(shape, generator, rank, ranks) for _ in range(count)]


def _batch(shape: Shape, generator: torch.Generator, rank: int, ranks: int) -> Batch:
    rows = shape.batch_size
    mine = slice(rows * rank // ranks, rows * (rank + 1) // ranks)
    local_rows = mine.stop - mine.start
    ids = {
        name: torch.randint(0, shape.table_rows[name], (rows, per_bag), generator=generator)[mine].reshape(-1)
        for name, per_bag in shape.ids_per_bag.items()
    }
    dense = torch.randn(rows, len(INTEGER_COLUMNS), generator=generator)[mine].contiguous()
    labels = (torch.rand(rows, generator=generator) < 0.25).float()[mine].contiguous()
    values: torch.Tensor | JaggedIds
    if all(per_bag == 1 for per_bag in shape.ids_per_bag.values()):
        values = torch.stack(list(ids.values()))
    else:
        sizes = torch.tensor(list(shape.ids_per_bag.values()), dtype=torch.int32)
        lengths = sizes.repeat_interleave(local_rows)
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        torch.cumsum(lengths, 0, dtype=torch.int32, out=offsets[1:])
        values = JaggedIds(
            values=torch.cat(list(ids.values())),
            lengths=lengths,
            offsets=offsets,
            ids_per_key=[len(x) for x in ids.values()],
            true_rows=local_rows,
        )
    return make_batch(
        dense_features=dense, ids=values, labels=labels, rows_global=rows, ranks=ranks, keys=list(shape.table_rows)
    )


class ResettableModel:
    """Our model, sharded, which can be put back to its first weights and empty optimizer state.

    Args:
        shape: what is trained.
        config: everything else.
        ranks: the process group.
    """

    def __init__(self, shape: Shape, config: Config, ranks: Ranks) -> None:
        """Build and fill it."""
        self.config = config
        tables = table_specs(config.model, shape.table_rows)
        self._specs = {table.name: table for table in tables}
        model = build_model(config.model, tables, train=config.train)
        self.sharded: ShardedModel = shard_model(model, tables, config, ranks)
        self._first = {name: tensor.detach().clone() for name, tensor in self.sharded.dense_state().items()}
        self.reset()

    @property
    def dense_part(self) -> DensePart:
        """What runs after the lookup."""
        part = self.sharded.module.module.dense_part
        assert isinstance(part, DensePart)
        return part

    def reset(self) -> None:
        """Put everything back."""
        for shard in self.sharded.local_shards:
            spec = self._specs[shard.region.table]
            fill_initial_rows(shard.weight, spec, shard.region, self.config.model.seed)
            for state in shard.state.values():
                state.zero_()
        self.sharded.load_dense_state(self._first)

    def copy_tables_into(self, targets: dict[str, nn.Parameter]) -> None:
        """Give another model the same table weights; for one rank with whole tables."""
        with torch.no_grad():
            for shard in self.sharded.local_shards:
                targets[shard.region.table].copy_(shard.weight)


class LayerVariants:
    """Switches one dense part between precisions, compiled or not, so that variants share the tables' memory.

    Args:
        part: of the model.
        rows: of a batch on this rank.
    """

    def __init__(self, part: DensePart, rows: int) -> None:
        """Begin with no variant."""
        self._part, self._rows = part, rows
        self._functions: dict[tuple[str, bool], tuple[Layers, Layers]] = {}

    def prepare(self, precision: Precision, *, compiled: bool) -> str | None:
        """Make a variant; return why it can't be compiled, if so."""
        use_eager_layers(self._part)
        self._part.precision = precision
        failure = compile_dense_part(self._part, self._rows) if compiled else None
        if failure is None:
            self._functions[precision, compiled] = (self._part.bottom_function, self._part.top_function)
        use_eager_layers(self._part)
        return failure

    def enter(self, precision: Precision, *, compiled: bool) -> None:
        """Use a variant from the next step on."""
        self._part.precision = precision
        self._part.bottom_function, self._part.top_function = self._functions[precision, compiled]


def cycle(batches: list[Batch]) -> Iterator[Batch]:
    """Repeat for ever."""
    while True:
        yield from batches


def check_memory(needed_bytes: int, what: str) -> None:
    """End the program when the memory isn't free: a bench that swaps measures the disk, and may kill others."""
    free_bytes = _free_bytes()
    if free_bytes is not None and needed_bytes > free_bytes:
        raise SystemExit(
            f"{what} needs {needed_bytes / GIB:.1f} GiB of memory and {free_bytes / GIB:.1f} GiB are free: "
            "use fewer rows (--rows, --rows-cap), a smaller --dim, or wait for other programs to end"
        )


def _free_bytes() -> int | None:
    try:
        with open("/proc/meminfo") as lines:
            return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
    except OSError:
        return None
