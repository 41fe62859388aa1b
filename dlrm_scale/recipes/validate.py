"""Turns pydantic's findings into messages that name the key, what is allowed and the nearest spelling."""

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from dlrm_scale.config import Config
from dlrm_scale.errors import ConfigError

__all__ = ["nearest", "validate_config"]


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like `word`, if one is near."""
    found = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return found[0] if found else None


def validate_config(values: Mapping[str, Any], source: str) -> Config:
    """Check raw values and make the frozen config.

    Args:
        values: sections by name, as TOML gives them.
        source: named in messages.

    Raises:
        ConfigError: with a line for each finding.
    """
    try:
        return Config.model_validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        lines = [_describe(dict(e)) for e in error.errors()]
        raise ConfigError(f"{source}: " + "\n  ".join(lines)) from None


def _describe(error: dict[str, Any]) -> str:
    path = [str(p) for p in error["loc"]]
    key = ".".join(path)
    if error["type"] == "extra_forbidden":
        allowed = sorted(_fields(path[:-1]))
        hint = nearest(path[-1], allowed)
        return f"unknown key {key}" + (f"; did you mean {hint}?" if hint else "") + f" (allowed: {', '.join(allowed)})"
    if error["type"] == "literal_error":
        allowed = [a.strip(" '") for a in error["ctx"]["expected"].replace(" or ", ", ").split(",")]
        hint = nearest(str(error["input"]), allowed)
        return (
            f"{key} = {error['input']!r} is not allowed"
            + (f"; did you mean {hint}?" if hint else "")
            + f" (allowed: {', '.join(allowed)})"
        )
    if error["type"] == "multiple_of":
        step = int(error["ctx"]["multiple_of"])
        below = int(error["input"]) // step * step
        near = f"{below} or {below + step}" if below > 0 else f"{step}"
        return f"{key} = {error['input']}: must be a multiple of {step} (the nearest allowed: {near})"
    return f"{key} = {error['input']!r}: {error['msg']}"


def _fields(path: list[str]) -> list[str]:
    model: type[BaseModel] = Config
    for name in path:
        annotation = model.model_fields[name].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)
