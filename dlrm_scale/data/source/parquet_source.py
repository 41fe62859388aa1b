"""Rows of a Parquet file, streamed: its columns are ours by name or by a mapping; see `parquet_columns` for the types.

A row group can be as large as the file. Its column chunks are read through buffers and decoded batch by batch, so that
memory doesn't grow with it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dlrm_scale.data.source.bad_rows import BadRow
from dlrm_scale.data.source.columnar_source import ColumnarSource
from dlrm_scale.data.source.inputs import InputFile
from dlrm_scale.data.source.integer_ids import GIVEN_ID_MAX, IdMeaning, id_that_is_no_row
from dlrm_scale.data.source.parquet_columns import (
    Decoded,
    IdKind,
    decode_features,
    decode_ids,
    decode_integers,
    decode_label,
    id_kind,
)
from dlrm_scale.data.source.raw_block import FIRST_CATEGORY_BIT, FIRST_INTEGER_BIT, Bags, RawBlock
from dlrm_scale.errors import ConfigError, DataError
from dlrm_scale.schema import CATEGORY_COLUMNS, INTEGER_COLUMNS, LABEL_COLUMN, RAW_COLUMNS

__all__ = ["ParquetPiece", "ParquetSource"]

_PIECE_ROWS = 8192
# A batch of decoded lists; 8 bytes an id.
_PIECE_IDS_MAX = 8 * 1024 * 1024
# For each of 40 column chunks.
_BUFFER_BYTES = 256 * 1024
_SHOWN_COLUMNS = 60
_FOUND_CHARACTERS_MAX = 40
_KEPT_ROW_BYTES_MAX = 2048
_INTEGERS = len(INTEGER_COLUMNS)
_CATEGORIES = len(CATEGORY_COLUMNS)


@dataclass(frozen=True, slots=True)
class ParquetPiece:
    """Consecutive rows.

    Attributes:
        first_row: number of the first, from 1.
        columns: `RAW_COLUMNS` in their order.
    """

    first_row: int
    columns: Sequence[pa.Array]


class ParquetSource(ColumnarSource):
    """One Parquet file; see `RowSource`.

    Args:
        input_file: of format "parquet".
        columns: maps our names (label, I1..I13, C1..C26) to the file's; names that are left out are the same there.
        ids: whether the ids are raw or rows of tables.

    Attributes:
        path: the file.
        rows: number of rows.
        multi_hot: names of the columns that are lists.
        gives_features: I1..I13 are floating point: ready-made, and no transform is applied again.

    Raises:
        ConfigError: `columns` has a name that isn't ours, or the same column for two of ours.
        DataError: the file can't be opened, is damaged, lacks a column or has one of another type.
    """

    def __init__(
        self, input_file: InputFile, *, columns: Mapping[str, str] | None = None, ids: IdMeaning = "raw"
    ) -> None:
        super().__init__(input_file)
        self._meaning = ids
        self._names = _mapped(columns or {})
        try:
            self._file = pq.ParquetFile(
                self.path, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True
            )
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{self.path}: no readable Parquet file ({_first_line(error)})", remedy="fetch or make the file again"
            ) from error
        try:
            self.rows = self._file.metadata.num_rows
            types = self._types()
            self.gives_features = self._check_numbers(types)
            self._kinds, self.multi_hot = self._check_categories(types)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; harmless when repeated."""
        self._file.close(force=True)

    def _types(self) -> dict[str, pa.DataType]:
        schema = self._file.schema_arrow
        absent = [ours for ours, name in self._names.items() if name not in schema.names]
        if absent:
            wanted = ", ".join(
                ours if self._names[ours] == ours else f"{self._names[ours]} (as {ours})" for ours in absent
            )
            shown = ", ".join(schema.names[:_SHOWN_COLUMNS]) + (", …" if len(schema.names) > _SHOWN_COLUMNS else "")
            raise DataError(
                f"{self.path}: no column {wanted}; its columns are {shown or 'none'}",
                remedy=f"say which column it is: --column {absent[0]}=NAME",
            )
        for name in self._names.values():
            if len(schema.get_all_field_indices(name)) > 1:
                raise DataError(f"{self.path}: two columns are named {name}", remedy="rename one of them")
        return {ours: schema.field(name).type for ours, name in self._names.items()}

    def _describe(self, ours: str) -> str:
        name = self._names[ours]
        return ours if name == ours else f"{name} (as {ours})"

    def _check_numbers(self, types: Mapping[str, pa.DataType]) -> bool:
        """Check the types of label and I1..I13; return whether these are features."""
        label = types[LABEL_COLUMN]
        if not (pa.types.is_integer(label) or pa.types.is_boolean(label) or pa.types.is_floating(label)):
            raise DataError(
                f"{self.path}, column {self._describe(LABEL_COLUMN)}: expected a label of an integer, boolean or "
                f"floating-point type, found {label}",
                remedy="store it as int8",
            )
        floats = [name for name in INTEGER_COLUMNS if pa.types.is_floating(types[name])]
        for name in INTEGER_COLUMNS:
            if not (name in floats or pa.types.is_integer(types[name]) or pa.types.is_null(types[name])):
                raise DataError(
                    f"{self.path}, column {self._describe(name)}: expected integers, or ready-made features of a "
                    f"floating-point type, found {types[name]}",
                    remedy="store it as int32",
                )
        if floats and len(floats) < _INTEGERS:
            whole = next(name for name in INTEGER_COLUMNS if name not in floats)
            raise DataError(
                f"{self.path}: {', '.join(map(self._describe, floats))} are floating point, {self._describe(whole)} is "
                f"{types[whole]}; either all of I1..I13 are integers, or all are ready-made features",
                remedy="store all as integers with null for missing (pandas makes floats of integers with missing "
                "values, unless their type is Int64), or all as float32",
            )
        return bool(floats)

    def _check_categories(self, types: Mapping[str, pa.DataType]) -> tuple[dict[str, IdKind], tuple[str, ...]]:
        kinds: dict[str, IdKind] = {}
        multi_hot = []
        for name in CATEGORY_COLUMNS:
            kind, several = id_kind(types[name])
            if kind is None:
                raise DataError(
                    f"{self.path}, column {self._describe(name)}: expected ids (integers or strings of 8 hexadecimal "
                    f"digits) or lists of them, found {types[name]}",
                    remedy="store the ids as uint32",
                )
            if kind == "text" and self._meaning == "given" and not pa.types.is_null(types[name]):
                raise DataError(
                    f"{self.path}, column {self._describe(name)}: expected rows of a table (--vocabulary given), found "
                    f"{types[name]}",
                    remedy="let --vocabulary frequency, hash or modulo map the ids",
                )
            kinds[name] = kind
            if several:
                multi_hot.append(name)
        return kinds, tuple(multi_hot)

    def _batch_rows(self) -> int:
        """Rows of a batch: fewer where lists are long."""
        metadata = self._file.metadata
        ids_per_row = 1
        for index in range(metadata.num_row_groups):
            group = metadata.row_group(index)
            values = sum(group.column(column).num_values for column in range(group.num_columns))
            ids_per_row = max(ids_per_row, values // max(1, group.num_rows))
        return max(1, min(_PIECE_ROWS, _PIECE_IDS_MAX // ids_per_row))

    def pieces(self) -> Iterator[ParquetPiece]:
        """Yield at most 8,192 rows at a time.

        Raises:
            DataError: the file is cut off or damaged.
        """
        first_row = 1
        try:
            batches = self._file.iter_batches(
                batch_size=self._batch_rows(), columns=list(self._names.values()), use_threads=False
            )
            for batch in batches:
                self._rows_read = first_row - 1 + batch.num_rows
                yield ParquetPiece(first_row, [batch.column(name) for name in self._names.values()])
                first_row += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{self.path}: cut off or damaged after row {first_row - 1:,} ({_first_line(error)})",
                remedy="fetch or make the file again",
            ) from error
        if first_row - 1 != self.rows:
            raise DataError(
                f"{self.path}: {first_row - 1:,} rows could be read, but its footer says {self.rows:,}",
                remedy="fetch or make the file again",
            )

    def parse(self, piece: ParquetPiece) -> RawBlock:
        """Turn a piece into columns.

        Raises:
            DataError: the ids were to be rows of tables and one can't be; or integers with nulls are stored as floats.
        """
        label, *others = piece.columns
        rows = len(label)
        decoded = [decode_label(label)]
        decode = decode_features if self.gives_features else decode_integers
        decoded.extend(decode(column) for column in others[:_INTEGERS])
        for name, column in zip(CATEGORY_COLUMNS, others[_INTEGERS:], strict=True):
            decoded.append(decode_ids(column, self._kinds[name], self._meaning))
            if self._meaning == "given":
                self._refuse_raw_as_given(name, column, decoded[-1], piece.first_row)
        if self.gives_features:
            self._refuse_integers_as_features(piece)
        good = np.ones(rows, np.bool_)
        for column in decoded:
            if column.bad is not None:
                good &= ~column.bad
        kept: npt.NDArray[np.bool_] | slice = slice(None)
        bad_rows: list[BadRow] = []
        if not good.all():
            bad_rows = [self._bad_row(piece, int(row), decoded) for row in np.flatnonzero(~good)]
            kept = good
        return _block(piece.first_row, decoded, kept, bad_rows, self.gives_features)

    def _refuse_integers_as_features(self, piece: ParquetPiece) -> None:
        """Name the usual mistake: pandas makes floats of integers with missing values, and they are raw integers."""
        for name, column in zip(INTEGER_COLUMNS, piece.columns[1:], strict=False):
            if column.null_count == 0:
                continue
            numbers = column.drop_null().to_numpy()
            if np.array_equal(numbers, np.trunc(numbers)):
                raise DataError(
                    f"{self.path}, from row {piece.first_row:,}: column {self._describe(name)} is floating point with "
                    "nulls and whole numbers; floating point is taken for ready-made features, which have no nulls",
                    remedy="store raw integers as such (pandas: astype('Int64')); fill what is missing in features",
                )

    def _refuse_raw_as_given(self, name: str, column: pa.Array, decoded: Decoded, first_row: int) -> None:
        for row in [] if decoded.bad is None else np.flatnonzero(decoded.bad):
            field = column[int(row)].as_py()
            for value in field if isinstance(field, list) else [field]:
                if value is not None and not 0 <= value <= GIVEN_ID_MAX:
                    raise id_that_is_no_row(self.path, first_row + int(row), self._describe(name), value)

    def _bad_row(self, piece: ParquetPiece, row: int, decoded: Sequence[Decoded]) -> BadRow:
        index = next(i for i, column in enumerate(decoded) if column.bad is not None and column.bad[row])
        ours = RAW_COLUMNS[index]
        if ours == LABEL_COLUMN:
            expected = "0 or 1"
        elif ours in INTEGER_COLUMNS:
            expected = (
                "a finite number"
                if self.gives_features
                else "an integer that fits 32 bits (-2147483648 to 2147483647) or null"
            )
        elif self._meaning == "given":
            expected = f"the row of a table, 0 to {GIVEN_ID_MAX}"
        elif self._kinds[ours] == "text":
            expected = "8 hexadecimal digits" + ("" if ours in self.multi_hot else " or null")
        else:
            expected = "an id from 0 to 4294967295" + ("" if ours in self.multi_hot else " or null")
        if ours in self.multi_hot:
            expected += " in every place of the list"
        fields = [_shown(column[row].as_py()) for column in piece.columns]
        found = fields[index] if piece.columns[index][row].is_valid else "null"
        return BadRow(
            path=self.path,
            line=piece.first_row + row,
            column=self._describe(ours),
            expected=expected,
            found=found[:_FOUND_CHARACTERS_MAX] + ("…" if len(found) > _FOUND_CHARACTERS_MAX else ""),
            row="\t".join(fields).encode()[:_KEPT_ROW_BYTES_MAX],
            unit="row",
        )


def _mapped(columns: Mapping[str, str]) -> dict[str, str]:
    for ours in columns:
        if ours not in RAW_COLUMNS:
            raise ConfigError(
                f"--column {ours}={columns[ours]}: no column of ours is named {ours}",
                remedy="write --column OURS=THEIRS with label, I1 to I13 or C1 to C26 as OURS",
            )
    names = {ours: columns.get(ours, ours) for ours in RAW_COLUMNS}
    seen: dict[str, str] = {}
    for ours, name in names.items():
        if name in seen:
            raise ConfigError(
                f"column {name} is to be both {seen[name]} and {ours}",
                remedy="check the --column flags; names that none mentions are those of the file",
            )
        seen[name] = ours
    return names


def _block(
    first_row: int,
    decoded: Sequence[Decoded],
    kept: npt.NDArray[np.bool_] | slice,
    bad_rows: Sequence[BadRow],
    gives_features: bool,
) -> RawBlock:
    labels = decoded[0].values[kept]
    numbers = np.stack([column.values[kept] for column in decoded[1 : 1 + _INTEGERS]])
    categories: npt.NDArray[np.uint32] = np.zeros((_CATEGORIES, len(labels)), np.uint32)
    bags: dict[int, Bags] = {}
    for index, column in enumerate(decoded[FIRST_CATEGORY_BIT:]):
        if column.bags is None:
            categories[index] = column.values[kept]
        else:
            bags[index] = column.bags if isinstance(kept, slice) else _only(column.bags, kept)
    missing: npt.NDArray[np.uint64] = np.zeros(len(labels), np.uint64)
    for bit, column in enumerate(decoded[FIRST_INTEGER_BIT:], FIRST_INTEGER_BIT):
        if column.missing is not None:
            missing |= column.missing[kept].astype(np.uint64) << np.uint64(bit)
    return RawBlock(
        first_line=first_row,
        labels=labels,
        integers=np.zeros((_INTEGERS, 0), np.int32) if gives_features else numbers,
        categories=categories,
        missing=missing,
        bags=bags,
        features=numbers if gives_features else None,
        bad_rows=bad_rows,
    )


def _only(bags: Bags, kept: npt.NDArray[np.bool_]) -> Bags:
    lengths = np.diff(bags.offsets)
    offsets = np.zeros(int(np.count_nonzero(kept)) + 1, np.int32)
    np.cumsum(lengths[kept], out=offsets[1:])
    return Bags(values=bags.values[np.repeat(kept, lengths)], offsets=offsets)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return ",".join("null" if one is None else _shown(one) for one in value)
    return ascii(value.decode("latin-1"))[1:-1] if isinstance(value, bytes) else str(value)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
