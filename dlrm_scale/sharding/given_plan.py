"""Whether a plan that was made elsewhere may shard this model on these ranks (B25)."""

from collections.abc import Sequence
from pathlib import Path

from dlrm_scale.config import Config, ShardingConfig
from dlrm_scale.errors import ConfigError, PlanFileError
from dlrm_scale.schema import TableSpec
from dlrm_scale.sharding.plan_file import PlanFile
from dlrm_scale.sharding.rules import objection
from dlrm_scale.units import format_count

__all__ = ["PLANNERS", "check_given_plan", "differences", "plan_path"]

PLANNERS = ("torchrec", "auto")
"""Values of `sharding.plan` that name a planner; all others name a file."""

_SHOWN = 8


def plan_path(sharding: ShardingConfig) -> Path | None:
    """Read the file that `sharding.plan` names; None where it names a planner."""
    return None if sharding.plan in PLANNERS else Path(sharding.plan)


def differences(
    plan: PlanFile, tables: Sequence[TableSpec], *, optimizer: str, ranks: int, ranks_per_host: int
) -> list[str]:
    """Name what a plan was made for and this model and these ranks aren't, field by field.

    Args:
        plan: made elsewhere.
        tables: of the model, in any order.
        optimizer: of the tables.
        ranks: that are here.
        ranks_per_host: of them.
    """
    found = [
        f"{name}: the plan's {before}, here {now}"
        for name, before, now in (
            ("ranks", plan.ranks, ranks),
            ("ranks a host", plan.ranks_per_host, ranks_per_host),
            ("sparse_optimizer.kind", plan.optimizer, optimizer),
        )
        if before != now
    ]
    planned, here = {t.name: t.spec for t in plan.tables}, {t.name: t for t in tables}
    for name in [*here, *(name for name in planned if name not in here)]:
        if name not in planned:
            found.append(f"table {name}: not in the plan")
        elif name not in here:
            found.append(f"table {name}: only in the plan")
        else:
            found += [
                f"table {name}: {field} in the plan {_text(before)}, here {_text(now)}"
                for field in ("rows", "dim", "pooling")
                if (before := getattr(planned[name], field)) != (now := getattr(here[name], field))
            ]
    return found


def check_given_plan(
    plan: PlanFile, tables: Sequence[TableSpec], config: Config, *, ranks: int, ranks_per_host: int
) -> None:
    """Refuse a plan for something else, types that aren't allowed here, and settings that ask for other types.

    `sharding.plan` decides for every table. `sharding.kind` and `sharding.tables` may repeat what the plan says.

    Raises:
        PlanFileError: the plan is for other tables, ranks, hosts or another optimizer, each named with both values; or
            a table's type isn't allowed, with the reason.
        ConfigError: `sharding.kind` or `sharding.tables` asks for another type than the plan has.
    """
    source = f"sharding.plan {config.sharding.plan}"
    changed = differences(
        plan, tables, optimizer=config.sparse_optimizer.kind, ranks=ranks, ranks_per_host=ranks_per_host
    )
    if changed:
        more = [f"and {len(changed) - _SHOWN} more"] if len(changed) > _SHOWN else []
        raise PlanFileError(
            f"{source} was made for something else:\n  " + "\n  ".join([*changed[:_SHOWN], *more]),
            remedy=_remedy(changed, plan),
        )
    by_name = {table.name: table for table in tables}
    for table in plan.tables:
        refusal = objection(
            table.type,
            by_name[table.name],
            optimizer=plan.optimizer,
            allow_split_row_state=config.sharding.allow_split_row_state,
        )
        if refusal is not None:
            raise PlanFileError(f"{source}, table {table.name}: {table.type} {refusal[0]}", remedy=refusal[1])
    _check_kinds(plan, config.sharding, source)


def _check_kinds(plan: PlanFile, sharding: ShardingConfig, source: str) -> None:
    for table in plan.tables:
        key = f"sharding.tables.{table.name}" if table.name in sharding.tables else "sharding.kind"
        asked = sharding.tables.get(table.name, sharding.kind)
        if asked not in ("auto", table.type):
            flag = f"--force-kind {asked}" if key == "sharding.kind" else f"--constrain {table.name}={asked}"
            raise ConfigError(
                f'{key} = "{asked}", but {source} has table {table.name} as {table.type}',
                remedy=f"leave {key} out, or make a plan with `dlrm-scale plan {flag}`",
            )


def _remedy(changed: Sequence[str], plan: PlanFile) -> str:
    if len(changed) == 1 and changed[0].startswith("ranks a host"):
        return f"set sharding.ranks_per_host = {plan.ranks_per_host} if hosts are meant to be of that size"
    return 'make a plan for this run with `dlrm-scale plan`, or let TorchRec plan: sharding.plan = "torchrec"'


def _text(value: object) -> str:
    return format_count(value) if isinstance(value, int) else str(value)
