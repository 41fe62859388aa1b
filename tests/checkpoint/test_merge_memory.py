"""A merge takes the memory that it says, however big the chain."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrm_scale.units import GIB, MIB

REPOSITORY = Path(__file__).resolve().parents[2]

PROGRAM_BYTES = 320 * MIB
"""As `merge --help` says. Measured: 303 MiB of imports, and 11 at most of hashes, buffers and what malloc keeps."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc"),
]


def _probe(*words: object) -> str:
    command = [sys.executable, "-m", "tests.checkpoint.merge_memory_probe", *map(str, words)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module", params=[(2, 256, 3), (3, 64, 15)], ids=["big-tables", "many-deltas"])
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("chain")
    _probe(root, "make", *request.param)
    yield root
    for path in root.glob("data/*"):
        path.unlink()  # 1.2 GiB each


def _forget_merges(root: Path) -> None:
    for path in [*root.glob("manifests/*m*.json"), *root.glob("data/*s1m*")]:
        path.unlink()


@pytest.mark.parametrize(("to", "limit"), [("baseline", 1024), ("delta", 1024), ("baseline", 100), ("delta", 100)])
def test_a_chain_of_more_than_a_gib_is_merged_within_what_is_stated_and_allowed(
    root: Path, to: str, limit: int
) -> None:
    found = json.loads(_probe(root, to, limit))
    _forget_merges(root)
    assert found["chain_bytes"] > GIB
    # the stated memory is a bound and no guess: half of it is used at least where it isn't cut by the limit
    allowed_bytes = min(found["stated_bytes"], limit * MIB)
    assert found["before_bytes"] + found["extra_bytes"] <= PROGRAM_BYTES + allowed_bytes
    assert found["extra_bytes"] > allowed_bytes / 2
    assert (found["merges"] > 1) == (found["stated_bytes"] > limit * MIB)
