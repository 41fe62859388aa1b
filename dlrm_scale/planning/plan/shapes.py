"""Between a solver's assignment and the shapes of a plan's tables."""

from collections.abc import Sequence

from dlrm_scale.planning.solver.problem import Assignment, Option, Problem
from dlrm_scale.sharding.shard_shapes import HOST_TYPES, TableShape

__all__ = ["assignment_of", "places_of", "shapes_of"]


def shapes_of(problem: Problem, assignment: Assignment) -> tuple[TableShape, ...]:
    """Say how an assignment cuts each table, in the problem's order."""
    shapes = []
    for options, index, ranks in zip(problem.options, assignment.chosen, assignment.ranks, strict=True):
        option = options[index]
        kind, places = option.sharding_type, tuple(ranks)
        if option.placement == "all_ranks":
            places = ()
        elif kind in HOST_TYPES:  # by columns, then rows over the ranks of a host
            places = tuple(rank // problem.ranks_per_host for rank in ranks[:: problem.ranks_per_host])
        shapes.append(TableShape(sharding_type=kind, columns=option.columns, places=places))
    return tuple(shapes)


def assignment_of(problem: Problem, shapes: Sequence[TableShape]) -> Assignment:
    """Find a plan among the options of a problem.

    Args:
        problem: its tables are those of the plan, in order.
        shapes: how the plan cuts them.

    Raises:
        ValueError: the problem doesn't offer how a table is cut; names the table.
    """
    chosen = []
    for table, options, shape in zip(problem.tables, problem.options, shapes, strict=True):
        fitting = [i for i, option in enumerate(options) if _is(option, shape)]
        if not fitting:
            raise ValueError(f"table {table}: {shape.sharding_type} of {shape.columns} columns isn't offered")
        chosen.append(fitting[0])
    ranks = tuple(places_of(shape, problem.ranks_per_host) for shape in shapes)
    return Assignment(chosen=tuple(chosen), ranks=ranks)


def places_of(shape: TableShape, ranks_per_host: int) -> tuple[int, ...]:
    """Ranks of a shape's shards, by columns, then rows; () where every rank has one."""
    if shape.sharding_type not in HOST_TYPES:
        return shape.places
    return tuple(host * ranks_per_host + rank for host in shape.places for rank in range(ranks_per_host))


def _is(option: Option, shape: TableShape) -> bool:
    return (option.sharding_type, option.columns) == (shape.sharding_type, shape.columns)
