"""How often a run has gone on from rows that a checkpoint had rounded, and when it stops rounding them.

Each restore of encoded rows trains on from slightly other values, so errors add up with restores, not with saves: what
was decoded once and not touched since has the same codes in the next checkpoint. Check-N-Run (NSDI 2022) picks the
width by the restores that a job expects, and finds 8 bits safe beyond 20 of them. Measured on 200,000 and 400,000
generated rows (`tests/train/test_lossy_resume.py`): ten restores from int8 rows raised the logloss by 0.002 to 0.023 %,
with bf16 state by 0.002 to 0.031 %. A learning rate changed by 0.01 % moves it by 0.026 %.
"""

from collections.abc import Sequence

from dlrm_scale.checkpoint.files.manifest import Manifest
from dlrm_scale.config import CheckpointConfig
from dlrm_scale.errors import ConfigError

__all__ = [
    "MOST_RESTORES",
    "check_expected_restores",
    "delta_codecs",
    "encoded_tensors",
    "lossy_restores_after",
    "stored_codecs",
]

MOST_RESTORES = 10
"""Restores from int8 rows that there is evidence for."""

_ROWS = {"fp32": "none", "int8": "int8_rows"}
_STATE = {"fp32": "none", "bf16": "bf16"}


def check_expected_restores(config: CheckpointConfig) -> None:
    """Refuse int8 rows for more restores than there is evidence for.

    Raises:
        ConfigError: they are more.
    """
    if config.delta_rows == "int8" and config.expected_restores > MOST_RESTORES:
        raise ConfigError(
            f"checkpoint.expected_restores = {config.expected_restores} with checkpoint.delta_rows = int8: errors add "
            f"up with restores, and {MOST_RESTORES} (logloss up by 0.002 to 0.03 %) are the most that were measured",
            remedy=f"set checkpoint.delta_rows=fp32, or checkpoint.expected_restores to at most {MOST_RESTORES}",
        )


def lossy_restores_after(manifests: Sequence[Manifest]) -> int:
    """Count the lossy restores of a run that goes on from a chain, this one included.

    Values that were encoded before the last lossy restore were trained on as they are stored: they count no more.
    """
    so_far = manifests[-1].lossy_restores
    return so_far + any(manifest.lossy and manifest.lossy_restores == so_far for manifest in manifests)


def delta_codecs(config: CheckpointConfig, lossy_restores: int) -> tuple[str, str]:
    """Codecs of rows and of state for the deltas of a start.

    Args:
        config: what the user wants.
        lossy_restores: of the run so far. From `expected_restores` on, rows are written as they are.
    """
    rows = "none" if lossy_restores >= config.expected_restores else _ROWS[config.delta_rows]
    return rows, _STATE[config.delta_state]


def encoded_tensors(manifest: Manifest, table: str) -> dict[str, dict[str, object]]:
    """What encoding has lost of a table in one checkpoint: by tensor its codec, encoded and exact rows, and errors.

    Rows of tables that are cut into columns count once for each cut. Tensors that aren't encoded are left out.
    """
    entries = [entry for file in manifest.files for entry in file.entries if entry.table == table]
    found: dict[str, dict[str, object]] = {}
    for name in sorted({name for entry in entries for name, t in entry.tensors.items() if t.error is not None}):
        encoded = [(entry, t, t.error) for entry in entries if (t := entry.tensors[name]).error is not None]
        rows = sum(entry.rows for entry, _, _ in encoded)
        total = sum(error.mean_absolute * entry.rows for entry, _, error in encoded if error is not None)
        found[name] = {
            "codec": encoded[0][1].codec,
            "rows": rows,
            "exact_rows": sum(entry.rows for entry in entries) - rows,
            "max_error": max(error.max_absolute for _, _, error in encoded if error is not None),
            "mean_error": total / rows if rows else 0.0,
        }
    return found


def stored_codecs(manifests: Sequence[Manifest]) -> list[str]:
    """Codecs that tensors of a chain are stored in, other than none, sorted."""
    entries = (entry for m in manifests for f in m.files for entry in f.entries)
    return sorted({t.codec for entry in entries for t in entry.tensors.values() if t.codec != "none"})
