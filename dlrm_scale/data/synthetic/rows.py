"""Draw synthetic rows and write them as text, both in numba.

Every number of a row is a hash of (seed, row number, field), so any chunking or order of chunks gives the same rows.
The hash is SplitMix64's finalizer (Steele, Lea and Flood 2014); category ids go through MurmurHash3's 32-bit finalizer,
a bijection, so distinct values of a column stay distinct and cover all 32 bits.
A bag of a multi-hot column starts with the id that the same row has without `mean_ids`; the others follow the law of
the column too, each by hashes of its own, so an id may stand in a bag twice.
Shapes: n rows of a chunk, P pairs, K effect slots, Q pair slots (see `synthetic_model`).
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numba
import numpy as np
import numpy.typing as npt

from dlrm_scale.data.synthetic.bags import MOST_MEAN_IDS, bag_law, size_from_uniform
from dlrm_scale.data.synthetic.columns import Preset
from dlrm_scale.data.synthetic.model import PlantedModel

__all__ = ["MISSING_INTEGER", "RowSource", "Rows", "format_rows"]

MISSING_INTEGER = -(2**31)
"""Stands for an empty integer in `Rows.integers`."""
_MOST_ROW_BYTES = 2 + 13 * 12 + 26 * 9

_ZERO_ID_COLUMN = 6
_ZERO_ID_RANK = 2
"""C7's third commonest value is written `00000000`, so that a reader which takes it for missing is found out."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_U11, _U27, _U30, _U31, _U32 = (np.uint64(bits) for bits in (11, 27, 30, 31, 32))
_LOW32 = np.uint64(0xFFFFFFFF)
_FIRST_BAG_FIELD = 1000
_FIELDS_A_BAG = 2 * bag_law(MOST_MEAN_IDS).most


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Drawn rows with the truth about them.

    Attributes:
        labels: uint8 [n].
        integers: int32 [n, 13], `MISSING_INTEGER` where empty.
        ids: uint32 [n, 26].
        ids_present: uint8 [n, 26], 0 where the category is empty.
        more_counts: uint16 [n, 26], ids after the first in each bag.
        more_ids: uint32 [sum of `more_counts`], these ids, by row and then by column.
        logits: float64 [n], the true log-odds of label 1.
        frequent_logits: float64 [n], the same with the effects of rare ids left out.
    """

    labels: npt.NDArray[np.uint8]
    integers: npt.NDArray[np.int32]
    ids: npt.NDArray[np.uint32]
    ids_present: npt.NDArray[np.uint8]
    more_counts: npt.NDArray[np.uint16]
    more_ids: npt.NDArray[np.uint32]
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
        mean_ids: mean number of ids in the bags of C1 to C26; 1 is a column of one id a row.
    """

    preset: Preset
    model: PlantedModel
    seed: int
    frequent_share: float = 0.0
    mean_ids: tuple[int, ...] = (1,) * 26

    def draw(self, first_row: int, rows: int, day: int) -> Rows:
        """Draw `rows` rows from row number `first_row` of the whole set; `day` selects the fresh ids."""
        labels = np.empty(rows, np.uint8)
        integers = np.empty((rows, 13), np.int32)
        ids = np.empty((rows, 26), np.uint32)
        present = np.empty((rows, 26), np.uint8)
        most_more = int(sum(self._bag_laws[:, 2] - 1))
        more_counts = np.zeros((rows, 26), np.uint16)
        more_ids = np.empty(rows * most_more, np.uint32)
        logits = np.empty(rows)
        frequent = np.empty(rows)
        more = _draw(  # type: ignore[call-arg]
            np.uint64(self.seed), np.uint64(first_row), day, *self._tables, self._bag_laws,
            labels, integers, ids, present, more_counts, more_ids, logits, frequent,
        )  # fmt: skip
        return Rows(
            labels=labels,
            integers=integers,
            ids=ids,
            ids_present=present,
            more_counts=more_counts,
            more_ids=more_ids[:more],
            logits=logits,
            frequent_logits=frequent,
        )

    @cached_property
    def _bag_laws(self) -> npt.NDArray[np.float64]:
        """Float64 [26, 4]: the two numbers of `size_from_uniform`, the largest size, weight of an id's effect."""
        laws = np.tile([0.0, 0.0, 1.0, 1.0], (26, 1))
        for column, mean in enumerate(self.mean_ids):
            if mean > 1:
                law = bag_law(mean)
                laws[column] = *size_from_uniform(law), law.most, 1.0 / math.sqrt(mean)
        return laws

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
        id_effects, pair_effects = self.model.with_means(self.model.id_effects, self.model.pair_effects)
        kept_ids, kept_pairs = self.model.with_means(*self.model.kept(self.frequent_share))
        return (
            groups, rates, integers, counts, category, _salts(),
            self.model.intercept, self.model.integer_curves,
            np.stack([id_effects, kept_ids], axis=-1),
            self.model.pair_columns, np.stack([pair_effects, kept_pairs], axis=-1),
        )  # fmt: skip


def format_rows(rows: Rows) -> npt.NDArray[np.uint8]:
    """Write rows as Criteo text: label, 13 decimal integers, 26 ids of 8 hex digits, tabs between, LF after each row.

    The ids of a bag stand in one field with commas between.

    Returns:
        uint8 [bytes of the text].
    """
    text = np.empty(len(rows.labels) * _MOST_ROW_BYTES + len(rows.more_ids) * 9, np.uint8)
    end = _format(rows.labels, rows.integers, rows.ids, rows.ids_present, rows.more_counts, rows.more_ids, text)
    return text[:end]


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


