"""Plans of many kinds for one request: simple rules, random mixes, TorchRec's planner and ours.

What a benchmark compares. A plan that can't be made, isn't allowed or doesn't fit is kept with the reason (B23, B24).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dlrm_scale.errors import ConfigError, DlrmScaleError, PlanError
from dlrm_scale.planning.costs.space import DEFAULT_TYPES, WIDE_TYPES, column_widths
from dlrm_scale.planning.measuring.best_predicted import best_predicted
from dlrm_scale.planning.plan.request import PlanRequest
from dlrm_scale.planning.plan.torchrec_peer import plan_with_torchrec
from dlrm_scale.planning.tables.table_set import TableStats
from dlrm_scale.recipes.validate import nearest
from dlrm_scale.sharding.rules import objection
from dlrm_scale.sharding.shard_shapes import TableShape

__all__ = ["PLAN_NAMES", "MadePlan", "longest_first", "make_plans"]

_SMALL_ROWS = 10_000
"""Tables up to so many rows are copied to all ranks in `small_data_parallel`."""
_RANDOM_WEIGHTS = {
    "random_1": {"table_wise": 0.5, "row_wise": 0.2, "column_wise": 0.2, "data_parallel": 0.1},
    "random_2": {"table_wise": 0.3, "row_wise": 0.3, "column_wise": 0.3, "data_parallel": 0.1},
    "random_3": {"table_wise": 0.6, "table_row_wise": 0.2, "table_column_wise": 0.1, "data_parallel": 0.1},
}
_OURS = ("ours", "ours_2", "ours_3")


@dataclass(frozen=True, kw_only=True)
class MadePlan:
    """One plan of a benchmark.

    Attributes:
        name: unique among them.
        shapes: by table; None where there is no plan.
        reason: why there is none.
        same_as: a plan made before it that is equal, so that measuring it again would tell nothing.
    """

    name: str
    shapes: tuple[TableShape, ...] | None = None
    reason: str = ""
    same_as: str = field(default="")


Maker = Callable[[PlanRequest], tuple[TableShape, ...]]


def make_plans(
    request: PlanRequest,
    names: Sequence[str] = (),
    given: Sequence[tuple[str, tuple[TableShape, ...] | DlrmScaleError]] = (),
    say: Callable[[str], None] = lambda line: None,
) -> list[MadePlan]:
    """Make plans by name, and take given ones.

    Args:
        request: what is planned.
        names: of `PLAN_NAMES`; none for all.
        given: made elsewhere: name and plan, or why it can't be used here.
        say: told what begins.

    Raises:
        ConfigError: no plan of such a name.
    """
    for name in names:
        if name not in PLAN_NAMES:
            hint = nearest(name, PLAN_NAMES)
            raise ConfigError(
                f"--plans {name}: no plan of this name",
                remedy=f"did you mean {hint!r}?" if hint else f"there are {', '.join(PLAN_NAMES)}",
            )
    wanted = [name for name in PLAN_NAMES if name in names] if names else list(PLAN_NAMES)
    made: list[MadePlan] = []
    for name, plan in given:
        shapes = None if isinstance(plan, DlrmScaleError) else plan
        _add(made, name, shapes, plan.message if isinstance(plan, DlrmScaleError) else "", request)
    for name in wanted:
        if name in _OURS:
            continue
        if name == "torchrec":
            say("planning with torchrec")
        try:
            _add(made, name, _MAKERS[name](request), "", request)
        except DlrmScaleError as error:
            _add(made, name, None, error.message, request)
    ours = [name for name in _OURS if name in wanted]
    if ours:
        say("planning with dlrm_scale")
        _add_ours(made, ours, request)
    return made


def longest_first(request: PlanRequest) -> tuple[TableShape, ...]:
    """Table-wise, the table with most looked-up values first, each on the rank that has fewest so far."""
    loads = np.zeros(request.ranks)
    places = {}
    for index in _by_work(request):
        rank = int(np.argmin(loads))
        loads[rank] += _work(request.tables.tables[index])
        places[index] = rank
    return tuple(_whole(table, places[index]) for index, table in enumerate(request.tables.tables))


def _add(
    made: list[MadePlan], name: str, shapes: tuple[TableShape, ...] | None, reason: str, request: PlanRequest
) -> None:
    if shapes is not None:
        reason = _refusal(request, shapes)
        shapes = None if reason else shapes
    same = next((plan.name for plan in made if shapes is not None and plan.shapes == shapes), "")
    made.append(MadePlan(name=name, shapes=shapes, reason=reason, same_as=same))


def _add_ours(made: list[MadePlan], names: Sequence[str], request: PlanRequest) -> None:
    try:
        found = best_predicted(request, len(_OURS))
    except DlrmScaleError as error:
        for name in names:
            _add(made, name, None, error.message, request)
        return
    for name in names:
        index = _OURS.index(name)
        if index < len(found):
            _add(made, name, found[index], "", request)
        else:
            _add(made, name, None, "the planner found no plan of yet another mixture of types that fits", request)


def _refusal(request: PlanRequest, shapes: Sequence[TableShape]) -> str:
    """Why the trainer wouldn't take a plan: a table's type isn't allowed here; "" if it would."""
    for table, shape in zip(request.tables.tables, shapes, strict=True):
        refusal = objection(
            shape.sharding_type,
            table.spec,
            optimizer=request.tables.optimizer,
            allow_split_row_state=request.wide,
        )
        if refusal is not None:
            return f"table {table.name}: {shape.sharding_type} {refusal[0]}; {refusal[1]}"
    return ""


def _work(table: TableStats) -> float:
    return table.lookups_per_sample * table.dim


