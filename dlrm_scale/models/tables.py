"""Embedding tables of a model: one for each category column, checked before anything is built."""

from collections.abc import Mapping

from dlrm_scale.config import ModelConfig
from dlrm_scale.errors import ConfigError
from dlrm_scale.schema import TableSpec

__all__ = ["DIM_MULTIPLE", "MAX_TABLE_ROWS", "check_model", "table_specs"]

DIM_MULTIPLE = 4
"""fbgemm's kernels load four float32 at a time; other widths fail deep inside them."""

MAX_TABLE_ROWS = 2**31
"""Datasets store ids as int32, so that ids reach at most `2**31 - 1`."""


def table_specs(config: ModelConfig, table_rows: Mapping[str, int]) -> tuple[TableSpec, ...]:
    """Describe the tables that `config` asks for.

    Args:
        config: the model section.
        table_rows: rows of each category column's table, as the dataset's manifest has them; the order is kept.

    Returns:
        One table a column, named like the column.

    Raises:
        ConfigError: the model section has values that don't go together, or a table has an impossible size.
    """
    if not table_rows:
        raise ConfigError("no category columns: a model needs at least one embedding table")
    check_model(config, tables=tuple(table_rows))
    for name, rows in table_rows.items():
        if not 1 <= rows <= MAX_TABLE_ROWS:
            raise ConfigError(f"table {name} has {rows} rows; allowed are 1 to {MAX_TABLE_ROWS}")
    return tuple(
        TableSpec(name=name, rows=rows, dim=config.dim, pooling=config.pooling) for name, rows in table_rows.items()
    )


def check_model(config: ModelConfig, *, tables: tuple[str, ...] = ()) -> None:
    """Refuse sizes that don't go together.

    Args:
        config: the model section.
        tables: names of the tables, for the message alone.

    Raises:
        ConfigError: names the key, its value and what is allowed.
    """
    dim = config.dim
    if dim % DIM_MULTIPLE:
        lower, upper = dim - dim % DIM_MULTIPLE, dim + DIM_MULTIPLE - dim % DIM_MULTIPLE
        nearest = f"{lower} or {upper}" if lower else f"{upper}"
        raise ConfigError(
            f"model.dim = {dim}{_of_tables(tables)}: must be a multiple of {DIM_MULTIPLE}",
            remedy=f"the nearest allowed: {nearest}; change model.dense_layers' last size with it",
        )
    if not config.dense_layers or config.dense_layers[-1] != dim:
        raise ConfigError(
            f"model.dense_layers = {_list(config.dense_layers)}: the last size must be model.dim = {dim}",
            remedy=f"use model.dense_layers = {_list((*config.dense_layers[:-1], dim))}",
        )
    if len(config.over_layers) < 2 or config.over_layers[-1] != 1:
        hidden = config.over_layers[:-1] if config.over_layers[-1:] == (1,) else config.over_layers
        raise ConfigError(
            f"model.over_layers = {_list(config.over_layers)}: must have at least two sizes and end with 1 (the logit)",
            remedy=f"use model.over_layers = {_list((*(hidden or (64,)), 1))}",
        )
    if config.kind == "projection":
        _check_branch("interaction_branch1_layers", config.interaction_branch1_layers, dim)
        _check_branch("interaction_branch2_layers", config.interaction_branch2_layers, dim)


def _check_branch(key: str, sizes: tuple[int, ...], dim: int) -> None:
    if sizes and sizes[-1] % dim == 0:
        return
    rule = f"with model.kind = projection the last size must be a multiple of model.dim = {dim}"
    last = max(1, round(sizes[-1] / dim)) * dim if sizes else dim
    raise ConfigError(
        f"model.{key} = {_list(sizes)}: {rule}",
        remedy=f"for example model.{key} = {_list((*sizes[:-1], last))}",
    )


def _of_tables(tables: tuple[str, ...]) -> str:
    if not tables:
        return ""
    return f" (table {tables[0]})" if len(tables) == 1 else f" (tables {tables[0]} to {tables[-1]})"


def _list(sizes: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, sizes))}]"
