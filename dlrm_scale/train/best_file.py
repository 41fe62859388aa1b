"""best.json as text: the record of the best checkpoint and its hash. Imports nothing slow, as commands read it too."""

import hashlib
import json
from collections.abc import Mapping

__all__ = ["best_text", "parse_best"]


def best_text(record: Mapping[str, object]) -> str:
    """The file's content."""
    return json.dumps({**record, "sha256": _digest(record)}, indent=1)


def parse_best(text: bytes) -> dict[str, object]:
    """The record in a file's content; early versions wrote no hash.

    Raises:
        ValueError: it is no JSON object, or its hash doesn't match.
    """
    record = json.loads(text)
    if not isinstance(record, dict):
        raise ValueError("it is no JSON object")
    if "sha256" in record and record.pop("sha256") != _digest(record):
        raise ValueError("its sha256 doesn't match its content")
    return record


def _digest(record: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