def _by_work(request: PlanRequest) -> list[int]:
    tables = request.tables.tables
    return sorted(range(len(tables)), key=lambda index: (-_work(tables[index]), -tables[index].rows, index))


def _whole(table: TableStats, rank: int) -> TableShape:
    return TableShape(sharding_type="table_wise", columns=table.dim, places=(rank,))


def _round_robin(request: PlanRequest) -> tuple[TableShape, ...]:
    return tuple(_whole(table, index % request.ranks) for index, table in enumerate(request.tables.tables))


def _everywhere(kind: str) -> Maker:
    def make(request: PlanRequest) -> tuple[TableShape, ...]:
        return tuple(TableShape(sharding_type=kind, columns=table.dim) for table in request.tables.tables)

    return make


def _of_kind(kind: str) -> Maker:
    """All tables of one type, largest work first, on the places with least work so far."""

    def make(request: PlanRequest) -> tuple[TableShape, ...]:
        placing = _Placing(request)
        shapes = {index: placing.shape(request.tables.tables[index], kind) for index in _by_work(request)}
        return tuple(shapes[index] for index in range(len(shapes)))

    return make


def _small_data_parallel(request: PlanRequest) -> tuple[TableShape, ...]:
    return tuple(
        TableShape(sharding_type="data_parallel", columns=table.dim) if table.rows <= _SMALL_ROWS else shape
        for table, shape in zip(request.tables.tables, longest_first(request), strict=True)
    )


def _random(name: str) -> Maker:
    def make(request: PlanRequest) -> tuple[TableShape, ...]:
        random = np.random.default_rng(int(name.rpartition("_")[2]))
        placing = _Placing(request)
        shapes = {}
        for index in _by_work(request):
            table = request.tables.tables[index]
            offered = {kind: w for kind, w in _RANDOM_WEIGHTS[name].items() if _possible(request, table, kind)}
            weights = np.array(list(offered.values()))
            kind = str(random.choice(list(offered), p=weights / weights.sum()))
            shapes[index] = placing.shape(table, kind)
        return tuple(shapes[index] for index in range(len(shapes)))

    return make


def _possible(request: PlanRequest, table: TableStats, kind: str) -> bool:
    if kind == "data_parallel" and table.rows > _SMALL_ROWS:
        return False
    space = WIDE_TYPES if request.wide else DEFAULT_TYPES
    optimizer = request.tables.optimizer
    refused = objection(kind, table.spec, optimizer=optimizer, allow_split_row_state=request.wide)
    return kind in space and refused is None


class _Placing:
    """Gives tables of any type their places, each where least work is so far."""

    def __init__(self, request: PlanRequest) -> None:
        self._loads = np.zeros(request.ranks)
        self._per_host = request.ranks_per_host
        self._hosts = request.ranks // request.ranks_per_host

    def shape(self, table: TableStats, kind: str) -> TableShape:
        """Place one table.

        Raises:
            PlanError: its columns can't be cut.
        """
        work = _work(table)
        if kind in ("row_wise", "data_parallel"):
            self._loads += work / len(self._loads)
            return TableShape(sharding_type=kind, columns=table.dim)
        if kind == "table_wise":
            ranks = self._least(range(len(self._loads)), 1)
            self._loads[ranks] += work
            return _whole(table, ranks[0])
        if kind == "column_wise":
            parts = _parts(table, len(self._loads))
            ranks = self._least(range(len(self._loads)), parts)
            self._loads[ranks] += work / parts
            return TableShape(sharding_type=kind, columns=table.dim // parts, places=tuple(ranks))
        by_host = self._loads.reshape(self._hosts, self._per_host).sum(axis=1)
        parts = 1
        if kind == "grid_shard":
            parts = _parts(table, self._hosts)
        hosts = [int(host) for host in np.argsort(by_host, kind="stable")[:parts]]
        of_hosts = [host * self._per_host + local for host in hosts for local in range(self._per_host)]
        if kind == "table_column_wise":
            parts = _parts(table, self._per_host)
            ranks = self._least(of_hosts, parts)
            self._loads[ranks] += work / parts
            return TableShape(sharding_type=kind, columns=table.dim // parts, places=tuple(ranks))
        self._loads[of_hosts] += work / len(of_hosts)
        return TableShape(sharding_type=kind, columns=table.dim // parts, places=tuple(hosts))

    def _least(self, ranks: Sequence[int], count: int) -> list[int]:
        return sorted(sorted(ranks, key=lambda rank: (self._loads[rank], rank))[:count])


def _parts(table: TableStats, most: int) -> int:
    """Into how many column shards a table is cut: as many as there are places, or the next fewer that are legal."""
    if most < 2:
        raise PlanError(
            f"table {table.name}: there is one place for its column shards, and it takes two to cut them",
            remedy="use more ranks or hosts",
        )
    counts = [table.dim // width for width in column_widths(table.dim) if table.dim // width <= most]
    if not counts:
        raise PlanError(f"table {table.name}: {table.dim} columns can't be cut into at most {most} equal shards")
    return max(counts)


_MAKERS: dict[str, Maker] = {
    "longest_first": longest_first,
    "round_robin": _round_robin,
    "row_wise": _everywhere("row_wise"),
    "column_wise": _of_kind("column_wise"),
    "table_row_wise": _of_kind("table_row_wise"),
    "table_column_wise": _of_kind("table_column_wise"),
    "grid_shard": _of_kind("grid_shard"),
    "small_data_parallel": _small_data_parallel,
    "torchrec": plan_with_torchrec,
} | {name: _random(name) for name in _RANDOM_WEIGHTS}

PLAN_NAMES: tuple[str, ...] = (*_MAKERS, *_OURS)
"""What `make_plans` knows. ours: of the best predicted plans of each mixture of types, the first, second, third."""
