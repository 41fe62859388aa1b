"""Table sets of public benchmarks by name, each with its source. Their lookups count as even where nothing is known."""

from collections.abc import Sequence

from dlrm_scale.planning.tables.table_set import SparseOptimizer, TableSet, TableStats
from dlrm_scale.schema import CATEGORY_COLUMNS

__all__ = ["BUILT_IN", "built_in_tables"]

_MLPERF_ROWS = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10),
    *(2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
)
_MLPERF_IDS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
_KAGGLE_IDS = (
    *(1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194),
    *(27, 14_992, 5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
)
_TERABYTE_ROWS = (
    *(227_605_432, 39_061, 17_296, 7_425, 20_266, 4, 7_123, 1_544, 64, 130_229_467, 3_067_956, 405_283, 11),
    *(2_209, 11_939, 155, 4, 977, 15, 292_775_614, 40_790_948, 187_188_510, 590_152, 12_974, 109, 37),
)
_CAP = 40_000_000

_SOURCES = {
    "mlperf_dcnv2": (
        "MLPerf Training recommendation_v2 (DLRM-DCNv2): rows with a cap of 40 million, multi-hot sizes; its ids are "
        "drawn evenly"
    ),
    "criteo_kaggle": "distinct values of Criteo's Kaggle set (facebookresearch/dlrm, tools/visualize.py); one id a bag",
    "criteo_terabyte": (
        "Criteo 1TB, all values of 24 days, at most 40 million rows a table (NVIDIA DeepLearningExamples, "
        "generate_feature_spec.py, threshold 0, in the order of the columns); one id a bag"
    ),
    "criteo_terabyte_uncapped": (
        "Criteo 1TB, all values of 24 days (NVIDIA DeepLearningExamples, generate_feature_spec.py, threshold 0, in the "
        "order of the columns); one id a bag"
    ),
}
_DIMS = {"mlperf_dcnv2": 128, "criteo_kaggle": 16, "criteo_terabyte": 128, "criteo_terabyte_uncapped": 128}

BUILT_IN = tuple(_SOURCES)
"""Names that `built_in_tables` knows."""


def built_in_tables(name: str, *, dim: int | None = None, optimizer: SparseOptimizer = "rowwise_adagrad") -> TableSet:
    """Make a table set of `BUILT_IN`.

    Args:
        name: which one.
        dim: of all tables; the benchmark's by default (128, Kaggle 16).
        optimizer: of the set.
    """
    rows: Sequence[int]
    ids: Sequence[int] = (1,) * len(CATEGORY_COLUMNS)
    if name == "mlperf_dcnv2":
        rows, ids = _MLPERF_ROWS, _MLPERF_IDS
    elif name == "criteo_kaggle":
        rows = _KAGGLE_IDS
    else:
        rows = _TERABYTE_ROWS if name.endswith("uncapped") else tuple(min(n, _CAP) for n in _TERABYTE_ROWS)
    tables = tuple(
        TableStats(
            name=column,
            rows=count,
            dim=dim or _DIMS[name],
            lookups_per_sample=float(bag),
            lookups_per_sample_p99=float(bag),
        )
        for column, count, bag in zip(CATEGORY_COLUMNS, rows, ids, strict=True)
    )
    return TableSet(name=name, optimizer=optimizer, tables=tables, source=_SOURCES[name])
