"""A new run that takes what another one has learnt: which run, what of it, and what may differ."""

from dataclasses import asdict, dataclass
from pathlib import Path

from dlrm_scale.config import Config
from dlrm_scale.errors import ConfigError
from dlrm_scale.recipes import load_config
from dlrm_scale.recipes.load import differing

__all__ = ["WarmStart", "check_same_model", "make_warm_start"]


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """What a run takes from another at its beginning; the data begins anew.

    Attributes:
        run: absolute folder of the other run.
        tables_only: take the tables' rows and optimizer state, not the dense part.
        allow_new_tables: tables that the other run hasn't get their initial rows.
        allow_resized_tables: tables may have another number of rows. Ids keep their meaning: new rows at the end get
            their initial values, rows that are too many are cut. Whether the ids do keep it is the user's word, as the
            vocabularies of such datasets are never the same.
    """

    run: str
    tables_only: bool = False
    allow_new_tables: bool = False
    allow_resized_tables: bool = False

    @property
    def options(self) -> dict[str, bool]:
        """All but the run, JSON-ready."""
        return {name: value for name, value in asdict(self).items() if name != "run"}


def make_warm_start(
    run: str, *, tables_only: bool, allow_new_tables: bool, allow_resized_tables: bool
) -> WarmStart | None:
    """What the command line asks for; None without a run.

    Raises:
        ConfigError: an option without `--init-from`.
    """
    options = {
        "tables_only": tables_only,
        "allow_new_tables": allow_new_tables,
        "allow_resized_tables": allow_resized_tables,
    }
    if run:
        return WarmStart(run=str(Path(run).absolute()), **options)
    for name, wanted in options.items():
        if wanted:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} goes with --init-from RUN: a run that goes on has the tables that it began with",
                remedy=f"start a new run with --init-from and {flag}",
            )
    return None


def check_same_model(config: Config, warm_start: WarmStart) -> None:
    """Compare the model settings that the taken weights depend on.

    Raises:
        ConfigError: there is no such run, or its model is another one.
    """
    saved = Path(warm_start.run) / "config.toml"
    if not saved.is_file():
        raise ConfigError(f"--init-from {warm_start.run}: there is no run", remedy="name the folder of a run")
    of_tables = ("model.dim", "model.pooling", "sparse_optimizer.kind")
    different = [
        f"{path} is {after}, there {before}"
        for path, (before, after) in differing(load_config(saved), config).items()
        if path in of_tables or (not warm_start.tables_only and _is_of_dense_part(path))
    ]
    if different:
        raise ConfigError(
            f"--init-from {warm_start.run}: its weights and optimizer state belong to another model:\n  "
            + "\n  ".join(different),
            remedy="give this run the same settings"
            + ("" if warm_start.tables_only else ", or take its tables alone with --tables-only"),
        )


def _is_of_dense_part(path: str) -> bool:
    return path == "dense_optimizer.kind" or (path.startswith("model.") and path != "model.seed")
