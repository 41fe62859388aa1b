"""Which plans are alive together: all of them, or groups that share one plan, as memory allows."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dlrm_scale.units import format_bytes

__all__ = ["group_plans"]


def group_plans(
    sizes_bytes: Mapping[str, Sequence[int]], ranks_per_host: int, free_bytes: int, anchor: str
) -> tuple[list[list[str]], dict[str, str]]:
    """Divide plans into groups that fit a host's memory, in their order. All have the anchor, by which they compare.

    Args:
        sizes_bytes: `[ranks]` of each plan, predicted.
        ranks_per_host: ranks that share a memory.
        free_bytes: of it.
        anchor: name of the plan that is in every group.

    Returns:
        Groups of names, each beginning with the anchor; and of plans that fit no group why.
    """
    needs = {name: np.asarray(sizes).reshape(-1, ranks_per_host).sum(axis=1) for name, sizes in sizes_bytes.items()}
    held, refused = needs[anchor], {}
    if held.max() > free_bytes:
        return [], dict.fromkeys(sizes_bytes, _reason(held, free_bytes, f" with {anchor} beside it"))
    groups: list[list[str]] = [[anchor]]
    used = held
    for name, need in needs.items():
        if name == anchor:
            continue
        if (held + need).max() > free_bytes:
            refused[name] = _reason(held + need, free_bytes, f" with {anchor} beside it")
            continue
        if (used + need).max() > free_bytes:
            groups.append([anchor])
            used = held
        groups[-1].append(name)
        used = used + need
    return groups, refused


def _reason(need: NDArray[np.int64], free: int, what: str) -> str:
    return f"needs {format_bytes(int(need.max()))} on a host{what}, and {format_bytes(free)} may be used for measuring"
