"""A cluster: how many ranks, what memory they have, and what lookups and collectives cost there."""

from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

__all__ = ["COLLECTIVES", "Cluster", "CollectiveCosts", "Constant", "Curve", "LookupCosts"]

COLLECTIVES = ("all_to_all", "reduce_scatter", "all_gather", "all_reduce")

_Size = Annotated[int, Field(ge=0, lt=2**62)]
_Time = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Constant(_Record):
    """A number with where it comes from.

    Attributes:
        value: in the unit that its field's name says.
        source: a data sheet, a benchmark, or `calibrate` with its date.
    """

    value: _Time
    source: str


class Curve(_Record):
    """Time of a collective by the bytes that one rank sends.

    Attributes:
        points: (bytes, milliseconds), by rising bytes; at least one.
        source: of the points.
    """

    points: Annotated[tuple[tuple[_Size, _Time], ...], Field(min_length=1)]
    source: str

    def milliseconds(self, sent_bytes: float) -> float:
        """Between points by straight lines; beyond the last by the slope of the last two; before the first its time."""
        sizes = [float(size) for size, _ in self.points]
        times = [time for _, time in self.points]
        if sent_bytes <= sizes[-1] or len(sizes) == 1:
            return float(np.interp(sent_bytes, sizes, times))
        slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
        return times[-1] + slope * (sent_bytes - sizes[-1])


class CollectiveCosts(_Record):
    """One collective over one kind of group.

    Attributes:
        group: `host`: the ranks of one host; `hosts`: one rank of every host; `world`: all ranks.
        ranks: members of the group that was measured or computed; costs for others follow by the bytes that leave a
            rank and the links that they cross.
        forward: of the collective alone.
    """

    collective: Literal["all_to_all", "reduce_scatter", "all_gather", "all_reduce"]
    group: Literal["host", "hosts", "world"]
    ranks: Annotated[int, Field(ge=1)]
    forward: Curve


class LookupCosts(_Record):
    """Pooled lookup of a rank's tables (forward), or its fused update (backward).

    milliseconds = call + tables * table + lookups * lookup + elements * element + unique_rows * unique_row
    + unique_elements * unique_element, with lookups, elements (lookups * columns) and unique elements in millions.
    """

    call_ms: Constant
    table_ms: Constant
    lookup_ms: Constant
    element_ms: Constant
    unique_row_ms: Constant
    unique_element_ms: Constant


class Cluster(_Record):
    """Equal hosts with equal ranks.

    Attributes:
        name: for people.
        device: what computes.
        hosts: how many the description is of; plans may be made for other numbers.
        ranks_per_host: devices of a host.
        memory_bytes: of one rank's device.
        reserve: share of it kept for the dense part, batches and buffers.
        forward: lookup costs.
        backward: costs of the update fused into the backward pass.
        collectives: by collective and group.
        input_value_ms: all-to-all of a million ids, beyond the collective itself (permute, split).
        bucketize_value_ms: cutting a million ids by row ranges, which row-wise types need.
        type_ms: what a sharding type costs a step as soon as one table uses it, by type.
        notes: what else is to be known of the constants.
    """

    name: str
    device: Literal["cpu", "cuda"]
    hosts: Annotated[int, Field(ge=1)]
    ranks_per_host: Annotated[int, Field(ge=1)]
    memory_bytes: Annotated[int, Field(ge=1, lt=2**62)]
    reserve: Annotated[float, Field(ge=0, lt=1)] = 0.15
    forward: LookupCosts
    backward: LookupCosts
    collectives: tuple[CollectiveCosts, ...]
    input_value_ms: Constant
    bucketize_value_ms: Constant
    type_ms: dict[str, Constant] = Field(default_factory=dict)
    notes: str = ""
