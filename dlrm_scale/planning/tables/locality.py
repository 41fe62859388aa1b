"""How often rows are used in one batch of Meta's published lookups, the measure of production-like table sets.

The figures are facts from the locality statistics beside Meta's dlrm_datasets (github.com/facebookresearch/
dlrm_datasets): over all tables together, the distinct rows of one batch by how often they are used, and the lookups by
how often their row is. Nothing is published there of single tables but their number.
"""

from dataclasses import dataclass

__all__ = ["TRACES", "USE_EDGES", "Trace"]

USE_EDGES = (0, *(2**k for k in range(16)))
"""Bins of uses: (0, 1], (1, 2], (2, 4], ... (16384, 32768], and more."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One published batch.

    Attributes:
        name: as `--generate` takes it.
        source: the file there, and its year.
        tables: how many.
        batch_size: samples.
        lookups: of all tables.
        unique_rows: distinct rows among them.
        row_shares: `[17]` of the distinct rows, by `USE_EDGES`, three digits.
        lookup_shares: `[17]` of the lookups, likewise.
    """

    name: str
    source: str
    tables: int
    batch_size: int
    lookups: int
    unique_rows: int
    row_shares: tuple[float, ...]
    lookup_shares: tuple[float, ...]

    @property
    def lookups_per_bag(self) -> float:
        """Mean pooling over all tables."""
        return self.lookups / (self.tables * self.batch_size)


TRACES = {
    "production": Trace(
        name="production",
        source="Meta's dlrm_datasets, 2022: fbgemm_t788_bs131072_0.pt",
        tables=788,
        batch_size=131072,
        lookups=1405163864,
        unique_rows=110259238,
        row_shares=(
            *(0.342, 0.144, 0.149, 0.138, 0.112, 0.068, 0.029, 0.010, 0.004, 0.002, 0.001, 0.001),
            *(0.0, 0.0, 0.0, 0.0, 0.0),
        ),
        lookup_shares=(
            *(0.027, 0.023, 0.040, 0.068, 0.105, 0.120, 0.099, 0.070, 0.059, 0.054, 0.040, 0.072),
            *(0.064, 0.047, 0.021, 0.017, 0.076),
        ),
    ),
    "production-2021": Trace(
        name="production-2021",
        source="Meta's dlrm_datasets, 2021: fbgemm_t856_bs65536_0.pt",
        tables=856,
        batch_size=65536,
        lookups=468084223,
        unique_rows=61644628,
        row_shares=(
            *(0.423, 0.165, 0.167, 0.121, 0.073, 0.031, 0.011, 0.004, 0.002, 0.001, 0.001, 0.0),
            *(0.0, 0.0, 0.0, 0.0, 0.0),
        ),
        lookup_shares=(
            *(0.056, 0.043, 0.075, 0.099, 0.112, 0.091, 0.064, 0.052, 0.049, 0.050, 0.054, 0.058),
            *(0.061, 0.052, 0.038, 0.026, 0.020),
        ),
    ),
}
