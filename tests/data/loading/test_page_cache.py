"""Files can be dropped from the page cache, and whether they were is looked at, not believed."""

import os
from pathlib import Path

import pytest

from dlrm_scale.data.loading.page_cache import cached_share, drop_cached

_PAGE = os.sysconf("SC_PAGE_SIZE")


def _file(path: Path, pages: int) -> Path:
    path.write_bytes(os.urandom(pages * _PAGE - 100))  # the last page is not full
    return path


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder whose file system forgets what it is told to; tmpfs doesn't."""
    probe = _file(tmp_path / "probe", 4)
    drop_cached([probe])
    if cached_share([probe]) != 0:
        pytest.skip(f"{tmp_path} keeps files in memory")
    return tmp_path


def test_dropped_files_are_not_in_memory_until_they_are_read(disk: Path) -> None:
    first, second = _file(disk / "a", 100), _file(disk / "b", 100)
    assert cached_share([first, second]) == 1
    drop_cached([first])
    assert cached_share([first, second]) == pytest.approx(0.5, abs=0.01)
    first.read_bytes()
    assert cached_share([first, second]) == 1


def test_a_large_file_is_looked_at_in_places(disk: Path) -> None:
    big = _file(disk / "big", 5000)
    drop_cached([big])
    assert cached_share([big]) == 0
    with big.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # without reading ahead
        file.read(2500 * _PAGE)
    assert cached_share([big]) == pytest.approx(0.5, abs=0.02)


def test_files_in_memory_stay_and_are_seen_to_stay() -> None:
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        pytest.skip("no /dev/shm")
    path = shm / f"dlrm-scale-test-{os.getpid()}"
    try:
        _file(path, 10)
        drop_cached([path])
        assert cached_share([path]) == 1
    finally:
        path.unlink(missing_ok=True)


def test_empty_files_have_no_share(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    assert cached_share([empty]) is None
    assert cached_share([]) is None
