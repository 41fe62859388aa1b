"""A cluster: how many ranks, what memory they have, and what lookups and collectives cost there."""

from typing import Annotated, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from dlrm_scale.config import ShardingType
from dlrm_scale.planning.findings import check_name, shortened
from dlrm_scale.recipes.validate import nearest

__all__ = [
    "COLLECTIVES",
    "Cluster",
    "Collective",
    "CollectiveCosts",
    "Constant",
    "Curve",
    "DenseCosts",
    "InputCosts",
    "Link",
    "Links",
    "LookupCosts",
    "ReplicaCosts",
]

Collective = Literal[
    "all_to_all", "vectors_all_to_all", "gradients_all_to_all", "reduce_scatter", "all_gather", "all_reduce"
]
COLLECTIVES: tuple[Collective, ...] = (
    "all_to_all",
    "vectors_all_to_all",
    "gradients_all_to_all",
    "reduce_scatter",
    "all_gather",
    "all_reduce",
)
"""all_to_all is the bare collective. The two after it, reduce_scatter and all_gather are what TorchRec does with pooled
vectors and their gradients, so that measured ones contain its copies. Where one of the two isn't given, all_to_all
stands in for it."""

_Size = Annotated[int, Field(ge=0, lt=2**62)]
_Time = Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)]
"""Milliseconds, and the few values in other units: 1e7 ms are almost three hours, more than any part of a step."""
_Ranks = Annotated[int, Field(ge=1, le=2**20)]
_LEAST_RATE, _LEAST_EFFICIENCY = 1e-3, 1e-3
"""A megabyte a second, a thousandth of a link: below, times of a step are no longer worth planning for."""
_TYPES: tuple[str, ...] = get_args(ShardingType)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Constant(_Record):
    """A number with where it comes from.

    Attributes:
        value: in the unit that its field's name says.
        source: a data sheet, a benchmark, `assumed` with the reason, or `calibrate` with what was measured.
    """

    value: _Time
    source: Annotated[str, Field(min_length=1)]


