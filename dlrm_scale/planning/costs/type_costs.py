"""What the exchanges of one sharding type cost, as exact curves and as lines below them.

    type                                        out                                       gradients back
    table_wise, column_wise, table_column_wise  all-to-all over all ranks                 all-to-all
    row_wise                                    reduce-scatter over all ranks             all-gather
    table_row_wise, grid_shard                  reduce-scatter within the host, then an   all-to-all, then all-gather
                                                all-to-all of one rank of every host
    data_parallel                               -                                         all-reduce

Ids go by one all-to-all over all ranks, under every type but data_parallel. TorchRec does all of it for each type in
use apart from the others.
"""

from dataclasses import dataclass

from dlrm_scale.planning.cluster.cluster import Cluster
from dlrm_scale.planning.costs.collective_costs import CostCurve, collective_curve
from dlrm_scale.planning.costs.shard_loads import ROW_CUT_TYPES
from dlrm_scale.planning.costs.step_setting import StepSetting

__all__ = ["TypeCurves", "type_constant_ms", "type_curves"]


@dataclass(frozen=True, kw_only=True)
class TypeCurves:
    """Collectives of one type; None where it has none.

    Attributes:
        input: by received ids and lengths.
        output: by a rank's larger side of the exchange of vectors.
        gradient: its way back.
        cross: of the all-to-all between hosts.
        cross_gradient: its way back.
        replicas: of the gradient of data-parallel tables.
    """

    input: CostCurve | None = None
    output: CostCurve | None = None
    gradient: CostCurve | None = None
    cross: CostCurve | None = None
    cross_gradient: CostCurve | None = None
    replicas: CostCurve | None = None


def type_curves(cluster: Cluster, sharding_type: str, setting: StepSetting) -> TypeCurves:
    """Find the curves of a type's collectives.

    Args:
        cluster: with the costs.
        sharding_type: TorchRec's name.
        setting: gives the groups.

    Raises:
        ConfigError: the cluster has no costs for such groups.
    """
    world, host, across = setting.world, setting.host, setting.across
    if sharding_type == "data_parallel":
        return TypeCurves(replicas=collective_curve(cluster, "all_reduce", world))
    ids = collective_curve(cluster, "all_to_all", world)
    if sharding_type not in ROW_CUT_TYPES:
        return TypeCurves(
            input=ids,
            output=collective_curve(cluster, "vectors_all_to_all", world),
            gradient=collective_curve(cluster, "gradients_all_to_all", world),
        )
    group = world if sharding_type == "row_wise" else host
    rows = TypeCurves(
        input=ids,
        output=collective_curve(cluster, "reduce_scatter", group),
        gradient=collective_curve(cluster, "all_gather", group),
    )
    if sharding_type == "row_wise":
        return rows
    return TypeCurves(
        input=rows.input,
        output=rows.output,
        gradient=rows.gradient,
        cross=collective_curve(cluster, "vectors_all_to_all", across),
        cross_gradient=collective_curve(cluster, "gradients_all_to_all", across),
    )


def type_constant_ms(cluster: Cluster, sharding_type: str) -> dict[str, float]:
    """What a step pays as soon as a table uses a type, beside its collectives, by phase."""
    constant = cluster.type_ms.get(sharding_type)
    found = {
        "overhead": constant.value if constant is not None else 0.0,
        "lookup": cluster.forward.call_ms.value,
        "update": cluster.backward.call_ms.value,
    }
    if sharding_type == "data_parallel":
        return found | {"replicas": cluster.replicas.call_ms.value}
    return found | {"input": cluster.input.call_ms.value}
