"""Columns as the command line names them, for `preprocess` and `predict` alike."""

__all__ = ["parse_columns", "parse_mapping"]


def parse_columns(text: str | None) -> tuple[str, ...]:
    """Return the columns that an option names, in the order of the columns; unknown names last."""
    from dlrm_scale.schema import CATEGORY_COLUMNS

    if text is None:
        return ()
    if text.strip().lower() == "all":
        return CATEGORY_COLUMNS
    named = {name.strip() for name in text.split(",") if name.strip()}
    return (*(name for name in CATEGORY_COLUMNS if name in named), *sorted(named - {*CATEGORY_COLUMNS}))


def parse_mapping(option: str, texts: list[str], example: str) -> dict[str, str]:
    """Return the values that a repeatable option gives by name.

    Args:
        option: its name, for messages.
        texts: each NAME=VALUE.
        example: of one, for messages.

    Raises:
        ConfigError: a text lacks a name or a value, or a name comes twice.
    """
    from dlrm_scale.errors import ConfigError

    result: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value) or name in result:
            raise ConfigError(
                f"{option} {text!r}" + (f" names {name} again" if name in result else " lacks a name or a value"),
                remedy=f"write it as {option} {example}, once for each column",
            )
        result[name] = value
    return result
