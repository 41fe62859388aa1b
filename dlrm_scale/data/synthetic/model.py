"""The planted model: the true click probability of a synthetic row.

    logit = intercept + sum of id effects + sum of integer curves + sum of pair effects

- An id's effect is a fixed normal number made from (column, rank), shrunk by `n / (n + strength)`, where n is how
  often the id is expected in `REFERENCE_ROWS` rows: common ids carry the signal, rare and fresh ids have next to none.
  An empty category is an id like the others.
- An integer's curve is a parabola in `log(1 + max(x, 0))`; an empty or negative integer counts as 0, because the usual
  transform can't tell them apart.
- A pair's effect is made like an id's, from (pair, rank, rank) and the expected count of both together, and is kept to
  few columns of few ids.
- A bag of a multi-hot column counts as `mean + sum over its ids of (effect - mean) / sqrt(expected ids)`, where `mean`
  is the effect that an id of the column has on average; pairs do so on both sides. So a column keeps the variance that
  it has with one id a row, the size of a bag alone tells nothing, and sum pooling can express the model exactly.

The model depends on the preset and the scale alone, so two seeds give two samples of one world.
Shapes: K effect slots a column (slot 0 empty, slot 1 + rank, the last one for all rarer and fresh ids), P pairs,
Q slots a side of a pair.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dlrm_scale.data.synthetic.columns import CategoryLaw, Preset

__all__ = ["PlantedModel", "category_shares", "planted_model"]

Float64 = npt.NDArray[np.float64]

EFFECT_SLOTS = 4096
PAIR_SLOTS = 32
REFERENCE_ROWS = 500_000
"""The sample in which an id is counted common or rare."""
ID_STRENGTH = 20_000.0
PAIR_STRENGTH = 20_000.0
"""Ids and pairs of 4 % of the rows keep half their effect. After an epoch of 712,766 rows a small DLRM was 0.005 of AUC
below the attainable one; with 1,000 for ids, 2,000 for pairs and a bend of 0.25 it was 0.009."""
INTEGER_BEND = 0.05
"""Weight of the square in an integer's curve, against 1 of the line."""
ID_PART = 0.54
INTEGER_PART = 0.32
PAIR_PART = 0.14
"""Parts of the logit's variance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlantedModel:
    """Tables from which the row kernel sums a logit.

    Attributes:
        intercept: sets the click rate.
        id_effects: float64 [26, K].
        pair_columns: int64 [P, 2], category columns 0..25.
        pair_effects: float64 [P, Q, Q].
        integer_curves: float64 [13, 4]: centre, width, slope, bend; the curve is `slope * t + bend * t * t` with
            `t = (log1p(x) - centre) / width` held in [-3, 3].
        id_expected_share: float64 [26, K], share of all rows that hold the slot's id; 0 in the last slot.
        pair_expected_share: float64 [P, Q, Q].
    """

    intercept: float
    id_effects: Float64
    pair_columns: npt.NDArray[np.int64]
    pair_effects: Float64
    integer_curves: Float64
    id_expected_share: Float64
    pair_expected_share: Float64

    def with_means(self, id_effects: Float64, pair_effects: Float64) -> tuple[Float64, Float64]:
        """Add what an id that isn't missing has on average.

        Args:
            id_effects: float64 [26, K].
            pair_effects: float64 [P, Q, Q].

        Returns:
            float64 [26, K + 1] and [P, Q + 1, Q + 1], the means in the last places.
        """
        present = self.id_expected_share / (1.0 - self.id_expected_share[:, :1])
        present[:, 0] = 0.0
        means = (present * id_effects).sum(axis=1, keepdims=True)
        one, other = (present[self.pair_columns[:, side], :PAIR_SLOTS].copy() for side in (0, 1))
        one[:, -1] = other[:, -1] = 0.0
        # All rarer ids share the last slot, whose effect is 0.
        rows = np.concatenate([pair_effects, np.einsum("pi,pij->pj", one, pair_effects)[:, None, :]], axis=1)
        return (
            np.concatenate([id_effects, means], axis=1),
            np.concatenate([rows, np.einsum("pij,pj->pi", rows, other)[:, :, None]], axis=2),
        )

    def kept(self, least_share: float) -> tuple[Float64, Float64]:
        """Return id and pair effects with those of ids rarer than `least_share` of all rows set to 0."""
        return (
            np.where(self.id_expected_share >= least_share, self.id_effects, 0.0),
            np.where(self.pair_expected_share >= least_share, self.pair_effects, 0.0),
        )


def category_shares(law: CategoryLaw, missing_rate: float, slots: int) -> Float64:
    """Return the share of all rows that each slot of a column takes, float64 [slots]; 0 in the last slot.

    Slot 0 is the empty value, slot 1 + r is rank r.
    """
    shares = np.zeros(slots)
    shares[0] = missing_rate
    known = (1.0 - missing_rate) * (1.0 - law.fresh_rate)
    shares[1] = known * law.top
    ranks = min(law.ids, slots - 2)
    if ranks > 1:
        power = 1.0 - law.exponent
        edges = np.minimum(np.arange(1, ranks + 1), law.ids) + law.shift
        low, high = (1 + law.shift) ** power, (law.ids + law.shift) ** power
        shares[2 : ranks + 1] = known * (1.0 - law.top) * np.diff(edges**power) / (high - low)
    return shares


def planted_model(preset: Preset, intercept: float) -> PlantedModel:
    """Build the model of an already scaled preset."""
    missing = np.zeros(39)
    for columns, rate in preset.missing_groups:
        missing[list(columns)] = rate
    shares = np.stack([category_shares(law, missing[13 + c], EFFECT_SLOTS) for c, law in enumerate(preset.categories)])
    numbers = np.arange(26 * EFFECT_SLOTS, dtype=np.uint64).reshape(26, EFFECT_SLOTS)
    effects = _normals(numbers, salt=1) * _shrink(shares, ID_STRENGTH)
    effects *= np.sqrt(ID_PART * preset.signal / _variance(effects, shares, axes=1))

    pair_columns = np.array(preset.pairs, dtype=np.int64)
    one, other = shares[pair_columns[:, 0], :PAIR_SLOTS].copy(), shares[pair_columns[:, 1], :PAIR_SLOTS].copy()
    one[:, -1] = other[:, -1] = 0.0
    # Groups of missing columns are independent and no pair lies within one group, so joint shares are products.
    pair_shares = one[:, :, None] * other[:, None, :]
    pair_numbers = np.arange(pair_shares.size, dtype=np.uint64).reshape(pair_shares.shape)
    pair_effects = _normals(pair_numbers, salt=2) * _shrink(pair_shares, PAIR_STRENGTH)
    pair_effects *= np.sqrt(PAIR_PART * preset.signal / _variance(pair_effects, pair_shares, axes=(1, 2)))
    return PlantedModel(
        intercept=intercept,
        id_effects=effects,
        pair_columns=pair_columns,
        pair_effects=pair_effects,
        integer_curves=_integer_curves(preset, missing),
        id_expected_share=shares,
        pair_expected_share=pair_shares,
    )


def _integer_curves(preset: Preset, missing: Float64) -> Float64:
    curves = np.zeros((13, 4))
    normals = np.linspace(-2.5, 2.5, 101)
    density = np.exp(-0.5 * normals**2)
    density /= density.sum()
    signs = np.sign(_normals(np.arange(26, dtype=np.uint64), salt=3))
    total = 0.0
    for i, law in enumerate(preset.integers):
        zero = missing[i] + (1.0 - missing[i]) * (law.zero + sum(law.below))
        logs = np.append(np.log1p(np.maximum(1.0, np.exp(law.mu + law.sigma * normals))), 0.0)
        weights = np.append(density * (1.0 - zero), zero)
        centre = float(weights @ logs)
        width = float(np.sqrt(weights @ (logs - centre) ** 2))
        t = np.clip((logs - centre) / width, -3, 3)
        slope, bend = signs[2 * i], INTEGER_BEND * signs[2 * i + 1]
        curve = slope * t + bend * t * t
        total += float(weights @ curve**2 - (weights @ curve) ** 2)
        curves[i] = centre, width, slope, bend
    curves[:, 2:] *= np.sqrt(INTEGER_PART * preset.signal / total)
    return curves


def _shrink(shares: Float64, strength: float) -> Float64:
    expected_rows = REFERENCE_ROWS * shares
    return expected_rows / (expected_rows + strength)


def _variance(effects: Float64, shares: Float64, axes: int | tuple[int, ...]) -> float:
    means = (effects * shares).sum(axis=axes)
    return float(((effects**2 * shares).sum(axis=axes) - means**2).sum())


def _normals(numbers: npt.NDArray[np.uint64], salt: int) -> Float64:
    """Near-normal numbers that depend on (number, salt) alone: the sum of four 16-bit uniforms of a hash."""
    with np.errstate(over="ignore"):
        x = (numbers + np.uint64(salt << 40)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    parts = [((x >> np.uint64(16 * j)) & np.uint64(0xFFFF)).astype(np.float64) for j in range(4)]
    return (sum(parts) / 65535.0 - 2.0) * float(np.sqrt(3.0))  # type: ignore[return-value]
