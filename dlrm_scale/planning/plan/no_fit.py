"""When no plan fits: what is missing, and each single change that makes one fit, tried by planning again."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from dlrm_scale.errors import DlrmScaleError, PlanError
from dlrm_scale.planning.plan.request import PlanRequest
from dlrm_scale.planning.solver.infeasible import NoFeasiblePlan, Shortfall
from dlrm_scale.planning.solver.problem import Problem
from dlrm_scale.planning.solver.solve import Solution
from dlrm_scale.units import GIB, format_bytes, format_count

__all__ = ["Change", "NothingFits", "nothing_fits"]

_MOST_RANKS = 4096
_MEMORY_STEP = 1 << 28
"""The least memory that fits is found to a quarter of a GiB, or to about a 64th of what is needed if that is less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One change that makes a plan fit, everything else as asked.

    Attributes:
        what: `ranks`, `batch_size_per_rank`, `reserve`, `memory_bytes`, `space`, `types` or `optimizer`.
        value: what it has to be: the least change that was found.
        option: words for the command line.
    """

    what: str
    value: object
    option: str


class NothingFits(PlanError):
    """No plan fits, with numbers and what would help."""

    def __init__(self, request: PlanRequest, shortfall: Shortfall, changes: tuple[Change, ...]) -> None:
        """Word the message.

        Args:
            request: what was asked.
            shortfall: what is missing.
            changes: each of which was planned and fits.
        """
        self.request, self.shortfall, self.changes = request, shortfall, changes
        super().__init__(_message(request, shortfall), remedy=_remedy(changes))

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the parts when the error crosses a process."""
        return NothingFits, (self.request, self.shortfall, self.changes)

    def as_dict(self) -> dict[str, object]:
        """JSON-ready values by name."""
        short = self.shortfall
        return {
            "error": "no feasible plan",
            "message": self.message,
            "cause": short.cause,
            "proven": short.proven,
            "needed_bytes": short.needed_bytes,
            "available_bytes": short.available_bytes,
            "missing_bytes": max(0, short.needed_bytes - short.available_bytes),
            "needed_per_rank_bytes": short.needed_per_rank_bytes,
            "available_per_rank_bytes": short.available_per_rank_bytes,
            "largest_tables": [
                {"table": t.table, "type": t.sharding_type, "shard_bytes": t.shard_bytes, "total_bytes": t.total_bytes}
                for t in short.largest
            ],
            "changes": [{"change": c.what, "value": c.value, "option": c.option} for c in self.changes],
        }


def nothing_fits(
    request: PlanRequest,
    error: NoFeasiblePlan,
    make_problem: Callable[[PlanRequest], Problem],
    solver: Callable[[Problem], Solution],
    say: Callable[[str], None] = lambda line: None,
) -> NothingFits:
    """Find the single changes that make a plan fit.

    They are tried with the solver as it is given, which may be a quick one: whether a plan fits shows at once, how fast
    the best one is doesn't, so that no step times are told.

    Args:
        request: that has no plan.
        error: what the solver said.
        make_problem: of a request.
        solver: that found none.
        say: told what is tried.
    """

    def fits(changed: PlanRequest) -> bool:
        try:
            solver(make_problem(changed))
        except DlrmScaleError:  # nothing fits, or the cluster file has no costs for so many ranks
            return False
        return True

    def more_memory(request: PlanRequest, fits: Fits) -> list[Change]:
        return _more_memory(request, fits, make_problem, error.shortfall)

    found: list[Change] = []
    for what, search in (
        ("ranks", _more_ranks),
        ("memory", more_memory),
        ("reserve", _less_reserve),
        ("batch", _smaller_batch),
        ("sharding types", _more_types),
        ("optimizer", _less_state),
    ):
        say(f"nothing fits: trying another {what}")
        found += search(request, fits)
    return NothingFits(request, error.shortfall, tuple(found))


Fits = Callable[[PlanRequest], bool]


def _more_ranks(request: PlanRequest, fits: Fits) -> list[Change]:
    """Whole hosts more: doubled until it fits, then halved back to the fewest."""
    local = request.ranks_per_host
    low, high = request.ranks // local, request.ranks // local
    found = False
    while not found and high * 2 * local <= max(_MOST_RANKS, 2 * request.ranks):
        low, high = high, high * 2
        found = fits(replace(request, ranks=high * local))
    if not found:
        return []
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(replace(request, ranks=middle * local)) else (middle, high)
    return [Change(what="ranks", value=high * local, option=f"--world-size {high * local}")]


