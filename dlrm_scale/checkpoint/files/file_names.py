"""Names of a root's files. Who wrote what is in the names, so that no program takes another's files for its own.

    data/<seq>-s<start>a<attempt>-r<rank>.safetensors       a trainer's rows of one rank
    data/<seq>-s<start>a<attempt>-dense.safetensors         its dense tensors
    manifests/<seq>-s<start>.json                           its commit
    manifests/.<seq>-s<start>a<attempt>.tmp                 before it
    starts/<start>.json                                     its claim
    FORMAT, starts/.FORMAT-<random>.tmp                     the version, and before it

A merge writes under the sequence number and start of the checkpoint that its result is equal to, with its own random
number in place of the attempt. So it uses up no sequence number, and its names are no trainer's:

    data/<seq>-s<start>m<number>-r<rank>.safetensors
    manifests/<seq>-s<start>m<number>.json
    manifests/.<seq>-s<start>m<number>.tmp
"""

import re

__all__ = [
    "DATA_PATTERN",
    "MANIFEST_PATTERN",
    "checkpoint_name",
    "manifest_name",
    "merge_number",
    "merged_name",
    "parse_data_name",
    "parse_manifest_name",
    "parse_temporary_name",
]

DATA_PATTERN = r"data/([0-9]{8,})-s([0-9]+)[am]([0-9]+)-(r[0-9]+|dense)\.safetensors"
"""Of any data file: sequence number, start, attempt or merge number, and what it holds."""

MANIFEST_PATTERN = r"manifests/([0-9]{8,})-s([0-9]+)\.json"
"""Of a trainer's manifest, by which checkpoints are known: sequence number and start."""

_TRAINER_DATA = re.compile(DATA_PATTERN.replace("[am]", "a"))
_ANY_MANIFEST = re.compile(MANIFEST_PATTERN.replace(r"\.json", r"(?:m[0-9]+)?\.json"))
_TEMPORARY_NAME = re.compile(r"manifests/\.([0-9]{8,})-s([0-9]+)a[0-9]+\.tmp")
_MERGE_NAME = re.compile(r"(?:data/|manifests/\.?)[0-9]{8,}-s[0-9]+m([0-9]+)(?:\.json|\.tmp|-.*\.safetensors)")


def manifest_name(seq: int, start: int) -> str:
    """Name of the manifest with sequence number `seq` of trainer start `start`."""
    return f"manifests/{seq:08d}-s{start}.json"


def merged_name(seq: int, start: int, number: int) -> str:
    """Name of the manifest of a merge."""
    return f"manifests/{seq:08d}-s{start}m{number}.json"


def parse_manifest_name(name: str) -> tuple[int, int] | None:
    """Sequence number and start in the name of a manifest, a merge's too; None for any other file."""
    return _numbers(_ANY_MANIFEST, name)


def checkpoint_name(name: str) -> str | None:
    """The trainer's manifest that stands for the same checkpoint as `name`; None if that is no manifest."""
    numbers = parse_manifest_name(name)
    return manifest_name(*numbers) if numbers else None


def merge_number(name: str) -> int | None:
    """Number of the merge that wrote a file, by the file's name; None for any other file."""
    match = _MERGE_NAME.fullmatch(name)
    return int(match[1]) if match else None


def parse_temporary_name(name: str) -> tuple[int, int] | None:
    """Sequence number and start in the name of a trainer's uncommitted manifest; None for any other file."""
    return _numbers(_TEMPORARY_NAME, name)


def parse_data_name(name: str) -> tuple[int, int] | None:
    """Sequence number and start in the name of a trainer's data file; None for any other file."""
    return _numbers(_TRAINER_DATA, name)


def _numbers(pattern: re.Pattern[str], name: str) -> tuple[int, int] | None:
    match = pattern.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None
