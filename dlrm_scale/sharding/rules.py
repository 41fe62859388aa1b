"""Which sharding types a table may get, and why not the others."""

import difflib
from collections.abc import Mapping, Sequence

from dlrm_scale.config import Config, ShardingConfig
from dlrm_scale.errors import ConfigError, PlanError
from dlrm_scale.schema import CATEGORY_COLUMNS, TableSpec
from dlrm_scale.units import parse_bytes

__all__ = [
    "COLUMN_SPLIT_TYPES",
    "allowed_types",
    "check_optimizer",
    "check_sharding",
    "column_width",
    "device_memory_bytes",
    "objection",
]

COLUMN_SPLIT_TYPES = ("column_wise", "table_column_wise", "grid_shard")
"""Types that cut a table's columns."""

# What `auto` offers, in the order in which ties are broken. grid_shard only on request, as in TorchRec's planner.
_AUTO = ("table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "data_parallel")


def check_sharding(config: Config) -> None:
    """Refuse what no dataset and no ranks could make right, before there are ranks.

    Rows of tables, and with `train.device = auto` the device, aren't known yet: rules on them wait for
    `allowed_types`.

    Args:
        config: sections `sharding`, `sparse_optimizer`, `model` and `train` are read.

    Raises:
        ConfigError: as `allowed_types`, or `sharding.device_memory` is no size.
        PlanError: as `allowed_types`.
    """
    device_memory_bytes(config.sharding)
    model = config.model
    tables = [TableSpec(name=name, rows=2, dim=model.dim, pooling=model.pooling) for name in CATEGORY_COLUMNS]
    allowed_types(tables, config, config.train.device, ranks=1)


def device_memory_bytes(config: ShardingConfig) -> int | None:
    """Read `sharding.device_memory`; None where it is empty.

    Raises:
        ConfigError: it is no size, or 0.
    """
    if not config.device_memory:
        return None
    try:
        size = parse_bytes(config.device_memory)
    except ConfigError as error:
        raise ConfigError(f"sharding.device_memory = {error.message}", remedy=error.remedy) from None
    if size == 0:
        raise ConfigError("sharding.device_memory = 0: nothing fits", remedy="leave it empty for what the device has")
    return size


def allowed_types(
    tables: Sequence[TableSpec], config: Config, device_type: str, ranks: int
) -> dict[str, tuple[str, ...]]:
    """List the sharding types that the planner may choose from, by table.

    A type that was asked for is either allowed or refused with the reason; `auto` leaves out what would be refused.
    On one rank `auto` takes table_wise: there is nothing to spread, and the others cost more.

    Args:
        tables: the model's tables.
        config: sections `sharding` and `sparse_optimizer` are read.
        device_type: `cpu` or `cuda`; anything else passes the rules on the device.
        ranks: number of ranks.

    Raises:
        ConfigError: `sharding.tables` names a table that the model doesn't have, or the optimizer or the precision of
            exchanges isn't supported here.
        PlanError: a type that was asked for isn't allowed for a table.
    """
    sharding = config.sharding
    check_optimizer(config.sparse_optimizer.kind, device_type)
    _check_exchange(sharding, device_type)
    _check_names(sharding.tables, tables)
    allowed = {}
    for table in tables:
        asked = sharding.tables.get(table.name) or (None if sharding.kind == "auto" else sharding.kind)
        if asked is None:
            offered = _AUTO if ranks > 1 else _AUTO[:1]
            allowed[table.name] = tuple(t for t in offered if _objection(t, table, config) is None)
            continue
        refusal = _objection(asked, table, config)
        if refusal is not None:
            raise PlanError(f"table {table.name}: {asked} {refusal[0]}", remedy=refusal[1])
        allowed[table.name] = (asked,)
    return allowed


def column_width(dim: int, minimum: int) -> int:
    """Find the width of a column shard: the smallest divisor of `dim` that is a multiple of 4 and at least `minimum`.

    Returns `dim` when there is none, that is, when the table can't be cut. This is TorchRec's rule
    (`sharding_plan._find_base_dim`), which cuts nothing without a word.
    """
    return next((w for w in range(minimum, dim) if dim % w == 0 and w % 4 == 0), dim)


def objection(
    kind: str,
    table: TableSpec,
    *,
    optimizer: str,
    allow_split_row_state: bool,
    min_columns_per_shard: int = 4,
) -> tuple[str, str] | None:
    """Why a sharding type can't be used for a table and what to do instead; None if it can.

    Args:
        kind: the sharding type.
        table: rows, dim and pooling decide.
        optimizer: of the tables, as `sparse_optimizer.kind`.
        allow_split_row_state: each column shard may keep a row state of its own.
        min_columns_per_shard: shards may not be narrower.
    """
    if kind == "grid_shard" and table.pooling == "mean":
        return (
            "with mean pooling trains as sum pooling: TorchRec 1.8 never divides its partial sums",
            'use sum pooling (model.pooling = "sum") or another sharding type',
        )
    if kind == "grid_shard" and table.rows == 1 and optimizer != "sgd":
        return (
            "can't describe the optimizer state of a table with one row: TorchRec 1.8 takes it for a column-wise one",
            f'use another type for it, as in sharding.tables.{table.name} = "table_wise"',
        )
    if kind in COLUMN_SPLIT_TYPES:
        if optimizer == "rowwise_adagrad" and not allow_split_row_state:
            return (
                "would give each column shard a row state of its own, which is another algorithm than row-wise "
                "Adagrad on the whole row",
                "allow it by name with sharding.allow_split_row_state = true, or use "
                'sparse_optimizer.kind = "sgd", or a type that keeps rows whole',
            )
        if column_width(table.dim, min_columns_per_shard) == table.dim:
            return (
                f"can't cut {table.dim} columns into equal shards of at least {min_columns_per_shard} that "
                "are a multiple of 4",
                _narrower(table.dim, min_columns_per_shard),
            )
    if kind == "data_parallel" and optimizer == "adam":
        return (
            "with adam is another algorithm than on sharded tables: the dense Adam also moves rows that no sample "
            "looked up",
            'use another sharding type, or sparse_optimizer.kind = "rowwise_adagrad" or "sgd"',
        )
    return None


def check_optimizer(optimizer: str, device_type: str) -> None:
    """Refuse an optimizer that a device has no kernel for.

    Raises:
        ConfigError: with what to use instead.
    """
    if optimizer == "adam" and device_type == "cpu":
        raise ConfigError(
            "sparse_optimizer.kind: adam isn't supported for tables on CPU: fbgemm has no such kernel there",
            remedy='set sparse_optimizer.kind to "rowwise_adagrad" or "sgd", or train on a GPU',
        )


def _check_exchange(sharding: ShardingConfig, device_type: str) -> None:
    precision = sharding.all_to_all_precision
    if precision == "bf16" and device_type == "cpu":
        raise ConfigError(
            'sharding.all_to_all_precision = "bf16": not on CPU, where TorchRec 1.8 would send fp16 instead',
            remedy='use "fp16" (finer than bf16, but nothing beyond 65504), or "fp32"',
        )
    types = {sharding.kind, *sharding.tables.values()}
    if precision != "fp32" and types == {"data_parallel"}:
        raise ConfigError(
            f'sharding.all_to_all_precision = "{precision}" would do nothing: with data_parallel alone no pooled '
            "vectors travel between ranks, and gradients are averaged in fp32",
            remedy='leave it at "fp32", or choose a type that shards tables',
        )


def _check_names(asked: Mapping[str, str], tables: Sequence[TableSpec]) -> None:
    names = [t.name for t in tables]
    for name in asked:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            raise ConfigError(
                f"sharding.tables: the model has no table {name!r}; its tables are {', '.join(names)}",
                remedy=f"did you mean {near[0]!r}?" if near else "use the name of a category column",
            )


def _objection(kind: str, table: TableSpec, config: Config) -> tuple[str, str] | None:
    return objection(
        kind,
        table,
        optimizer=config.sparse_optimizer.kind,
        allow_split_row_state=config.sharding.allow_split_row_state,
        min_columns_per_shard=config.sharding.min_columns_per_shard,
    )


def _narrower(dim: int, minimum: int) -> str:
    widths = [w for w in range(4, min(dim, minimum + 1), 4) if dim % w == 0]
    if widths:
        return f"set sharding.min_columns_per_shard = {widths[-1]}, or use another sharding type"
    return "use another sharding type"
