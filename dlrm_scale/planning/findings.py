"""What pydantic found wrong with a file of the planner: place, key, rule and the nearest spelling, a line each."""

import unicodedata
from collections.abc import Callable, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from dlrm_scale.recipes.validate import nearest

__all__ = ["check_name", "findings", "shortened"]

_MOST = 10
"""A file that is wrong everywhere needn't be told in full."""
_LONGEST = 40
"""Characters of a value in a message: a number may have 4,300 digits."""
_UNSEEN = ("Cc", "Cs", "Zl", "Zp")
"""Unicode's control characters, halves of characters, and separators of lines and paragraphs."""


def findings(
    error: ValidationError,
    record: type[BaseModel],
    place: Callable[[Sequence[int | str]], str] = lambda path: "",
    rest: Sequence[str] = (),
) -> str:
    """Describe all findings, one a line.

    Args:
        error: what pydantic raised for `record`.
        record: the type of the whole file.
        place: turns the path of a finding into what is put before it, as in "table C1: ".
        rest: keys that the file may have at its top beside the record's.
    """
    errors: list[dict[str, Any]] = [dict(e) for e in error.errors()]
    # An item that is refused is also missing from its list.
    followed = [e for e in errors if e["type"] == "too_short" and any(_inside(o["loc"], e["loc"]) for o in errors)]
    found = [_describe(e, record, place, rest) for e in errors if e not in followed]
    more = [f"and {len(found) - _MOST} more"] if len(found) > _MOST else []
    return "\n  ".join([*found[:_MOST], *more])


def shortened(value: object) -> str:
    """Write a value as Python does, the middle left out where it is long."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 10]}… ({len(text):,} characters)"


def check_name(name: str) -> str:
    """Return a name that can be printed on one line, as names are in messages, tables and on pages.

    Raises:
        ValueError: a newline or another control character.
    """
    for place, character in enumerate(name, 1):
        if unicodedata.category(character) in _UNSEEN:
            raise ValueError(f"character {place} is the control character {character!a}; names are of one line")
    return name


def _describe(
    error: dict[str, Any],
    record: type[BaseModel],
    place: Callable[[Sequence[int | str]], str],
    rest: Sequence[str],
) -> str:
    path = error["loc"]
    before = place(path)
    names = [str(p) for p in path if isinstance(p, str)]
    key = names[-1] if names else ""
    if error["type"] == "extra_forbidden":
        allowed = sorted({*_keys(record, path[:-1]), *(rest if len(path) == 1 else ())})
        hint = nearest(key, allowed)
        return (
            f"{before}unknown key {key!r}"
            + (f"; did you mean {hint}?" if hint else "")
            + f" (allowed: {', '.join(allowed)})"
        )
    if error["type"] == "missing":
        return f"{before}{key} is absent"
    if error["type"] == "too_short":
        return (
            f"{before}{key} has {error['ctx']['actual_length']} entries; at least {error['ctx']['min_length']} needed"
        )
    if error["type"] == "literal_error":
        allowed = [a.strip(" '") for a in error["ctx"]["expected"].replace(" or ", ", ").split(",")]
        hint = nearest(str(error["input"]), allowed)
        return (
            f"{before}{key} = {shortened(error['input'])} is not allowed"
            + (f"; did you mean {hint}?" if hint else "")
            + f" (allowed: {', '.join(allowed)})"
        )
    said = error["msg"].removeprefix("Value error, ")
    # Rules on a whole record name their keys themselves.
    whole = isinstance(error["input"], dict | BaseModel | list | tuple)
    return f"{before}{said}" if whole else f"{before}{key} = {shortened(error['input'])}: {said}"


def _inside(path: Sequence[int | str], outer: Sequence[int | str]) -> bool:
    return len(path) > len(outer) and tuple(path[: len(outer)]) == tuple(outer)


def _keys(record: type[BaseModel], path: Sequence[int | str]) -> list[str]:
    for step in path:
        if isinstance(step, str):
            found = _record_in(record.model_fields[step].annotation) if step in record.model_fields else None
            if found is None:
                return []
            record = found
    return list(record.model_fields)


def _record_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in get_args(annotation) if (found := _record_in(inner)) is not None), None)
