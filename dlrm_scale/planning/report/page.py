"""One self-contained HTML page: sections of text, a figure and a table, nothing loaded from anywhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

__all__ = ["Section", "render_page"]


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of a page.

    Attributes:
        title: its heading.
        texts: paragraphs; lines stay lines.
        figure: SVG text, from `figures`; put in as it is.
        header: names of the table's columns.
        rows: its cells.
        words: columns that hold words and begin at the left.
    """

    title: str
    texts: Sequence[str] = ()
    figure: str = ""
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    words: Sequence[int] = (0,)


def render_page(title: str, about: str, sections: Sequence[Section]) -> str:
    """Put a page together; all text is escaped."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files(__package__).joinpath("page.html").read_text())
    return template.render(title=title, about=about, sections=sections)
