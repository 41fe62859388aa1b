"""What the columns of the two public Criteo sets look like, as numbers: the facts behind the synthetic rows.

Cardinalities and row counts are published (facebookresearch/dlrm and NVIDIA's DeepLearningExamples list the ids of each
column before any threshold). Missing rates, shares of the commonest id, laws of the other ids and of the integers are
fitted to small samples of both sets; no row of either set is in here.
"""

from dataclasses import dataclass, replace

from dlrm_scale.errors import ConfigError

__all__ = ["PRESETS", "CategoryLaw", "IntegerLaw", "Preset", "scaled"]

UNSCALED_IDS = 1000
"""Columns of up to this many ids keep them all under any scale: a sample of a set sees nearly all of a small column."""
FRESH_FROM_IDS = 50_000
"""Columns of at least this many published ids get ids that appear on one day only."""
FRESH_RATE = 0.03
"""Share of such a column's values that is new on its day; two heads of 1TB days, 11 days apart, bound it by 0.3."""
FRESH_POOL_DIVISOR = 20
"""A day's fresh ids are one in so many of the column's ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CategoryLaw:
    """How the values of one category column are drawn.

    With probability `top` the value is rank 0, else rank r of 1..ids-1 with probability proportional to
    `(r + shift) ** -exponent` (Zipf-Mandelbrot), or, with probability `fresh_rate` before both, one of `fresh_ids` ids
    that belong to the day.
    """

    ids: int
    top: float
    exponent: float
    shift: float
    fresh_rate: float = 0.0
    fresh_ids: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class IntegerLaw:
    """How the present values of one integer column are drawn.

    -3, -2, -1 and 0 have probabilities `below` and `zero`; the rest is `floor(exp(mu + sigma * normal))`, held in
    [1, `highest`].
    """

    below: tuple[float, float, float]
    zero: float
    mu: float
    sigma: float
    highest: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """One of the public sets.

    Attributes:
        name: `kaggle` or `terabyte`.
        rows: published number of labelled rows, all days together.
        click_rate: published share of label 1.
        integers: I1..I13.
        categories: C1..C26.
        missing_groups: columns that are empty in the same rows (I1..I13 are 0..12, C1..C26 are 13..38) and how often.
        pairs: category columns (0..25) of few ids whose pairs have an effect of their own in the planted model.
        signal: variance of the planted logit; sets the attainable AUC, which is higher where clicks are rarer.
    """

    name: str
    rows: int
    click_rate: float
    integers: tuple[IntegerLaw, ...]
    categories: tuple[CategoryLaw, ...]
    missing_groups: tuple[tuple[tuple[int, ...], float], ...]
    pairs: tuple[tuple[int, int], ...]
    signal: float


def scaled(preset: Preset, scale: float) -> Preset:
    """Shrink or grow the columns of more than 1,000 ids to `scale` times their published number, at least 1,000.

    Raises:
        ConfigError: `scale` isn't in (0, 10].
    """
    if not 0 < scale <= 10:
        raise ConfigError(
            f"the cardinality scale is {scale:g}; it must be above 0 and at most 10",
            remedy="give --scale a number such as 0.02 (2 % of the published ids) or 1",
        )
    return replace(preset, categories=tuple(_scaled_law(law, scale) for law in preset.categories))


def _scaled_law(law: CategoryLaw, scale: float) -> CategoryLaw:
    ids = law.ids if law.ids <= UNSCALED_IDS else max(UNSCALED_IDS, round(law.ids * scale))
    if law.ids < FRESH_FROM_IDS:
        return replace(law, ids=ids)
    return replace(law, ids=ids, fresh_rate=FRESH_RATE, fresh_ids=max(1, ids // FRESH_POOL_DIVISOR))


def _categories(rows: tuple[tuple[int, float, float, float], ...]) -> tuple[CategoryLaw, ...]:
    return tuple(CategoryLaw(ids=ids, top=top, exponent=exponent, shift=shift) for ids, top, exponent, shift in rows)


def _integers(rows: tuple[tuple[float, float, float, int], ...]) -> tuple[IntegerLaw, ...]:
    return tuple(
        IntegerLaw(below=(0.0, 0.0, 0.0), zero=zero, mu=mu, sigma=sigma, highest=10 * largest_seen)
        for zero, mu, sigma, largest_seen in rows
    )


def _named(names: str) -> tuple[int, ...]:
    return tuple(int(name[1:]) - 1 + (0 if name[0] == "I" else 13) for name in names.split())


def _groups(rates: dict[str, float]) -> tuple[tuple[tuple[int, ...], float], ...]:
    return tuple((_named(names), rate) for names, rate in rates.items())


def _pairs(names: str) -> tuple[tuple[int, int], ...]:
    columns = [position - 13 for position in _named(names)]
    return tuple(zip(columns[::2], columns[1::2], strict=True))


# Columns of (ids, share of the commonest id, exponent, shift), in the natural order C1..C26.
_KAGGLE_CATEGORIES = _categories(
    (
        (1460, 0.5012, 1.900, 0.54),
        (583, 0.1223, 2.164, 20.51),
        (10131227, 0.0436, 1.013, 1.71),
        (2202608, 0.0560, 1.071, 1.79),
        (305, 0.6818, 2.284, 0.11),
        (24, 0.4695, 3.500, -0.49),
        (12517, 0.0171, 1.013, 16.14),
        (633, 0.5976, 2.192, 0.51),
        (3, 0.8937, 3.500, 0.50),
        (93145, 0.2355, 1.136, 18.10),
        (5683, 0.0256, 1.101, 13.21),
        (8351593, 0.0436, 1.032, 1.77),
        (3194, 0.0256, 1.078, 10.27),
        (27, 0.3444, 2.751, -0.08),
        (14992, 0.0210, 1.414, 37.92),
        (5461306, 0.0436, 1.072, 3.52),
        (10, 0.4501, 1.100, 0.50),
        (5652, 0.0607, 1.610, 23.35),
        (2173, 0.5462, 1.309, 5.40),
        (4, 0.3642, 1.100, 0.50),
        (7046547, 0.0436, 1.053, 2.60),
        (18, 0.5996, 3.500, -0.30),
        (15, 0.4248, 3.351, -0.25),
        (286181, 0.0717, 1.157, 0.82),
        (105, 0.2328, 3.500, 2.70),
        (142572, 0.0957, 1.106, 3.06),
    )
)
_TERABYTE_CATEGORIES = _categories(
    (
        (227605432, 0.2680, 1.160, -0.45),
        (39061, 0.0966, 1.330, 4.59),
        (17296, 0.0389, 1.166, 10.45),
        (7425, 0.2903, 1.486, 1.25),
        (20266, 0.2033, 1.287, 0.95),
        (4, 0.8782, 3.500, 0.50),
        (7123, 0.0446, 1.276, 12.47),
        (1544, 0.1011, 1.813, 5.94),
        (64, 0.5238, 3.220, -0.19),
        (130229467, 0.2680, 1.169, -0.44),
        (3067956, 0.2681, 1.268, -0.43),
        (405283, 0.2670, 1.374, 69.60),
        (11, 0.3286, 1.764, 0.17),
        (2209, 0.7472, 1.254, 0.86),
        (11939, 0.0966, 1.493, 5.11),
        (155, 0.7536, 2.543, 0.01),
        (4, 0.7379, 3.500, 0.50),
        (977, 0.5080, 1.927, 0.52),
        (15, 0.5338, 3.500, -0.36),
        (292775614, 0.2680, 1.159, -0.45),
        (40790948, 0.2680, 1.202, -0.43),
        (187188510, 0.2680, 1.162, -0.45),
        (590152, 0.4894, 1.121, 0.47),
        (12974, 0.0392, 1.327, 17.71),
        (109, 0.5242, 2.903, -0.11),
        (37, 0.3659, 3.064, -0.15),
    )
)

# Columns of (share of zero, mu, sigma, largest value in the sample), in the order I1..I13.
_KAGGLE_INTEGERS = _integers(
    (
        (0.4687, 1.59, 0.96, 173),
        (0.1750, 2.69, 2.08, 7864),
        (0.0057, 2.54, 1.35, 21636),
        (0.0566, 1.75, 0.89, 166),
        (0.0168, 6.99, 2.43, 1581979),
        (0.0656, 3.57, 1.62, 5139),
        (0.2453, 2.50, 1.16, 1658),
        (0.1194, 2.18, 1.00, 756),
        (0.0325, 3.60, 1.54, 7463),
        (0.5071, 0.30, 0.42, 7),
        (0.2555, 0.84, 1.01, 79),
        (0.7448, 1.43, 0.79, 98),
        (0.0579, 1.88, 1.11, 773),
    )
)
_TERABYTE_INTEGERS = _integers(
    (
        (0.0, 2.42, 1.32, 9382),
        (0.0, 4.78, 1.55, 7969),
        (0.1006, 1.46, 1.00, 129),
        (0.0408, 3.75, 1.61, 14285),
        (0.0, 2.35, 1.29, 2547),
        (0.8124, 0.97, 1.29, 222),
        (0.9608, 0.18, 1.11, 29),
        (0.1576, 3.19, 1.81, 4851),
        (0.2112, 2.04, 0.79, 59),
        (0.8266, 0.37, 0.34, 5),
        (0.0, 1.45, 0.78, 108),
        (0.0090, 7.26, 2.40, 1293837),
        (0.0379, 1.92, 0.94, 362),
    )
)


def _with_below(laws: tuple[IntegerLaw, ...], column: int, below: tuple[float, float, float]) -> tuple[IntegerLaw, ...]:
    return (*laws[:column], replace(laws[column], below=below), *laws[column + 1 :])


PRESETS: dict[str, Preset] = {
    "kaggle": Preset(
        name="kaggle",
        rows=45_840_617,
        click_rate=0.256,
        # Only I2 is negative: -1 in 13 %, -2 in 0.1 % of the sample; the full set has a -3, whose rate is a guess.
        integers=_with_below(_KAGGLE_INTEGERS, 1, (1e-5, 0.0009, 0.129)),
        categories=_KAGGLE_CATEGORIES,
        missing_groups=_groups(
            {
                "I1 I10": 0.436,
                "I3": 0.227,
                "I4 I13": 0.247,
                "I5": 0.038,
                "I6": 0.236,
                "I7 I9 I11": 0.044,
                "I8": 0.001,
                "I12": 0.766,
                "C3 C4 C12 C16 C21 C24": 0.034,
                "C6": 0.134,
                "C19 C20 C25 C26": 0.459,
                "C22": 0.773,
            }
        ),
        pairs=_pairs("C6 C17  C14 C23  C17 C20  C1 C23  C5 C14  C6 C8"),
        signal=1.85,
    ),
    "terabyte": Preset(
        name="terabyte",
        rows=4_373_472_329,
        click_rate=0.033,
        integers=_with_below(_TERABYTE_INTEGERS, 7, (0.0, 0.0, 0.0599)),
        categories=_TERABYTE_CATEGORIES,
        missing_groups=_groups(
            {
                "I1": 0.239,
                "I2": 0.102,
                "I3 I13": 0.254,
                "I4": 0.493,
                "I5 I11": 0.465,
                "I6 I10": 0.092,
                "I7": 0.032,
                "I12": 0.016,
                "C1 C10 C11 C20 C21 C22": 0.026,
                "C14 C16 C17 C23": 0.467,
            }
        ),
        pairs=_pairs("C13 C26  C9 C19  C4 C13  C19 C25  C26 C9  C18 C25"),
        signal=1.6,
    ),
}