def _more_memory(
    request: PlanRequest, fits: Fits, make_problem: Callable[[PlanRequest], Problem], short: Shortfall
) -> list[Change]:
    """The least memory, in round steps.

    A rank needs at least the largest of the smallest shards, and an even share of all: from there it is doubled until
    everything fits, or a rank could hold all tables by itself and still nothing does.
    """
    needed = max(short.needed_per_rank_bytes, short.largest[0].shard_bytes)
    too_little = max(request.cluster.memory_bytes, int(needed / (1 - request.cluster.reserve)) - 1)
    step = min(_MEMORY_STEP, 1 << max(0, (too_little // 64).bit_length() - 1))
    low = high = too_little // step
    while low == high or not fits(request.with_memory(high * step)):
        problem = make_problem(request.with_memory(high * step))
        if problem.memory_bytes >= sum(max(o.memory_bytes * o.shards for o in of) for of in problem.options):
            return []
        low, high = high, max(1, 2 * high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(request.with_memory(middle * step)) else (middle, high)
    value = high * step
    size = f"{value / GIB:.10g}GiB" if value % (GIB // 64) == 0 else str(value)
    return [Change(what="memory_bytes", value=value, option=f"--memory {size}")]


def _less_reserve(request: PlanRequest, fits: Fits) -> list[Change]:
    """The largest reserve, in whole percent, that leaves enough."""
    now = int(request.cluster.reserve * 100)
    if now <= 0 or not fits(request.with_reserve(0.0)):
        return []
    low, high = 0, now  # fits at low; not known at high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(request.with_reserve(middle / 100)) else (low, middle)
    return [Change(what="reserve", value=low / 100, option=f"--reserve {low / 100:g}")]


def _smaller_batch(request: PlanRequest, fits: Fits) -> list[Change]:
    """The largest batch that leaves enough."""
    if request.batch_size_per_rank == 1 or not fits(replace(request, batch_size_per_rank=1)):
        return []
    low, high = 1, request.batch_size_per_rank
    while high - low > max(1, high // 32):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(replace(request, batch_size_per_rank=middle)) else (low, middle)
    return [Change(what="batch_size_per_rank", value=low, option=f"--batch-size-per-rank {low}")]


def _more_types(request: PlanRequest, fits: Fits) -> list[Change]:
    """Constraints left out, one table after the other and all together; and the wide space."""
    found = []
    if request.forced_kind is not None:
        if fits(replace(request, types={}, forced_kind=None)):
            found.append(Change(what="types", value="all", option=f"without --force-kind {request.forced_kind}"))
    else:
        for name in request.types:
            rest: Mapping[str, tuple[str, ...]] = {n: kinds for n, kinds in request.types.items() if n != name}
            if fits(replace(request, types=rest)):
                option = f"without --constrain {name}={'|'.join(request.types[name])}"
                found.append(Change(what="types", value=name, option=option))
        if not found and len(request.types) > 1 and fits(replace(request, types={})):
            found.append(Change(what="types", value="all", option="without any --constrain"))
    if not request.wide and fits(replace(request, wide=True)):
        option = "--allow-split-row-state (row states of column shards are another algorithm)"
        found.append(Change(what="space", value="wide", option=option))
    return found


def _less_state(request: PlanRequest, fits: Fits) -> list[Change]:
    smaller = {"adam": ("rowwise_adagrad", "sgd"), "rowwise_adagrad": ("sgd",), "sgd": ()}
    for optimizer in smaller[request.tables.optimizer]:
        if fits(replace(request, tables=request.tables.model_copy(update={"optimizer": optimizer}))):
            option = f"--optimizer {optimizer} (another algorithm)"
            return [Change(what="optimizer", value=optimizer, option=option)]
    return []


def _message(request: PlanRequest, short: Shortfall) -> str:
    cluster = request.cluster
    lines = [
        f"no sharding plan fits: the {len(request.tables.tables)} tables of {request.tables.name} need at least "
        f"{format_bytes(short.needed_bytes)}, {format_bytes(short.needed_per_rank_bytes)} a rank; there are "
        f"{format_count(request.ranks)} x {format_bytes(short.available_per_rank_bytes)} "
        f"({format_bytes(cluster.memory_bytes)} a rank, less {cluster.reserve:.0%} reserve, the dense part and "
        "a rank's own ids)",
        f"  cause: {_cause(short)}",
        "  largest tables, by the least that one rank must hold of them:",
    ]
    lines += [
        f"    {t.table}: {format_bytes(t.shard_bytes)} as {t.sharding_type}, {format_bytes(t.total_bytes)} in all"
        for t in short.largest
    ]
    return "\n".join(lines)


def _cause(short: Shortfall) -> str:
    first = short.largest[0]
    if short.cause == "single_shard":
        return (
            f"a single shard: {first.table} can't be cut finer than {format_bytes(first.shard_bytes)} a rank "
            f"({first.sharding_type})"
        )
    if short.cause == "total":
        missing = short.needed_bytes - short.available_bytes
        return f"the total: {format_bytes(missing)} are missing in all"
    return "fragmentation: in total it would fit, but the shards don't share out" + (
        "" if short.proven else ", or the search missed how"
    )


def _remedy(changes: tuple[Change, ...]) -> str:
    if not changes:
        return "no single change of ranks, memory, reserve, batch, types or optimizer makes it fit; change several"
    return "one of these makes it fit, each tried by planning again:\n    " + "\n    ".join(c.option for c in changes)
