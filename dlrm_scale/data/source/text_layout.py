"""What the fields of a text row are. The default is Criteo's; everything else has to be asked for, never guessed."""

from dataclasses import dataclass
from typing import Literal

from dlrm_scale.errors import ConfigError
from dlrm_scale.schema import CATEGORY_COLUMNS, RAW_COLUMNS

__all__ = ["CRITEO_LAYOUT", "TextLayout"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextLayout:
    """A row's fields and their separator.

    Attributes:
        delimiter: what stands between fields.
        header: the first line of each file names the columns and is skipped.
        id_column: a field before all others names the row and is left out.
        labeled: the label is there.
        decimal_ids: category ids are unsigned decimal numbers and not 8 hexadecimal digits.
        multi_hot: category columns whose fields may hold several ids, joined by commas.
        pad_short_rows: fields that are absent at the end of a row are read as missing.
    """

    delimiter: Literal["tab", "comma"] = "tab"
    header: bool = False
    id_column: bool = False
    labeled: bool = True
    decimal_ids: bool = False
    multi_hot: tuple[str, ...] = ()
    pad_short_rows: bool = False

    def check(self) -> None:
        """Check what contradicts itself.

        Raises:
            ConfigError: a column isn't a category, or lists of ids could not be told from fields.
        """
        for name in self.multi_hot:
            if name not in CATEGORY_COLUMNS:
                raise ConfigError(f"--multi-hot names {name!r}", remedy="name columns C1 to C26 as in C3,C20, or all")
        if self.multi_hot and self.delimiter == "comma":
            raise ConfigError(
                "--multi-hot contradicts --delimiter comma: commas would be between fields and between ids",
                remedy="write the rows with tabs between the fields",
            )

    @property
    def separator(self) -> bytes:
        """The byte between fields."""
        return b"\t" if self.delimiter == "tab" else b","

    @property
    def separator_name(self) -> str:
        """How messages call it."""
        return "tab-separated" if self.delimiter == "tab" else "comma-separated"

    @property
    def first_column(self) -> int:
        """Index in `RAW_COLUMNS` of the first field (after the row's id)."""
        return 0 if self.labeled else 1

    @property
    def fields(self) -> int:
        """Fields of a whole row, the row's id included."""
        return len(RAW_COLUMNS) - self.first_column + self.id_column

    def field_index(self, column: int) -> int:
        """Return which field of a row holds raw column `column`."""
        return column - self.first_column + self.id_column

    @property
    def multi_hot_mask(self) -> int:
        """Bit k is set where category column k may hold several ids."""
        return sum(1 << CATEGORY_COLUMNS.index(name) for name in self.multi_hot)


CRITEO_LAYOUT = TextLayout()
"""Label, I1 to I13 and C1 to C26 between tabs, without a header."""
