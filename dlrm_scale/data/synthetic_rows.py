"""Draw synthetic rows and write them as text, both in numba.

Every number of a row is a hash of (seed, row number, field), so any chunking or order of chunks gives the same rows.
The hash is SplitMix64's finalizer (Steele, Lea and Flood 2014); category ids go through MurmurHash3's 32-bit finalizer,
a bijection, so distinct values of a column stay distinct and cover all 32 bits.
Shapes: n rows of a chunk, P pairs, K effect slots, Q pair slots (see `synthetic_model`).
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numba
import numpy as np
import numpy.typing as npt

from dlrm_scale.data.synthetic_columns import Preset
from dlrm_scale.data.synthetic_model import PlantedModel

__all__ = ["MISSING_INTEGER", "RowSource", "Rows", "format_rows"]

MISSING_INTEGER = -(2**31)
"""Stands for an empty integer in `Rows.integers`."""
MOST_ROW_BYTES = 2 + 13 * 12 + 26 * 9

_ZERO_ID_COLUMN = 6
_ZERO_ID_RANK = 2
"""C7's third commonest value is written `00000000`, so that a reader which takes it for missing is found out."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_U11, _U27, _U30, _U31, _U32 = (np.uint64(bits) for bits in (11, 27, 30, 31, 32))
_LOW32 = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Drawn rows with the truth about them.

    Attributes:
        labels: uint8 [n].
        integers: int32 [n, 13], `MISSING_INTEGER` where empty.
        ids: uint32 [n, 26].
        ids_present: uint8 [n, 26], 0 where the category is empty.
        logits: float64 [n], the true log-odds of label 1.
        frequent_logits: float64 [n], the same with the effects of rare ids left out.
    """

    labels: npt.NDArray[np.uint8]
    integers: npt.NDArray[np.int32]
    ids: npt.NDArray[np.uint32]
    ids_present: npt.NDArray[np.uint8]
    logits: npt.NDArray[np.float64]
    frequent_logits: npt.NDArray[np.float64]


@dataclass(frozen=True)
class RowSource:
    """All rows of one seed; `draw` gives any range of them.

    Attributes:
        preset: already scaled.
        model: the planted model.
        seed: 0 up to 2**63 - 1.
        frequent_share: ids expected in a smaller share of all rows count as rare in `Rows.frequent_logits`.
    """

    preset: Preset
    model: PlantedModel
    seed: int
    frequent_share: float = 0.0

    def draw(self, first_row: int, rows: int, day: int) -> Rows:
        """Draw `rows` rows from row number `first_row` of the whole set; `day` selects the fresh ids."""
        labels = np.empty(rows, np.uint8)
        integers = np.empty((rows, 13), np.int32)
        ids = np.empty((rows, 26), np.uint32)
        present = np.empty((rows, 26), np.uint8)
        logits = np.empty(rows)
        frequent = np.empty(rows)
        _draw(  # type: ignore[call-arg]
            np.uint64(self.seed), np.uint64(first_row), day, *self._tables,
            labels, integers, ids, present, logits, frequent,
        )  # fmt: skip
        return Rows(
            labels=labels,
            integers=integers,
            ids=ids,
            ids_present=present,
            logits=logits,
            frequent_logits=frequent,
        )

    @cached_property
    def _tables(self) -> tuple[object, ...]:
        groups = np.full(39, -1, np.int64)
        for number, (columns, _) in enumerate(self.preset.missing_groups):
            groups[list(columns)] = number
        rates = np.array([rate for _, rate in self.preset.missing_groups])
        integers = np.array([[*np.cumsum((*law.below, law.zero)), law.mu, law.sigma, law.highest]
                             for law in self.preset.integers])  # fmt: skip
        laws = self.preset.categories
        counts = np.array([(law.ids, law.fresh_ids) for law in laws], dtype=np.int64)
        powers = 1.0 - np.array([law.exponent for law in laws])
        shifts = np.array([law.shift for law in laws])
        low, high = (1 + shifts) ** powers, (counts[:, 0] + shifts) ** powers
        category = np.stack(
            [np.array([law.fresh_rate for law in laws]), np.array([law.top for law in laws]),
             low, high - low, 1.0 / powers, shifts], axis=1)  # fmt: skip
        kept_ids, kept_pairs = self.model.kept(self.frequent_share)
        return (
            groups, rates, integers, counts, category, _salts(),
            self.model.intercept, self.model.integer_curves,
            np.stack([self.model.id_effects, kept_ids], axis=-1),
            self.model.pair_columns, np.stack([self.model.pair_effects, kept_pairs], axis=-1),
        )  # fmt: skip


def format_rows(rows: Rows) -> npt.NDArray[np.uint8]:
    """Write rows as Criteo text: label, 13 decimal integers, 26 ids of 8 hex digits, tabs between, LF after each row.

    Returns:
        uint8 [bytes of the text].
    """
    text = np.empty(len(rows.labels) * MOST_ROW_BYTES, np.uint8)
    return text[: _format(rows.labels, rows.integers, rows.ids, rows.ids_present, text)]


def _salts() -> npt.NDArray[np.uint32]:
    """Return uint32 [26, 2]: what is mixed into a column's value before and after hashing."""
    salts = np.zeros((26, 2), np.uint32)
    for column in range(26):
        salts[column, 0] = (0x3C6EF372 * (column + 1)) & 0xFFFFFFFF
    value = np.uint32(_ZERO_ID_RANK)
    salts[_ZERO_ID_COLUMN, 1] = _mix32(value ^ salts[_ZERO_ID_COLUMN, 0])
    return salts


