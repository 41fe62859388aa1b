"""What a plan is asked for: tables, a cluster, ranks and batch, and what restricts the choice."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from dlrm_scale.config import Config, ShardingType
from dlrm_scale.errors import ConfigError
from dlrm_scale.planning.cluster.cluster import Cluster
from dlrm_scale.planning.costs.dense_work import DenseWork
from dlrm_scale.planning.costs.step_setting import check_rank_count
from dlrm_scale.planning.tables.table_set import TableSet
from dlrm_scale.recipes.validate import nearest
from dlrm_scale.sharding.rules import check_optimizer
from dlrm_scale.units import format_count

__all__ = ["PlanRequest", "plan_request", "read_constraints"]

_TYPES: tuple[str, ...] = get_args(ShardingType)


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What a plan is for.

    Attributes:
        tables: to be placed.
        cluster: with its costs and memory.
        ranks: all of them.
        ranks_per_host: divides `ranks`.
        batch_size_per_rank: rows.
        wide: types that cut columns are allowed too, with row states split by row-wise Adagrad.
        types: allowed sharding types by table, best known first; tables that aren't named may get any of the space.
        forced_kind: the one sharding type that `types` has for all tables, where it was asked for as such.
        config: of the run that is planned, which tells its dense part, pipeline, exchanges and checkpoints; None for
            tables alone.
        dense: the dense part of a model that the config doesn't describe.
        touched_maps: maps of changed rows that are kept; None for what the config's checkpoints need.
    """

    tables: TableSet
    cluster: Cluster
    ranks: int
    ranks_per_host: int
    batch_size_per_rank: int
    wide: bool = False
    types: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    forced_kind: str | None = None
    config: Config | None = None
    dense: DenseWork | None = None
    touched_maps: int | None = None

    @property
    def step_settings(self) -> dict[str, Any]:
        """What `costs.step_model` takes besides tables, cluster, ranks and batch."""
        config, settings = self.config, dict[str, Any]()
        if config is not None:
            settings = {
                "pipeline": config.train.pipeline,
                "exchange": config.sharding.all_to_all_precision,
                "dense": DenseWork.of_config(config, len(self.tables.tables), self.batch_size_per_rank),
                "touched_maps": 2 if config.checkpoint.policy == "consecutive" else 3,
            }
        if self.dense is not None:
            settings["dense"] = self.dense
        if self.touched_maps is not None:
            settings["touched_maps"] = self.touched_maps
        return settings

    @property
    def space(self) -> str:
        """Name of the space of options: `default` or `wide`."""
        return "wide" if self.wide else "default"

    def cluster_fingerprint(self) -> str:
        """Hash of all the cluster's constants."""
        return hashlib.sha256(self.cluster.model_dump_json().encode()).hexdigest()[:32]

    def with_memory(self, memory_bytes: int) -> "PlanRequest":
        """Ask the same of ranks with another memory."""
        return replace(self, cluster=self.cluster.model_copy(update={"memory_bytes": memory_bytes}))

    def with_reserve(self, reserve: float) -> "PlanRequest":
        """Ask the same with another share of the memory kept."""
        return replace(self, cluster=self.cluster.model_copy(update={"reserve": reserve}))


def plan_request(
    tables: TableSet,
    cluster: Cluster,
    *,
    ranks: int,
    batch_size_per_rank: int,
    ranks_per_host: int | None = None,
    wide: bool = False,
    types: Mapping[str, tuple[str, ...]] | None = None,
    forced_kind: str | None = None,
    config: Config | None = None,
    dense: DenseWork | None = None,
) -> PlanRequest:
    """Check that the parts go together.

    Args:
        tables: to be placed.
        cluster: what they are placed on.
        ranks: all of them; may be other than the cluster's.
        batch_size_per_rank: rows.
        ranks_per_host: None for the cluster's, or for all ranks where there are fewer.
        wide: see `PlanRequest`.
        types: see `PlanRequest`.
        forced_kind: of all tables, in place of `types`.
        config: see `PlanRequest`.
        dense: see `PlanRequest`.

    Raises:
        ConfigError: too many ranks, hosts that don't divide them, constraints on tables that aren't there, no such
            type, or an optimizer that the trainer doesn't have on this device.
    """
    check_rank_count(ranks)
    check_optimizer(tables.optimizer, cluster.device)
    per_host = ranks_per_host or min(ranks, cluster.ranks_per_host)
    if ranks % per_host:
        near = [n for n in range(1, ranks + 1) if ranks % n == 0]
        raise ConfigError(
            f"{format_count(ranks)} ranks don't divide into hosts of {per_host}",
            remedy=f"use a multiple of {per_host} ranks, or --ranks-per-host with one of {', '.join(map(str, near))}",
        )
    names = [table.name for table in tables.tables]
    if forced_kind is not None:
        _check_type(forced_kind, "--force-kind ")
        types = {name: (forced_kind,) for name in names}
    for name in types or {}:
        if name not in names:
            hint = nearest(name, names)
            raise ConfigError(
                f"--constrain {name}: {tables.name} has no such table",
                remedy=f"did you mean {hint!r}?" if hint else f"its tables are {', '.join(names[:30])}",
            )
    return PlanRequest(
        tables=tables,
        cluster=cluster,
        ranks=ranks,
        ranks_per_host=per_host,
        batch_size_per_rank=batch_size_per_rank,
        wide=wide,
        types=dict(types or {}),
        forced_kind=forced_kind,
        config=config,
        dense=dense,
    )


def read_constraints(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Read `TABLE=type`, `TABLE=type|type`, several of them separated by commas.

    Raises:
        ConfigError: text of another form, a table twice, or no such sharding type.
    """
    found: dict[str, tuple[str, ...]] = {}
    for part in (part.strip() for text in texts for part in text.split(",")):
        name, equals, kinds = part.partition("=")
        if not (name and equals and kinds):
            raise ConfigError(
                f"--constrain {part!r} is no constraint", remedy="write it as TABLE=type or TABLE=type|type"
            )
        if name in found:
            raise ConfigError(f"--constrain: table {name} is there twice", remedy=f"join them: {name}=type|type")
        wanted = tuple(kind.strip() for kind in kinds.split("|"))
        for kind in wanted:
            _check_type(kind, f"--constrain {name}=")
        found[name] = wanted
    return found


def _check_type(kind: str, option: str) -> None:
    if kind not in _TYPES:
        hint = nearest(kind, _TYPES)
        raise ConfigError(
            f"{option}{kind}: no such sharding type" + (f"; did you mean {hint}?" if hint else ""),
            remedy=f"the types are {', '.join(_TYPES)}",
        )
