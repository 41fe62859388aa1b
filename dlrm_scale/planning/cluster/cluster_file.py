"""Clusters as TOML files that people write by hand and `calibrate` writes, ready-made ones included.

```
name = "mine"
device = "cuda"
hosts = 2
ranks_per_host = 8
memory_bytes = 85_899_345_920
memory_source = "data sheet"

[links]
start_ms = {value = 0.0066, source = "..."}
...
```
Keys are those of `Cluster`; every constant has its source beside it, and every section says its units in a comment.
"""

import json
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dlrm_scale.errors import ConfigError
from dlrm_scale.planning.cluster.cluster import Cluster
from dlrm_scale.planning.findings import findings
from dlrm_scale.planning.text_file import check_new, read_values, value_text, write_text
from dlrm_scale.recipes.validate import nearest

__all__ = ["check_cluster_path", "cluster_names", "format_cluster", "load_cluster", "save_cluster"]

_FORMAT_VERSION = 1
_UNITS = {
    "forward": (
        "Milliseconds of the pooled lookup. call_ms: a call; table_ms: a table; all others: per million",
        "of ids (lookup), ids x columns (element), distinct rows of the global batch (unique_row), their values",
        "(unique_element), values of pooled vectors (output_element).",
    ),
    "backward": ("Milliseconds of the fused update, per million but for call_ms and table_ms, as in [forward].",),
    "input": (
        "Milliseconds of the exchange of ids, beside its all-to-all. call_ms: a sharding type in use; all others:",
        "per million of ids (value, bucketize) or bags (bag).",
    ),
    "replicas": ("Milliseconds of data-parallel tables. call_ms: a step; element_ms: per million of their values.",),
    "dense": (
        "Milliseconds of the dense part. call_ms: a step; gflop: per 10^9 floating-point operations; vector and",
        "parameter: per million values of pooled vectors, and per million parameters.",
    ),
    "links": ("What collectives that weren't measured are computed from. start_ms: milliseconds of any collective.",),
    "links.host": (
        "Between ranks of a host. gigabytes_per_second: 10^9 bytes a second of one rank in one direction; efficiency:",
        "the share of it that is reached; step_ms and message_ms: milliseconds of a ring's step and of a message.",
    ),
    "links.network": ("Between hosts. Units as in [links.host].",),
    "type_ms": ("Milliseconds of a step as soon as one table is of the type.",),
    "fit_error": ("Mean relative error of each fit: 0.1 is 10 %.",),
}
_REMEDY = (
    "mend it there; the keys are explained in dlrm_scale/planning/cluster/cluster.py, and `dlrm-scale calibrate` "
    "writes whole files"
)


def cluster_names() -> list[str]:
    """Names of the ready-made clusters."""
    return sorted(f.name.removesuffix(".toml") for f in files(__package__).iterdir() if f.name.endswith(".toml"))


def load_cluster(source: str | Path) -> Cluster:
    """Read a cluster.

    Args:
        source: a ready-made cluster's name, as in `a100x8`, or the path of a TOML file.

    Raises:
        ConfigError: no such cluster or file, no TOML, or keys that are absent, unknown or out of range, each named with
            its rule.
    """
    names = cluster_names()
    if str(source) in names:
        with as_file(files(__package__).joinpath(f"{source}.toml")) as path:
            return _read(path, str(source))
    path = Path(source)
    if not path.is_file():
        hint = nearest(str(source), names)
        raise ConfigError(
            f"no cluster or file {str(source)!r}" + (f"; did you mean {hint!r}?" if hint else ""),
            remedy=f"name one of {', '.join(names)}, or a file that `dlrm-scale calibrate -o FILE` wrote",
        )
    _check_suffix(path)
    return _read(path, str(path))


def check_cluster_path(path: Path, *, force: bool) -> None:
    """Refuse, before long work, what `save_cluster` would refuse after it.

    Raises:
        ConfigError: as `save_cluster`.
    """
    _check_suffix(path)
    check_new(path, force=force)


def save_cluster(cluster: Cluster, path: Path, *, force: bool = False) -> None:
    """Write a cluster as TOML; `load_cluster` reads it back equal, and equal clusters give equal bytes.

    Args:
        cluster: what to write.
        path: ends in .toml.
        force: replace a file that exists.

    Raises:
        ConfigError: it exists, its name has another ending, or it can't be written.
    """
    _check_suffix(path)
    write_text(path, format_cluster(cluster), force=force)


def format_cluster(cluster: Cluster) -> str:
    """Return the text of a cluster file: one constant a line, with its source."""
    values = cluster.model_dump(mode="json", exclude_none=True)
    collectives = values.pop("collectives")
    lines = [f"format_version = {_FORMAT_VERSION}"]
    sections = {key: value for key, value in values.items() if isinstance(value, dict)}
    lines += [f"{key} = {value_text(value)}" for key, value in values.items() if key not in sections]
    for name, section in sections.items():
        if section:
            lines += _section(name, section)
    for costs in collectives:
        curve = costs.pop("curve")
        lines += ["", "[[collectives]]", *(f"{key} = {value_text(value)}" for key, value in costs.items())]
        lines += ["[collectives.curve]", f"source = {value_text(curve['source'])}"]
        lines += ["points = [  # bytes, milliseconds"]
        lines += [*(f"  [{size}, {value_text(time)}]," for size, time in curve["points"]), "]"]
    return "\n".join(lines) + "\n"


def _section(name: str, section: dict[str, Any]) -> list[str]:
    lines = ["", f"[{name}]", *(f"# {line}" for line in _UNITS.get(name, ()))]
    inner = {key: value for key, value in section.items() if isinstance(value, dict) and "source" not in value}
    for key, value in section.items():
        if key not in inner:
            is_constant = isinstance(value, dict)
            lines.append(f"{key} = {_inline(value) if is_constant else value_text(value)}")
    for key, value in inner.items():
        lines += _section(f"{name}.{key}", value)
    return lines


def _inline(constant: dict[str, Any]) -> str:
    return f"{{value = {value_text(constant['value'])}, source = {value_text(constant['source'])}}}"


def _check_suffix(path: Path) -> None:
    if path.suffix != ".toml":
        raise ConfigError(f"{path}: a cluster file ends in .toml", remedy=f"name it {path.stem}.toml")


def _read(path: Path, shown: str) -> Cluster:
    values = read_values(path)
    version = values.pop("format_version", _FORMAT_VERSION)
    if version != _FORMAT_VERSION:
        raise ConfigError(
            f"{shown}: format_version = {version!r}; this dlrm-scale reads {_FORMAT_VERSION}",
            remedy="write it again with `dlrm-scale calibrate`, or install another dlrm-scale",
        )
    try:
        return Cluster.model_validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        told = findings(error, Cluster, _place, rest=("format_version",))
        raise ConfigError(f"{shown}: {told}", remedy=_REMEDY) from None


def _place(path: Sequence[int | str]) -> str:
    """Name the section before a key: `links.host: `, `collectives number 3, curve: `."""
    outer = path[:-1] if path and isinstance(path[-1], str) else path
    named = "".join(f" number {step + 1}," if isinstance(step, int) else f".{step}" for step in outer)
    named = named.removeprefix(".").replace(",.", ", ").rstrip(",")
    return f"{named}: " if named else ""
