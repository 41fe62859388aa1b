"""A table set by whatever names it: a built-in one, a tables file, a dataset, a run, or a config with its dataset."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dlrm_scale.config import Config
from dlrm_scale.errors import ConfigError
from dlrm_scale.planning.tables.built_in import BUILT_IN, built_in_tables
from dlrm_scale.planning.tables.measure import Sampling, measure_tables
from dlrm_scale.planning.tables.table_set import SparseOptimizer, TableSet, check_dim
from dlrm_scale.planning.tables.tables_file import FORMATS, read_tables
from dlrm_scale.planning.text_file import read_values
from dlrm_scale.recipes.load import load_config, recipe_names
from dlrm_scale.recipes.validate import nearest

__all__ = ["config_of", "load_tables"]


def load_tables(
    source: str | Path,
    *,
    overrides: Sequence[str] = (),
    dim: int | None = None,
    optimizer: SparseOptimizer | None = None,
    sampling: Sampling | None = None,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> TableSet:
    """Find or measure a table set.

    Args:
        source: a name of `BUILT_IN`; a tables file; the folder of a dataset or of a run; a recipe's name or a config
            file, whose dataset is measured. Names that are both are recipes where there are overrides.
        overrides: of a config, `section.key=value` each.
        dim: of all tables, in place of the source's.
        optimizer: of the set, in place of the source's.
        sampling: of a dataset.
        on_progress: of a measurement: what is being done, how much is, of how much.

    Raises:
        ConfigError: nothing of that name, a wrong file, or a dataset without a dim.
        DatasetError: a damaged dataset.
    """
    if dim is not None and (wrong := check_dim(dim)) is not None:
        raise ConfigError(f"dim = {dim}: {wrong}", remedy="all tables of a set can have one dim, or each its own")
    path, name = Path(source), str(source)
    config: Config | None = None
    if name in BUILT_IN and not overrides:
        return built_in_tables(name, dim=dim, optimizer=optimizer or "rowwise_adagrad")
    if path.is_dir() and not (path / "config.toml").is_file():
        _refuse_overrides(overrides, name)
        if dim is None:
            raise ConfigError(
                f"the dataset {name} doesn't say how many columns tables have",
                remedy="give --dim, or name a recipe with --set data.path=DATASET",
            )
        folder = path
    elif path.is_file() and _is_tables_file(path):
        _refuse_overrides(overrides, name)
        return _changed(read_tables(path), dim, optimizer)
    else:
        config = _config(name, path, overrides)
        folder = Path(config.data.path)
    # pyarrow is for datasets alone
    from dlrm_scale.data.dataset.dataset import Dataset

    dataset = Dataset.open(folder)
    if config is None:
        assert dim is not None
        return measure_tables(
            dataset, dim=dim, optimizer=optimizer or "rowwise_adagrad", sampling=sampling, on_progress=on_progress
        )
    found = measure_tables(
        dataset,
        dim=dim or config.model.dim,
        pooling=config.model.pooling,
        optimizer=optimizer or config.sparse_optimizer.kind,
        sampling=sampling,
        order=config.data,
        on_progress=on_progress,
    )
    return found.model_copy(update={"name": folder.resolve().name})


def config_of(source: str | Path, *, overrides: Sequence[str] = ()) -> Config | None:
    """Find the config that a source of `load_tables` names; None where it names tables or a dataset alone.

    Raises:
        ConfigError: as `load_tables`.
    """
    path, name = Path(source), str(source)
    tables_alone = name in BUILT_IN and not overrides
    dataset_alone = path.is_dir() and not (path / "config.toml").is_file()
    if tables_alone or dataset_alone or (path.is_file() and _is_tables_file(path)):
        return None
    return _config(name, path, overrides)


def _config(name: str, path: Path, overrides: Sequence[str]) -> Config:
    if path.is_dir():
        name = str(path / "config.toml")
    elif name not in recipe_names() and not path.is_file():
        known = sorted({*BUILT_IN, *recipe_names()})
        hint = nearest(name, known)
        raise ConfigError(
            f"no tables {name!r}" + (f"; did you mean {hint!r}?" if hint else ""),
            remedy=f"name one of {', '.join(BUILT_IN)}, a tables file, a dataset, a run, or a recipe with its dataset",
        )
    config = load_config(name, overrides)
    if not config.data.path:
        raise ConfigError(f"{name} names no dataset", remedy="add --set data.path=DATASET")
    if (wrong := check_dim(config.model.dim)) is not None:
        raise ConfigError(f"{name}: model.dim = {config.model.dim}: {wrong}", remedy="change model.dim")
    return config


def _is_tables_file(path: Path) -> bool:
    """Whether a file is meant to hold tables: configs have sections alone."""
    if path.suffix not in FORMATS:
        return True
    values: dict[str, Any] = read_values(path)
    sections = set(Config.model_fields)
    return "tables" in values or path.suffix == ".json" or not set(values) & sections


def _refuse_overrides(overrides: Sequence[str], name: str) -> None:
    if overrides:
        raise ConfigError(
            f"{name} is no config, so that --set {overrides[0]} changes nothing",
            remedy="leave it out, or name a config",
        )


def _changed(tables: TableSet, dim: int | None, optimizer: SparseOptimizer | None) -> TableSet:
    update: dict[str, object] = {} if optimizer is None else {"optimizer": optimizer}
    if dim is not None:
        update["tables"] = tuple(table.model_copy(update={"dim": dim}) for table in tables.tables)
    return tables.model_copy(update=update)
