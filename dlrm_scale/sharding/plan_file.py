"""A sharding plan in a file: what was planned for, where every shard lies, and what that was predicted to cost.

`dlrm-scale plan -o plan.json` writes it, `sharding.plan = "plan.json"` trains with it, a run's folder keeps its own.
One table a line, so that two plans can be compared with any tool:

    {
    "version": 2,
    "fingerprint": "…",
    "ranks": 8, "ranks_per_host": 4, "optimizer": "rowwise_adagrad", …
    "tables": [
    {"name": "C1", "rows": 1000, "dim": 64, "pooling": "sum", "type": "row_wise", "kernel": "fused"},
    {"name": "C2", …, "type": "table_row_wise", "kernel": "fused", "hosts": [1]},
    {"name": "C3", …, "type": "table_wise", …, "shards": [{"offset": [0, 0], "size": [9, 64], "rank": 5}]}
    ]
    }

Shards are listed where the type leaves a choice of ranks. Where it leaves one of hosts, `hosts` has one a column shard
and the rows lie over its ranks; where it leaves none, there is nothing to list (see `shard_shapes`). Values by rank are
runs, `[[value, ranks], …]`. Equal plans give equal bytes: no times of day, no solve times.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dlrm_scale.config import ShardingType
from dlrm_scale.errors import PlanError, PlanFileError
from dlrm_scale.layout import ShardLayout
from dlrm_scale.schema import Pooling, TableSpec
from dlrm_scale.sharding.shard_shapes import HOST_TYPES, RANK_TYPES, TableShape, shape_of, table_layout

__all__ = [
    "PLAN_VERSION",
    "PlanFile",
    "PlannedShard",
    "PlannedTable",
    "Prediction",
    "by_rank",
    "format_plan",
    "load_plan",
    "package_versions",
    "plan_of_layout",
    "planned_table",
    "runs_of",
    "save_plan",
]

PLAN_VERSION: Literal[2] = 2
_MAKE_ONE = "make a plan with `dlrm-scale plan -o FILE`"
_MEND = f"mend it there, or {_MAKE_ONE}"

_Count = Annotated[int, Field(ge=1, lt=2**62)]
_Index = Annotated[int, Field(ge=0, lt=2**62)]
_Ranks = Annotated[int, Field(ge=1, le=2**20)]
"""A million: shards are listed by rank, and a wrong number mustn't fill the memory."""
_Number = int | Annotated[float, Field(allow_inf_nan=False)]
Runs = tuple[tuple[_Number, _Count], ...]
"""A value by rank: (value, for how many ranks), from rank 0 on."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class PlannedShard(_Record):
    """One shard whose rank was chosen.

    Attributes:
        offset: its first row and column in the table.
        size: its rows and columns.
        rank: that holds it.
    """

    offset: tuple[_Index, _Index]
    size: tuple[_Index, _Count]
    rank: _Index


class PlannedTable(_Record):
    """One table and how it is cut.

    Attributes:
        name: of the table.
        rows: of the whole table.
        dim: its columns, float32.
        pooling: of its bags.
        type: TorchRec's name of the sharding type.
        kernel: `fused`, or `dense` for data-parallel tables.
        hosts: by column shard, for types that spread rows over a host.
        shards: by column shard, for types that put shards on single ranks.
    """

    name: Annotated[str, Field(min_length=1)]
    rows: _Count
    dim: _Count
    pooling: Pooling
    type: ShardingType
    kernel: Literal["fused", "dense"]
    hosts: tuple[_Index, ...] | None = None
    shards: tuple[PlannedShard, ...] | None = None

    @property
    def spec(self) -> TableSpec:
        """The table itself."""
        return TableSpec(name=self.name, rows=self.rows, dim=self.dim, pooling=self.pooling)

    @property
    def shape(self) -> TableShape:
        """How it is cut, in numbers."""
        if self.hosts:
            return TableShape(sharding_type=self.type, columns=self.dim // len(self.hosts), places=self.hosts)
        if self.shards:
            places = tuple(shard.rank for shard in self.shards)
            return TableShape(sharding_type=self.type, columns=self.shards[0].size[1], places=places)
        return TableShape(sharding_type=self.type, columns=self.dim)


class Prediction(_Record):
    """What the plan was predicted to cost.

    Attributes:
        costs: whose: the cluster's name, or `torchrec`.
        step_ms: of the slowest ranks, over all phases.
        bound_ms: no plan of the same space is faster; None where there was no search.
        gap: how far the step, as the search counts it, lies above the bound; None likewise.
        phases_ms: by phase, by rank.
        memory_bytes: by part, by rank.
    """

    costs: str
    step_ms: _Number
    bound_ms: _Number | None = None
    gap: _Number | None = None
    phases_ms: dict[str, Runs] = Field(default_factory=dict)
    memory_bytes: dict[str, Runs] = Field(default_factory=dict)


class PlanFile(_Record):
    """A whole plan.

    Attributes:
        version: of the format.
        fingerprint: of everything else; "" in files written by hand. It isn't the last key, so that its line can be
            taken out.
        planner: who made it: `dlrm_scale`, `torchrec`, or `forced` by hand.
        ranks: that it is for.
        ranks_per_host: of them.
        optimizer: of the tables.
        batch_size_per_rank: rows of a batch that it was made for.
        replicas: copies of the whole set of tables; always 1 in this version.
        inputs: hashes of what it was made from, by name, and the space of options.
        tables: in the model's order.
        prediction: None where nothing was predicted.
        versions: of the packages that made it.
    """

    version: Literal[2] = PLAN_VERSION
    fingerprint: str = ""
    planner: str
    ranks: _Ranks
    ranks_per_host: _Ranks
    optimizer: Literal["sgd", "rowwise_adagrad", "adam"]
    batch_size_per_rank: _Count
    replicas: Literal[1] = 1
    inputs: dict[str, str] = Field(default_factory=dict)
    tables: Annotated[tuple[PlannedTable, ...], Field(min_length=1)]
    prediction: Prediction | None = None
    versions: dict[str, str] = Field(default_factory=dict)

    def layout(self, order: Sequence[str] | None = None) -> ShardLayout:
        """Spell out all shards.

        Args:
            order: names of all tables in the order wanted; None for the plan's.

        Raises:
            PlanError: a table is cut as TorchRec can't; names it.
        """
        by_name = {table.name: table for table in self.tables}
        tables = self.tables if order is None else [by_name[name] for name in order]
        return ShardLayout(
            ranks=self.ranks,
            tables=tuple(
                table_layout(t.spec, t.shape, ranks=self.ranks, ranks_per_host=self.ranks_per_host) for t in tables
            ),
        )

    def content_fingerprint(self) -> str:
        """Hash of everything but the fingerprint itself."""
        content = self.model_copy(update={"fingerprint": ""}).model_dump(mode="json")
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def planned_table(table: TableSpec, shape: TableShape) -> PlannedTable:
    """Write a shape down as a plan file has it."""
    kind = shape.sharding_type
    shards = None
    if kind in RANK_TYPES:
        shards = tuple(
            PlannedShard(offset=(0, i * shape.columns), size=(table.rows, shape.columns), rank=rank)
            for i, rank in enumerate(shape.places)
        )
    return PlannedTable(
        name=table.name,
        rows=table.rows,
        dim=table.dim,
        pooling=table.pooling,
        type=kind,  # type: ignore[arg-type]  # pydantic checks it
        kernel="dense" if kind == "data_parallel" else "fused",
        hosts=shape.places if kind in HOST_TYPES else None,
        shards=shards,
    )


def plan_of_layout(
    layout: ShardLayout,
    *,
    planner: str,
    ranks_per_host: int,
    optimizer: Literal["sgd", "rowwise_adagrad", "adam"],
    batch_size_per_rank: int,
    packages: Iterable[str] = (),
) -> PlanFile:
    """Write a layout down as a plan, without a prediction.

    Raises:
        PlanError: shards that their type doesn't cut; names the table.
    """
    tables = [
        planned_table(t.spec, shape_of(t, ranks=layout.ranks, ranks_per_host=ranks_per_host)) for t in layout.tables
    ]
    return PlanFile(
        planner=planner,
        ranks=layout.ranks,
        ranks_per_host=ranks_per_host,
        optimizer=optimizer,
        batch_size_per_rank=batch_size_per_rank,
        tables=tuple(tables),
        versions=package_versions(packages),
    )


def save_plan(path: Path, plan: PlanFile) -> None:
    """Write a plan with its fingerprint, in one step; OSError if it can't be written."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    temporary.write_text(format_plan(plan))
    os.replace(temporary, path)


