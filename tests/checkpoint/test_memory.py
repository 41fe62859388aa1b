"""Saving and restoring never hold a second copy of the tables."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dlrm_scale.units import MIB

REPOSITORY = Path(__file__).resolve().parents[2]


def _extra_bytes(root: Path, table_mib: int, what: str) -> int:
    command = [sys.executable, "-m", "tests.checkpoint.memory_probe", str(root), str(table_mib), what]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    extra: int = json.loads(done.stdout.splitlines()[-1])["extra_bytes"]
    return extra


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_saving_and_restoring_128_mib_needs_a_few_blocks_more(tmp_path: Path) -> None:
    # Measured: 50 to 57 MiB to save (16 of them staging, the rest row ids, byte maps and blocks of 8), 13 to restore.
    assert _extra_bytes(tmp_path / "ck", 128, "save") < 96 * MIB
    assert _extra_bytes(tmp_path / "ck", 128, "restore") < 48 * MIB


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_encoding_and_decoding_128_mib_needs_a_few_blocks_more(tmp_path: Path) -> None:
    # Measured: 39 MiB to save, of them 16 staging; 10 to restore.
    assert _extra_bytes(tmp_path / "ck", 128, "save-encoded") < 96 * MIB
    assert _extra_bytes(tmp_path / "ck", 128, "restore") < 48 * MIB
