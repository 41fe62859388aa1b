"""A recipe's name or a TOML file, and `section.key=value` overrides, to a checked `Config`."""

import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel

from dlrm_scale.config import Config
from dlrm_scale.errors import ConfigError
from dlrm_scale.recipes.validate import nearest, validate_config

__all__ = ["differing", "load_config", "read_overrides", "recipe_names", "write_config"]


def recipe_names() -> list[str]:
    """Names of the packaged recipes."""
    return sorted(f.name.removesuffix(".toml") for f in files(__package__).iterdir() if f.name.endswith(".toml"))


def load_config(source: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a config and apply overrides.

    Args:
        source: a packaged recipe's name, as in `criteo_kaggle`, or the path of a TOML file.
        overrides: `section.key=value` each, in order; the last one wins.

    Raises:
        ConfigError: an unknown recipe, key or value, named with the nearest spelling and what is allowed.
    """
    values = _read_source(source)
    for path, value in read_overrides(overrides).items():
        _put(values, path, value)
    return validate_config(values, str(source))


def read_overrides(overrides: Sequence[str]) -> dict[str, object]:
    """Parse `section.key=value` into values by path. Text fields take the text as it is, others TOML."""
    parsed: dict[str, object] = {}
    for text in overrides:
        path, equals, raw = text.partition("=")
        path = path.strip()
        if not equals or "." not in path:
            raise ConfigError(f"--set {text!r} is not an override", remedy="write it as --set section.key=value")
        parsed[path] = _parse(path, raw.strip())
    return parsed


def write_config(config: Config, path: Path) -> None:
    """Write the whole resolved config as TOML; `load_config` reads it back equal."""
    with path.open("wb") as f:
        tomli_w.dump(config.model_dump(mode="json"), f)


def _read_source(source: str | Path) -> dict[str, Any]:
    path = Path(source)
    names = recipe_names()
    if str(source) in names:
        return tomllib.loads(files(__package__).joinpath(f"{source}.toml").read_text())
    if not path.is_file():
        hint = nearest(str(source), names)
        raise ConfigError(
            f"no recipe or file {str(source)!r}" + (f"; did you mean {hint!r}?" if hint else ""),
            remedy=f"name one of {', '.join(names)}, or a TOML file",
        )
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _put(values: dict[str, Any], path: str, value: object) -> None:
    *sections, key = path.split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {path}: {section} is a value, not a section")
        values = inner
    values[key] = value


def _parse(path: str, raw: str) -> object:
    if _takes_text(path):
        return raw
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return raw


def _takes_text(path: str) -> bool:
    """Whether the field at `path` takes a string, so that `data.path=2024` needs no quotes."""
    model: type[BaseModel] = Config
    for name in path.split("."):
        field = model.model_fields.get(name)
        if field is None:
            return False
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            model = field.annotation
        else:
            return field.annotation is str
    return False


def differing(old: Config, new: Config) -> Mapping[str, tuple[object, object]]:
    """Values that differ between two configs, by path."""
    before, after = old.model_dump(mode="json"), new.model_dump(mode="json")
    return {
        f"{section}.{key}": (before[section][key], after[section][key])
        for section in before
        for key in before[section]
        if before[section][key] != after[section][key]
    }
