"""Which rows train, validate and test. All rows stay in the dataset, in order; the split is a set of row ranges.

    last-file   the last file validates; of exactly 24 files (the 1TB set) its first half validates, the second tests
    FRACTION    the last FRACTION of all lines validates
    none        every row trains
    unlabeled   rows without labels: all of them are the test split, to be scored by a trained model

The cut of FRACTION is made in lines, which can be counted before rows are parsed. Lines and rows differ by the bad
rows alone. Later rows always validate earlier ones, as in production, and no row is in two splits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from dlrm_scale.data.dataset.dataset import RowRange
from dlrm_scale.errors import ConfigError

__all__ = ["SplitRule", "parse_split_rule", "row_ranges", "training_lines_of_fraction"]

_ONE_FILE_FRACTION = Fraction(1, 7)
_TERABYTE_DAYS = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRule:
    """How rows are split.

    Attributes:
        kind: which rule.
        fraction: part of the lines that validates; 0 unless kind is fraction.
    """

    kind: Literal["last-file", "fraction", "none", "unlabeled"]
    fraction: Fraction = Fraction(0)

    def __str__(self) -> str:
        return str(self.fraction) if self.kind == "fraction" else self.kind


def parse_split_rule(text: str | None, *, files: int, labeled: bool = True) -> SplitRule:
    """Read `--validation`; None means last-file for several files and 1/7 (a day of Kaggle's seven) for one.

    Args:
        text: the option.
        files: files of the whole dataset.
        labeled: whether rows have labels; without them there is nothing to choose.

    Raises:
        ConfigError: the text is no rule, or asks for a last file where there is one file.
    """
    if not labeled:
        if text is not None:
            raise ConfigError(
                "--validation has no meaning with --unlabeled: all rows are the test split", remedy="leave it out"
            )
        return SplitRule(kind="unlabeled")
    if text is None:
        return SplitRule(kind="last-file") if files > 1 else SplitRule(kind="fraction", fraction=_ONE_FILE_FRACTION)
    if text == "none":
        return SplitRule(kind="none")
    if text == "last-file":
        if files == 1:
            raise ConfigError(
                "--validation last-file with a single file leaves no training rows",
                remedy="give a fraction such as 1/7, or none",
            )
        return SplitRule(kind="last-file")
    try:
        fraction = Fraction(text)
    except (ValueError, ZeroDivisionError):
        fraction = Fraction(0)
    if not 0 < fraction < 1:
        raise ConfigError(
            f"--validation {text!r} is not a rule", remedy="give last-file, none, or a fraction as in 0.1 or 1/7"
        )
    return SplitRule(kind="fraction", fraction=fraction)


def training_lines_of_fraction(rule: SplitRule, lines: Sequence[int]) -> list[int]:
    """Return how many lines at the start of each file train.

    Args:
        rule: of kind fraction.
        lines: lines of each file, in order.
    """
    total = sum(lines)
    left = total - int(total * rule.fraction)
    result = []
    for count in lines:
        result.append(min(left, count))
        left -= result[-1]
    return result


def row_ranges(rule: SplitRule, rows: Sequence[int], training_rows: Sequence[int]) -> dict[str, tuple[RowRange, ...]]:
    """Turn rows a file into the ranges of the manifest.

    Args:
        rule: the split.
        rows: rows of each file, in order.
        training_rows: how many of them, from the file's start, train.
    """
    total, train = sum(rows), sum(training_rows)
    middle = total
    if rule.kind == "last-file" and len(rows) == _TERABYTE_DAYS:
        middle = train + (total - train + 1) // 2

    def ranges(start: int, end: int) -> tuple[RowRange, ...]:
        return (RowRange(start=start, end=end),) if start < end else ()

    if rule.kind == "unlabeled":
        middle = train
    return {"train": ranges(0, train), "validation": ranges(train, middle), "test": ranges(middle, total)}
