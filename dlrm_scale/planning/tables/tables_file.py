"""Table sets as files that people write by hand and programs read back, in TOML or JSON.

```
name = "mine"
optimizer = "rowwise_adagrad"     # the default
dim = 128                         # of tables that don't say theirs
tables = [
  {name = "C1", rows = 40_000_000, lookups_per_sample = 3},
  {name = "C2", rows = 39_060, dim = 64, unique_rows = [[512, 430.5], [8192, 3100.25]]},
]
```
Keys of a table are those of `TableStats`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dlrm_scale.errors import ConfigError
from dlrm_scale.planning.findings import findings
from dlrm_scale.planning.tables.table_set import TableSet
from dlrm_scale.planning.text_file import read_values, value_text, write_text

__all__ = ["FORMATS", "format_tables", "read_tables", "save_tables"]

FORMATS = (".toml", ".json")
_FORMAT_VERSION = 1
_LONGEST_NAME = 200
_REMEDY = "mend it there; the keys of a table are explained in dlrm_scale/planning/tables/table_set.py"


def read_tables(path: Path) -> TableSet:
    """Read and check a tables file.

    Raises:
        ConfigError: names file, table, key and rule of each finding, with the nearest spelling or value.
    """
    _check_suffix(path)
    values = read_values(path)
    version = values.pop("format_version", _FORMAT_VERSION)
    if version != _FORMAT_VERSION:
        raise ConfigError(
            f"{path}: format_version = {version!r}; this dlrm-scale reads {_FORMAT_VERSION}",
            remedy="write it again with `dlrm-scale stats`, or install another dlrm-scale",
        )
    values = {"name": path.stem, **values}
    dim, tables = values.pop("dim", None), values.get("tables")
    if dim is not None and isinstance(tables, list):
        values["tables"] = [{"dim": dim, **table} if isinstance(table, dict) else table for table in tables]
    try:
        return TableSet.model_validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        told = findings(error, TableSet, lambda place: _place(place, tables), rest=("dim", "format_version"))
        raise ConfigError(f"{path}: {told}", remedy=_REMEDY) from None


def save_tables(tables: TableSet, path: Path, *, force: bool = False) -> None:
    """Write a tables file, one line a table; equal sets give equal bytes.

    Args:
        tables: what to write.
        path: ends in .toml or .json.
        force: replace a file that exists.

    Raises:
        ConfigError: it exists, its name has another ending, or it can't be written.
    """
    _check_suffix(path)
    write_text(path, format_tables(tables, path.suffix), force=force)


def format_tables(tables: TableSet, suffix: str) -> str:
    """Return the text of a tables file; what has its default is left out, but for what a reader looks for.

    Args:
        tables: what to write.
        suffix: of `FORMATS`.
    """
    head: dict[str, Any] = {"format_version": _FORMAT_VERSION, "name": tables.name, "optimizer": tables.optimizer}
    head |= {"dtype": tables.dtype, "source": tables.source}
    lines = [table.model_dump(mode="json", exclude_defaults=True) for table in tables.tables]
    if suffix == ".json":
        top = "".join(f'"{key}": {value_text(value)},\n' for key, value in head.items())
        return f'{{\n{top}"tables": [\n' + ",\n".join(value_text(line) for line in lines) + "\n]\n}\n"
    top = "".join(f"{key} = {value_text(value)}\n" for key, value in head.items())
    return f"{top}tables = [\n" + "".join(f"  {_inline(line)},\n" for line in lines) + "]\n"


def _inline(values: Mapping[str, object]) -> str:
    return "{" + ", ".join(f"{key} = {value_text(value)}" for key, value in values.items()) + "}"


def _check_suffix(path: Path) -> None:
    if path.suffix not in FORMATS:
        raise ConfigError(f"{path}: a tables file ends in .toml or .json", remedy=f"name it {path.stem}.toml")


def _place(path: Sequence[int | str], tables: object) -> str:
    if len(path) < 2 or path[0] != "tables" or not isinstance(path[1], int):
        return ""
    table = tables[path[1]] if isinstance(tables, list) else None
    name = table.get("name") if isinstance(table, dict) else None
    if isinstance(name, str) and (not name.isprintable() or len(name) > _LONGEST_NAME):
        name = None
    return f"table {name} (number {path[1] + 1}): " if isinstance(name, str) else f"table number {path[1] + 1}: "
