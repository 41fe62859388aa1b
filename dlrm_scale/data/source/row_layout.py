"""What the files of one command must have in common, told before a row is read."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dlrm_scale.errors import DataError

__all__ = ["RowLayout", "common_layout"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLayout:
    """How one input gives its rows.

    Attributes:
        path: the file that messages name.
        rows: number of its rows.
        multi_hot: names of the category columns with several ids a row, in the order of the columns.
        gives_features: dense features come ready-made (`RawBlock.features`); otherwise as integers.
    """

    path: Path
    rows: int
    multi_hot: tuple[str, ...]
    gives_features: bool


def common_layout(layouts: Sequence[RowLayout]) -> RowLayout:
    """Check that all inputs give the same kind of rows.

    Args:
        layouts: at least one.

    Returns:
        The first one's, with the rows of all.

    Raises:
        DataError: one differs from most others (of two, the second from the first); names it.
    """
    kinds = [(layout.multi_hot, layout.gives_features) for layout in layouts]
    usual = Counter(kinds).most_common(1)[0][0]
    like = layouts[kinds.index(usual)]
    for layout, kind in zip(layouts, kinds, strict=True):
        if kind == usual:
            continue
        if layout.gives_features != like.gives_features:
            what = "{} has I1..I13 as ready-made features (floating point) and {} as integers"
            first, second = (layout, like) if layout.gives_features else (like, layout)
            message = what.format(first.path, second.path)
        else:
            message = (
                f"{layout.path} has {_several(layout.multi_hot)}, unlike {like.path} with {_several(like.multi_hot)}"
            )
        raise DataError(
            f"{message}; the files of one dataset must agree",
            remedy=f"make {layout.path} like the others, or preprocess it into a dataset of its own",
        )
    first_layout = layouts[0]
    return RowLayout(
        path=first_layout.path,
        rows=sum(layout.rows for layout in layouts),
        multi_hot=first_layout.multi_hot,
        gives_features=first_layout.gives_features,
    )


def _several(names: Sequence[str]) -> str:
    return f"several ids a row in {', '.join(names)}" if names else "one id a row in every column"