@numba.njit(cache=True, nogil=True, inline="always")
def _mix32(x):  # type: ignore[no-untyped-def]
    """MurmurHash3's 32-bit finalizer."""
    x = np.uint32(x)
    x ^= x >> np.uint32(16)
    x = np.uint32(x * np.uint32(0x85EBCA6B))
    x ^= x >> np.uint32(13)
    x = np.uint32(x * np.uint32(0xC2B2AE35))
    x ^= x >> np.uint32(16)
    return x


@numba.njit(cache=True, nogil=True, inline="always")
def _mix64(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> _U30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U27)) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> _U31)


@numba.njit(cache=True, nogil=True, inline="always")
def _bits(state, field):  # type: ignore[no-untyped-def]
    return _mix64(state + np.uint64(field + 1) * _GOLDEN)


@numba.njit(cache=True, nogil=True, inline="always")
def _uniform(state, field):  # type: ignore[no-untyped-def]
    """Draw from [0, 1) with 53 bits."""
    return np.float64(_bits(state, field) >> _U11) * 2.0**-53


@numba.njit(cache=True, nogil=True)
def _draw(  # type: ignore[no-untyped-def]
    seed, first_row, day, groups, rates, integer_laws, id_counts, category_laws, salts,
    intercept, curves, id_effects, pair_columns, pair_effects,
    labels, integers, ids, present, logits, frequent,
):  # fmt: skip
    slots_of_row = np.empty(26, np.int64)
    missing = np.empty(len(rates), np.bool_)
    last_slot = id_effects.shape[1] - 1
    last_pair_slot = pair_effects.shape[1] - 1
    key = _mix64(seed + _GOLDEN)
    for i in range(len(labels)):
        state = _mix64(key ^ _mix64((first_row + np.uint64(i)) * _GOLDEN))
        for g in range(len(rates)):
            missing[g] = _uniform(state, g) < rates[g]
        logit = intercept
        for c in range(13):
            x = 0
            if groups[c] >= 0 and missing[groups[c]]:
                integers[i, c] = MISSING_INTEGER
            else:
                u = _uniform(state, 100 + c)
                law = integer_laws[c]
                if u < law[0]:
                    x = -3
                elif u < law[1]:
                    x = -2
                elif u < law[2]:
                    x = -1
                elif u >= law[3]:
                    # Box-Muller from the two halves of one hash; the first half is never 0.
                    bits = _bits(state, 150 + c)
                    radius = math.sqrt(-2.0 * math.log((np.float64(bits >> _U32) + 1.0) * 2.0**-32))
                    normal = radius * math.cos(2.0 * math.pi * np.float64(bits & _LOW32) * 2.0**-32)
                    x = max(1, int(min(math.exp(law[4] + law[5] * normal), law[6])))
                integers[i, c] = x
            t = (math.log1p(max(x, 0)) - curves[c, 0]) / curves[c, 1]
            t = min(3.0, max(-3.0, t))
            logit += (curves[c, 3] * t + curves[c, 2]) * t
        kept = logit
        for c in range(26):
            if groups[13 + c] >= 0 and missing[groups[13 + c]]:
                present[i, c] = 0
                ids[i, c] = 0
                slot = 0
            else:
                present[i, c] = 1
                law = category_laws[c]
                u = _uniform(state, 200 + c)
                if u < law[0]:
                    offset = np.int64(_uniform(state, 250 + c) * id_counts[c, 1])
                    value = id_counts[c, 0] + day * id_counts[c, 1] + offset
                    slot = last_slot
                else:
                    u = (u - law[0]) / (1.0 - law[0])
                    value = 0
                    if u >= law[1]:
                        u = (u - law[1]) / (1.0 - law[1])
                        value = np.int64((law[2] + u * law[3]) ** law[4] - law[5])
                        value = min(max(value, 1), id_counts[c, 0] - 1)
                    slot = min(value + 1, last_slot)
                ids[i, c] = _mix32(np.uint32(value) ^ salts[c, 0]) ^ salts[c, 1]
            slots_of_row[c] = slot
            logit += id_effects[c, slot, 0]
            kept += id_effects[c, slot, 1]
        for p in range(len(pair_columns)):
            one = min(slots_of_row[pair_columns[p, 0]], last_pair_slot)
            other = min(slots_of_row[pair_columns[p, 1]], last_pair_slot)
            logit += pair_effects[p, one, other, 0]
            kept += pair_effects[p, one, other, 1]
        logits[i] = logit
        frequent[i] = kept
        labels[i] = _uniform(state, 300) < 1.0 / (1.0 + math.exp(-logit))


@numba.njit(cache=True, nogil=True)
def _format(labels, integers, ids, present, text):  # type: ignore[no-untyped-def]
    digits = np.empty(10, np.uint8)
    at = 0
    for i in range(len(labels)):
        text[at] = 48 + labels[i]
        at += 1
        for c in range(13):
            text[at] = 9
            at += 1
            x = np.int64(integers[i, c])
            if x == MISSING_INTEGER:
                continue
            if x < 0:
                text[at] = 45
                at += 1
                x = -x
            count = 0
            while True:
                digits[count] = 48 + x % 10
                count += 1
                x //= 10
                if x == 0:
                    break
            for j in range(count):
                text[at] = digits[count - 1 - j]
                at += 1
        for c in range(26):
            text[at] = 9
            at += 1
            if not present[i, c]:
                continue
            x = ids[i, c]
            for j in range(8):
                nibble = (x >> np.uint32(28 - 4 * j)) & np.uint32(15)
                text[at] = nibble + 48 if nibble < 10 else nibble + 87
                at += 1
        text[at] = 10
        at += 1
    return at
