"""Small random placement problems, and all their plans."""

import itertools
from collections.abc import Iterator

from hypothesis import strategies as st

from dlrm_scale.planning.solver.problem import Assignment, Charge, Option, Problem

__all__ = ["every_plan", "naive_loads", "placement_problems", "places"]

_TYPES = {
    "all_ranks": ("row_wise", "data_parallel"),
    "hosts": ("table_row_wise", "grid_shard"),
    "one_host": ("table_column_wise",),
    "ranks": ("table_wise", "column_wise"),
}


@st.composite
def placement_problems(draw: st.DrawFn, *, most_tables: int = 4, roomy: bool = False) -> Problem:
    """Problems on one or two hosts of one or two ranks, with one or two phases; few enough plans to try them all."""
    ranks_per_host = draw(st.integers(1, 2))
    hosts = draw(st.integers(1, 2))
    ranks = ranks_per_host * hosts
    phases = draw(st.integers(1, 2))
    tables = draw(st.integers(1, most_tables))
    cost = st.integers(0, 40).map(lambda x: x / 8)
    options = []
    for _ in range(tables):
        own = []
        for _ in range(draw(st.integers(1, 3))):
            placement = draw(st.sampled_from(list(_TYPES)))
            shards = {
                "all_ranks": st.just(ranks),
                "hosts": st.integers(1, hosts).map(lambda n: n * ranks_per_host),
            }.get(placement, st.integers(1, 3))
            own.append(
                Option(
                    sharding_type=draw(st.sampled_from(_TYPES[placement])),
                    kernel="fused",
                    placement=placement,  # type: ignore[arg-type]
                    shards=draw(shards),
                    columns=4,
                    costs_ms=tuple(draw(cost) for _ in range(phases)),
                    memory_bytes=draw(st.integers(0, 10)),
                )
            )
        options.append(tuple(own))
    charges = draw(
        st.lists(
            st.builds(
                Charge,
                sharding_types=st.frozensets(
                    st.sampled_from(["row_wise", "table_wise", "column_wise", "grid_shard"]), min_size=1
                ),
                milliseconds=cost,
            ),
            max_size=2,
        )
    )
    return Problem(
        ranks=ranks,
        ranks_per_host=ranks_per_host,
        memory_bytes=1000 if roomy else draw(st.integers(4, 40)),
        phases=tuple(f"phase {p}" for p in range(phases)),
        tables=tuple(f"table {t}" for t in range(tables)),
        options=tuple(options),
        charges=tuple(charges),
        base_ms=draw(st.sampled_from([0.0, 1.5])),
    )


def places(problem: Problem, option: Option) -> Iterator[tuple[int, ...]]:
    """All ranks that an option's shards may go to."""
    per_host = problem.ranks_per_host
    hosts = range(problem.ranks // per_host)
    if option.placement == "all_ranks":
        yield ()
    elif option.placement == "hosts":
        for chosen in itertools.combinations(hosts, option.shards // per_host):
            yield tuple(host * per_host + rank for host in chosen for rank in range(per_host))
    elif option.placement == "one_host":
        for host in hosts:
            own = range(host * per_host, (host + 1) * per_host)
            yield from itertools.combinations_with_replacement(own, option.shards)
    else:
        yield from itertools.combinations_with_replacement(range(problem.ranks), option.shards)


def every_plan(problem: Problem) -> Iterator[Assignment]:
    """All plans, whether they fit or not."""
    by_table = [
        [(index, ranks) for index, option in enumerate(options) for ranks in places(problem, option)]
        for options in problem.options
    ]
    for plan in itertools.product(*by_table):
        yield Assignment(chosen=tuple(index for index, _ in plan), ranks=tuple(ranks for _, ranks in plan))


def naive_loads(problem: Problem, plan: Assignment) -> tuple[float, list[int]]:
    """Step and memory of every rank, by loops."""
    loads = [[0.0] * problem.ranks for _ in problem.phases]
    memory = [0] * problem.ranks
    used = set()
    for options, index, ranks in zip(problem.options, plan.chosen, plan.ranks, strict=True):
        option = options[index]
        used.add(option.sharding_type)
        for rank in range(problem.ranks) if option.placement == "all_ranks" else ranks:
            memory[rank] += option.memory_bytes
            for phase, cost in enumerate(option.costs_ms):
                loads[phase][rank] += cost
    charged = sum(c.milliseconds for c in problem.charges if used & c.sharding_types)
    return sum(max(load) for load in loads) + charged + problem.base_ms, memory