def format_plan(plan: PlanFile) -> str:
    """Return the text of a plan file."""
    content = plan.model_dump(mode="json", exclude_none=True) | {"fingerprint": plan.content_fingerprint()}
    return _one_table_a_line(content)


def load_plan(path: Path) -> PlanFile:
    """Read a plan and check that every row and column of its tables is placed once.

    Raises:
        PlanFileError: the file can't be read, is of another version, was changed after it was written, or places a
            table as TorchRec can't.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        raise PlanFileError(f"{path}: {why}", remedy=f"check the path, or {_MAKE_ONE}") from None
    _check_version(path, text)
    try:
        plan = PlanFile.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise PlanFileError(f"{path}: not a sharding plan: {place}: {first['msg']}", remedy=_MEND) from None
    if plan.fingerprint and plan.fingerprint != plan.content_fingerprint():
        raise PlanFileError(
            f"{path}: its fingerprint doesn't match its content; it was changed after it was written",
            remedy='if the change is meant, take its line "fingerprint" out, or write "fingerprint": "" there',
        )
    try:
        _check_places(plan)
    except PlanError as error:
        raise PlanFileError(f"{path}: {error.message}", remedy=error.remedy or _MEND) from None
    return plan


def runs_of(values: Iterable[float], digits: int = 6) -> Runs:
    """Pack a value by rank into runs, rounded to so many significant digits; whole numbers keep all theirs."""
    rounded = (value if isinstance(value, int) else float(f"{value:.{digits}g}") for value in values)
    return tuple((value, len(list(group))) for value, group in groupby(rounded))


def by_rank(runs: Runs) -> list[float]:
    """Unpack runs."""
    return [value for value, count in runs for _ in range(count)]


def package_versions(packages: Iterable[str] = ()) -> dict[str, str]:
    """Versions of this package and of others, as far as they are installed."""
    found: dict[str, str] = {}
    for name in ("dlrm-scale", *packages):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _check_version(path: Path, text: str) -> None:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanFileError(f"{path}: not a sharding plan: not valid JSON: {error}", remedy=_MEND) from None
    if not isinstance(content, dict) or "version" not in content:
        raise PlanFileError(f'{path}: not a sharding plan: it has no "version"', remedy=_MAKE_ONE)
    if content["version"] != PLAN_VERSION:
        found = json.dumps(content["version"])[:40]
        raise PlanFileError(
            f"{path}: version {found}; this release reads {PLAN_VERSION}",
            remedy=f"{_MAKE_ONE}, or install the release that wrote it",
        )


def _check_places(plan: PlanFile) -> None:
    if plan.ranks % plan.ranks_per_host:
        raise PlanError(f"{plan.ranks_per_host} ranks a host don't divide {plan.ranks} ranks")
    names = [table.name for table in plan.tables]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise PlanError(f"table {twice} is there twice")
    for table in plan.tables:
        table_layout(table.spec, table.shape, ranks=plan.ranks, ranks_per_host=plan.ranks_per_host)
        expected = planned_table(table.spec, table.shape)
        if table != expected:
            wrong = [name for name in type(table).model_fields if getattr(table, name) != getattr(expected, name)]
            raise PlanError(
                f"table {table.name}: its {' and '.join(wrong)} aren't those of {table.type} on {plan.ranks} ranks"
            )
    for name, runs in _runs(plan.prediction):
        if sum(count for _, count in runs) != plan.ranks:
            raise PlanError(f"prediction {name} isn't of {plan.ranks} ranks")


def _runs(prediction: Prediction | None) -> Iterable[tuple[str, Runs]]:
    return [] if prediction is None else [*prediction.phases_ms.items(), *prediction.memory_bytes.items()]


def _one_table_a_line(content: Mapping[str, object]) -> str:
    lines = []
    for key, value in content.items():
        if key == "tables" and isinstance(value, list):
            text = "[\n" + ",\n".join(json.dumps(table) for table in value) + "\n]"
        else:
            text = json.dumps(value)
        lines.append(f"{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
