"""A cluster with round numbers, to compute steps by hand."""

from dlrm_scale.planning.cluster.cluster import (
    Cluster,
    CollectiveCosts,
    Constant,
    Curve,
    DenseCosts,
    InputCosts,
    Link,
    Links,
    LookupCosts,
    ReplicaCosts,
)

__all__ = ["bent_cluster", "small_cluster"]


def _constant(value: float) -> Constant:
    return Constant(value=value, source="by hand")


def small_cluster(**changes: object) -> Cluster:
    """Hosts of 2: 1 GB/s within, 0.1 GB/s a rank between; every cost of a million has another digit."""
    lookups = {
        "call_ms": 0.001,
        "table_ms": 0.01,
        "lookup_ms": 1.0,
        "element_ms": 0.1,
        "unique_row_ms": 2.0,
        "unique_element_ms": 0.2,
        "output_element_ms": 0.3,
    }
    content: dict[str, object] = {
        "name": "small",
        "device": "cpu",
        "hosts": 2,
        "ranks_per_host": 2,
        "memory_bytes": 1 << 30,
        "memory_source": "by hand",
        "reserve": 0.5,
        "forward": LookupCosts(**{name: _constant(value) for name, value in lookups.items()}),
        "backward": LookupCosts(**{name: _constant(2 * value) for name, value in lookups.items()}),
        "input": InputCosts(
            call_ms=_constant(0.5), value_ms=_constant(4.0), bag_ms=_constant(3.0), bucketize_ms=_constant(5.0)
        ),
        "replicas": ReplicaCosts(call_ms=_constant(0.25), element_ms=_constant(7.0)),
        "dense": DenseCosts(
            call_ms=_constant(1.0),
            gflop_ms=_constant(10.0),
            bf16_gflop_ms=_constant(5.0),
            vector_ms=_constant(6.0),
            parameter_ms=_constant(8.0),
        ),
        "links": Links(
            start_ms=_constant(0.1),
            host=Link(
                gigabytes_per_second=_constant(2.0),
                efficiency=_constant(0.5),
                step_ms=_constant(0.02),
                message_ms=_constant(0.03),
            ),
            network=Link(
                gigabytes_per_second=_constant(0.1),
                efficiency=_constant(1.0),
                step_ms=_constant(0.2),
                message_ms=_constant(0.3),
            ),
        ),
        "type_ms": {"table_wise": _constant(1.5), "row_wise": _constant(2.5), "data_parallel": _constant(0.75)},
    }
    return Cluster.model_validate(content | changes)


def bent_cluster() -> Cluster:
    """Measured curves that bend both ways, as gloo's do, over 2 and 4 ranks of one host."""
    measured = []
    for collective, factor in (
        ("all_to_all", 1.0),
        ("vectors_all_to_all", 1.2),
        ("gradients_all_to_all", 1.3),
        ("reduce_scatter", 2.2),
        ("all_gather", 1.7),
        ("all_reduce", 2.5),
    ):
        for ranks in (2, 4):
            points = [(1 << 10, 0.2), (1 << 14, 0.21), (1 << 17, 0.5), (1 << 20, 1.4), (1 << 22, 4.0), (1 << 24, 30.0)]
            curve = Curve(points=tuple((n, factor * ranks * t) for n, t in points), source="by hand")
            measured.append(CollectiveCosts(collective=collective, ranks=ranks, curve=curve))
    return small_cluster(collectives=tuple(measured), links=None)
