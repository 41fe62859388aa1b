"""Dense features: one fixed rule from the raw integer to a float32, the same for every file.

    feature = log1p(max(x, 0)),   0 where the integer is missing

Computed in float64 and rounded once. Negative integers (I2 down to -3 in the Kaggle set, I8 = -1 in the 1TB set),
zero and missing all become 0, so the feature is finite for every input. The rule looks at nothing but the integer:
where it is shifted by each file's own minimum instead, the same integer becomes another feature in each day's file.
"""

import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

__all__ = ["DENSE_RULE", "GIVEN_DENSE_RULE", "dense_features"]

DENSE_RULE: dict[str, object] = {"function": "log1p(max(x, 0))", "missing": 0.0, "dtype": "float32"}
"""The rule as the manifest states it."""

GIVEN_DENSE_RULE: dict[str, object] = {"function": "given", "dtype": "float32"}
"""The rule of input whose dense features come ready-made."""

# 256 KiB of precomputed values fit the L2 cache and hold nearly all integers of real rows; the logarithm is the cost.
_TABLE_SIZE = 65_536


@functools.cache
def _table() -> npt.NDArray[np.float32]:
    return np.array([math.log1p(x) for x in range(_TABLE_SIZE)], np.float64).astype(np.float32)


@njit(cache=True, nogil=True)
def _transform(integers: Any, table: Any, features: Any) -> None:  # pragma: no cover - compiled
    for k in range(integers.shape[0]):
        for i in range(integers.shape[1]):
            x = integers[k, i]
            if x <= 0:
                features[k, i] = np.float32(0)
            elif x < table.shape[0]:
                features[k, i] = table[x]
            else:
                features[k, i] = np.float32(math.log1p(np.float64(x)))


def dense_features(integers: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """Transform a block of integer columns.

    Args:
        integers: [13, n] int32, 0 where missing.

    Returns:
        [13, n] float32, finite and at least 0.
    """
    features = np.empty(integers.shape, np.float32)
    _transform(integers, _table(), features)
    return features
