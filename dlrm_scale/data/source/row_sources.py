"""Opens an input file with the reader of its format."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dlrm_scale.data.source.inputs import InputFile
from dlrm_scale.data.source.npy_source import NpySource
from dlrm_scale.data.source.parquet_source import ParquetSource
from dlrm_scale.data.source.row_layout import common_layout
from dlrm_scale.data.source.row_source import RowSource
from dlrm_scale.data.source.text_layout import CRITEO_LAYOUT, TextLayout
from dlrm_scale.data.source.tsv import TextSource

__all__ = ["InputLayout", "ReadOptions", "layout_of", "open_rows"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """How rows are read.

    Attributes:
        layout: of text.
        columns: of Parquet: our column names to the file's.
        given_ids: ids are table rows already and not raw ids.
        max_bad_rows: bad rows that are tolerated; a reader may give up beyond.
    """

    layout: TextLayout = CRITEO_LAYOUT
    columns: Mapping[str, str] = field(default_factory=dict)
    given_ids: bool = False
    max_bad_rows: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class InputLayout:
    """What is known of the input before a row is read.

    Attributes:
        multi_hot: names of the columns with several ids a row.
        gives_features: dense features come ready-made and are taken as they are.
        rows_per_file: rows of each file where the format tells, None for text.
    """

    multi_hot: tuple[str, ...]
    gives_features: bool
    rows_per_file: list[int] | None


def layout_of(files: Sequence[InputFile], options: ReadOptions) -> InputLayout:
    """Return what all files have in common.

    Raises:
        DataError: a file can't be opened, or the files differ.
    """
    if files[0].format == "text":
        return InputLayout(multi_hot=options.layout.multi_hot, gives_features=False, rows_per_file=None)
    layouts = []
    for file in files:
        with open_rows(file, options) as source:
            assert isinstance(source, NpySource | ParquetSource)
            layouts.append(source.layout)
    common = common_layout(layouts)
    return InputLayout(
        multi_hot=common.multi_hot,
        gives_features=common.gives_features,
        rows_per_file=[layout.rows for layout in layouts],
    )


def open_rows(file: InputFile, options: ReadOptions) -> RowSource:
    """Open a file for one pass.

    Raises:
        DataError: the file can't be opened or isn't of its format.
    """
    if file.format == "npy":
        return NpySource(file, ids="given" if options.given_ids else "raw")
    if file.format == "parquet":
        return ParquetSource(file, columns=options.columns, ids="given" if options.given_ids else "raw")
    return TextSource(file.path, options.layout, bad_rows_max=options.max_bad_rows)