class Curve(_Record):
    """Time of a collective by bytes.

    Attributes:
        points: (bytes, milliseconds), by rising bytes; at least one.
        source: of the points.
    """

    points: Annotated[tuple[tuple[_Size, _Time], ...], Field(min_length=1)]
    source: Annotated[str, Field(min_length=1)]

    @model_validator(mode="after")
    def _rising(self) -> Self:
        for (size, time), (next_size, next_time) in zip(self.points, self.points[1:], strict=False):
            if next_size <= size:
                raise ValueError(f"bytes must rise from point to point, but {next_size} follows {size}")
            if next_time < time:
                raise ValueError(f"more bytes can't take less time: {next_time} ms follows {time} ms")
        return self

    def milliseconds(self, size_bytes: float) -> float:
        """Between points by straight lines; beyond the last by the slope of the last two; before the first its time."""
        return float(self.milliseconds_of(np.array([size_bytes]))[0])

    def milliseconds_of(self, sizes_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """As `milliseconds`, of each of an array."""
        sizes = np.array([float(size) for size, _ in self.points])
        times = np.array([time for _, time in self.points])
        found = np.interp(sizes_bytes, sizes, times)
        if len(sizes) > 1:
            slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
            found = found + slope * np.maximum(0.0, sizes_bytes - sizes[-1])
        return np.asarray(found)


class CollectiveCosts(_Record):
    """One collective over one kind of group.

    Attributes:
        collective: which; see `COLLECTIVES`.
        ranks: members of the group.
        hosts: that they are on, equally many on each.
        curve: by the bytes of a rank's larger side: what it sends in an all-to-all, its own share included; what it
            brings to a reduce-scatter; what it gets from an all-gather; the buffer of an all-reduce.
    """

    collective: Collective
    ranks: Annotated[_Ranks, Field(ge=2)]
    hosts: _Ranks = 1
    curve: Curve


class Link(_Record):
    """What joins ranks: within a host, or hosts.

    Attributes:
        gigabytes_per_second: 10^9 bytes of one rank in one direction.
        efficiency: share of it that collectives reach.
        step_ms: one step of a ring or tree over it.
        message_ms: one message of an all-to-all.
    """

    gigabytes_per_second: Constant
    efficiency: Constant
    step_ms: Constant
    message_ms: Constant

    @field_validator("gigabytes_per_second")
    @classmethod
    def _carries(cls, rate: Constant) -> Constant:
        if rate.value < _LEAST_RATE:
            raise ValueError(f"gigabytes_per_second must be at least {_LEAST_RATE:g}, but is {rate.value:g}")
        return rate

    @field_validator("efficiency")
    @classmethod
    def _is_a_share(cls, efficiency: Constant) -> Constant:
        if not _LEAST_EFFICIENCY <= efficiency.value <= 1:
            raise ValueError(
                f"efficiency must be at least {_LEAST_EFFICIENCY:g} and at most 1, but is {efficiency.value:g}"
            )
        return efficiency

    @property
    def bytes_per_ms(self) -> float:
        """Reached."""
        return 1e6 * self.gigabytes_per_second.value * self.efficiency.value


class Links(_Record):
    """What collectives are computed from where they weren't measured.

    Attributes:
        start_ms: of any collective.
        host: between ranks of a host.
        network: between hosts; each rank has its share. Missing where there is one host.
    """

    start_ms: Constant
    host: Link
    network: Link | None = None


class LookupCosts(_Record):
    """Pooled lookup of a rank's tables (forward), or its fused update (backward).

    milliseconds = call + tables * table + lookups * lookup + elements * element + unique_rows * unique_row
    + unique_elements * unique_element + output_elements * output_element

    Lookups are ids; elements are lookups * columns; unique rows are distinct within the global batch; output elements
    are the values of pooled vectors (their gradients when updating). All but calls and tables count in millions.
    """

    call_ms: Constant
    table_ms: Constant
    lookup_ms: Constant
    element_ms: Constant
    unique_row_ms: Constant
    unique_element_ms: Constant
    output_element_ms: Constant


class InputCosts(_Record):
    """What the exchange of ids costs beyond its all-to-all.

    Attributes:
        call_ms: of each sharding type in use: sizes are exchanged before values.
        value_ms: a million ids that a rank receives: permute, split, join.
        bag_ms: a million bags that a rank receives.
        bucketize_ms: cutting a million of a rank's own ids by row ranges, which row-wise types need.
    """

    call_ms: Constant
    value_ms: Constant
    bag_ms: Constant
    bucketize_ms: Constant


class ReplicaCosts(_Record):
    """Data-parallel tables, beyond lookups and the all-reduce.

    Attributes:
        call_ms: as soon as there is one.
        element_ms: a million values of the tables: dense gradient, its copies, the optimizer's pass over all rows.
    """

    call_ms: Constant
    element_ms: Constant


class DenseCosts(_Record):
    """Forward and backward pass of the dense part, and its optimizer.

    Attributes:
        call_ms: of every step, whatever the sizes: Python, loss, launches.
        gflop_ms: 10^9 floating-point operations in fp32.
        bf16_gflop_ms: the same under bf16 autocast.
        tf32_gflop_ms: the same in TF32, which CUDA devices alone have. Where it isn't given, twice what bf16 takes, and
            no more than fp32: tensor cores do half as many operations in TF32 as in bf16 (NVIDIA's data sheets of A100,
            H100 and H200).
        vector_ms: a million values of pooled vectors, brought into order and given gradients.
        parameter_ms: a million parameters: gradients, their bucket, the optimizer.
    """

    call_ms: Constant
    gflop_ms: Constant
    bf16_gflop_ms: Constant
    tf32_gflop_ms: Constant | None = None
    vector_ms: Constant
    parameter_ms: Constant

    def flop_rate_ms(self, precision: Literal["fp32", "tf32", "bf16"]) -> float:
        """10^9 floating-point operations in a precision; see `tf32_gflop_ms`."""
        if precision == "fp32":
            return self.gflop_ms.value
        if precision == "bf16":
            return self.bf16_gflop_ms.value
        if self.tf32_gflop_ms is not None:
            return self.tf32_gflop_ms.value
        return min(self.gflop_ms.value, 2 * self.bf16_gflop_ms.value)


class Cluster(_Record):
    """Equal hosts with equal ranks.

    Attributes:
        name: for people.
        device: what computes.
        hosts: how many the description is of; plans may be made for other numbers.
        ranks_per_host: devices of a host.
        memory_bytes: of one rank's device.
        memory_source: of `memory_bytes`.
        reserve: share of the memory kept for what isn't counted: the allocator, libraries, fragments.
        forward: lookup costs.
        backward: costs of the update fused into the backward pass.
        input: costs of the exchange of ids.
        replicas: costs of data-parallel tables.
        dense: costs of the dense part.
        links: what unmeasured collectives are computed from.
        collectives: measured ones.
        type_ms: what a sharding type costs a step as soon as one table uses it, by type; no entry costs nothing.
        fit_error: of a calibrated file: mean relative error of each component's fit.
        notes: what else is to be known of the constants.
        noise: why measured constants aren't to be trusted, in a sentence or more: what other programs, repeats or the
            fit itself say against them. Empty where nothing does.
        clock: what `calibrate` measured; empty where times aren't measured.
    """

    name: Annotated[str, Field(min_length=1), AfterValidator(check_name)]
    device: Literal["cpu", "cuda"]
    hosts: _Ranks
    ranks_per_host: _Ranks
    memory_bytes: Annotated[int, Field(ge=1, lt=2**62)]
    memory_source: Annotated[str, Field(min_length=1)]
    reserve: Annotated[float, Field(ge=0, lt=1)] = 0.15
    notes: str = ""
    noise: str = ""
    clock: Literal["", "elapsed", "processor"] = ""
    forward: LookupCosts
    backward: LookupCosts
    input: InputCosts
    replicas: ReplicaCosts
    dense: DenseCosts
    links: Links | None = None
    type_ms: dict[str, Constant] = Field(default_factory=dict)
    fit_error: dict[str, float] = Field(default_factory=dict)
    collectives: tuple[CollectiveCosts, ...] = ()

    @field_validator("type_ms")
    @classmethod
    def _known_types(cls, constants: dict[str, Constant]) -> dict[str, Constant]:
        for kind in constants:
            if kind not in _TYPES:
                hint = nearest(kind, _TYPES)
                raise ValueError(
                    f"type_ms: unknown sharding type {shortened(kind)}"
                    + (f"; did you mean {hint}?" if hint else "")
                    + f" (allowed: {', '.join(_TYPES)})"
                )
        return constants

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.links is None and not self.collectives:
            raise ValueError("needs [links], measured [[collectives]], or both")
        seen: set[tuple[str, int, int]] = set()
        for costs in self.collectives:
            key = (costs.collective, costs.ranks, costs.hosts)
            if key in seen:
                raise ValueError(f"{costs.collective} over {costs.ranks} ranks on {costs.hosts} hosts is there twice")
            if costs.ranks % costs.hosts:
                raise ValueError(f"{costs.collective}: {costs.ranks} ranks don't divide over {costs.hosts} hosts")
            seen.add(key)
        return self