@numba.njit(cache=True, nogil=True, inline="always")
def _value(u, state, fresh_field, day, counts, law):  # type: ignore[no-untyped-def]
    """Turn a uniform into a column's value: a rank, or beyond them the number of one of the day's fresh ids."""
    if u < law[0]:
        offset = np.int64(_uniform(state, fresh_field) * counts[1])
        return counts[0] + day * counts[1] + offset
    u = (u - law[0]) / (1.0 - law[0])
    value = np.int64(0)
    if u >= law[1]:
        u = (u - law[1]) / (1.0 - law[1])
        value = np.int64((law[2] + u * law[3]) ** law[4] - law[5])
        value = min(max(value, np.int64(1)), counts[0] - 1)
    return value


@numba.njit(cache=True, nogil=True, inline="always")
def _slot(value, ids, last_slot):  # type: ignore[no-untyped-def]
    return min(value + 1, last_slot) if value < ids else last_slot


@numba.njit(cache=True, nogil=True)
def _draw(  # type: ignore[no-untyped-def]
    seed, first_row, day, groups, rates, integer_laws, id_counts, category_laws, salts,
    intercept, curves, id_effects, pair_columns, pair_effects, bag_laws,
    labels, integers, ids, present, more_counts, more_ids, logits, frequent,
):  # fmt: skip
    slots_of_row = np.empty(26, np.int64)
    # [26, Q + 1]: how much of each pair slot a multi-hot column's bag holds, the mean's in the last place.
    pair_weights = np.zeros((26, pair_effects.shape[1]))
    has_bag = np.empty(26, np.bool_)
    more = 0
    missing = np.empty(len(rates), np.bool_)
    mean_slot, last_slot = id_effects.shape[1] - 1, id_effects.shape[1] - 2
    mean_pair_slot, last_pair_slot = pair_effects.shape[1] - 1, pair_effects.shape[1] - 2
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
            has_bag[c] = False
            counts, law = id_counts[c], category_laws[c]
            if groups[13 + c] >= 0 and missing[groups[13 + c]]:
                present[i, c] = 0
                ids[i, c] = 0
                slot = 0
            else:
                present[i, c] = 1
                has_bag[c] = bag_laws[c, 2] > 1
                value = _value(_uniform(state, 200 + c), state, 250 + c, day, counts, law)
                slot = _slot(value, counts[0], last_slot)
                ids[i, c] = _mix32(np.uint32(value) ^ salts[c, 0]) ^ salts[c, 1]
            slots_of_row[c] = slot
            if not has_bag[c]:
                logit += id_effects[c, slot, 0]
                kept += id_effects[c, slot, 1]
                continue
            size = 1 + int(math.log(1.0 - _uniform(state, 400 + c) * bag_laws[c, 0]) * bag_laws[c, 1])
            size = min(size, int(bag_laws[c, 2]))
            weight = bag_laws[c, 3]
            effect, kept_effect = id_effects[c, slot, 0], id_effects[c, slot, 1]
            pair_weights[c] = 0.0
            pair_weights[c, mean_pair_slot] = 1.0 - size * weight
            pair_weights[c, min(slot, last_pair_slot)] = weight
            field = _FIRST_BAG_FIELD + c * _FIELDS_A_BAG
            for _ in range(size - 1):
                value = _value(_uniform(state, field), state, field + 1, day, counts, law)
                slot = _slot(value, counts[0], last_slot)
                more_ids[more] = _mix32(np.uint32(value) ^ salts[c, 0]) ^ salts[c, 1]
                effect += id_effects[c, slot, 0]
                kept_effect += id_effects[c, slot, 1]
                pair_weights[c, min(slot, last_pair_slot)] += weight
                more += 1
                field += 2
            more_counts[i, c] = size - 1
            logit += weight * effect + (1.0 - size * weight) * id_effects[c, mean_slot, 0]
            kept += weight * kept_effect + (1.0 - size * weight) * id_effects[c, mean_slot, 1]
        for p in range(len(pair_columns)):
            one, other = pair_columns[p, 0], pair_columns[p, 1]
            first = min(slots_of_row[one], last_pair_slot)
            second = min(slots_of_row[other], last_pair_slot)
            if not has_bag[one] and not has_bag[other]:
                logit += pair_effects[p, first, second, 0]
                kept += pair_effects[p, first, second, 1]
                continue
            for c, slot in ((one, first), (other, second)):
                if not has_bag[c]:
                    pair_weights[c] = 0.0
                    pair_weights[c, slot] = 1.0
            for a in range(mean_pair_slot + 1):
                if pair_weights[one, a] != 0.0:
                    for b in range(mean_pair_slot + 1):
                        both = pair_weights[one, a] * pair_weights[other, b]
                        logit += both * pair_effects[p, a, b, 0]
                        kept += both * pair_effects[p, a, b, 1]
        logits[i] = logit
        frequent[i] = kept
        labels[i] = _uniform(state, 300) < 1.0 / (1.0 + math.exp(-logit))
    return more


@numba.njit(cache=True, nogil=True, inline="always")
def _put_id(text, at, x):  # type: ignore[no-untyped-def]
    for j in range(8):
        nibble = (x >> np.uint32(28 - 4 * j)) & np.uint32(15)
        text[at + j] = nibble + 48 if nibble < 10 else nibble + 87
    return at + 8


@numba.njit(cache=True, nogil=True)
def _format(labels, integers, ids, present, more_counts, more_ids, text):  # type: ignore[no-untyped-def]
    more = 0
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
            at = _put_id(text, at, ids[i, c])
            for _ in range(more_counts[i, c]):
                text[at] = 44
                at = _put_id(text, at + 1, more_ids[more])
                more += 1
        text[at] = 10
        at += 1
    return at
