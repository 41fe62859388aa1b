"""Counting ids in bounded memory: the sums are those of a slow count, whatever was spilled, when and by whom."""

import os
import resource
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_scale.data.source.raw_block import FIRST_CATEGORY_BIT
from dlrm_scale.data.vocabulary import count_file, id_counts
from dlrm_scale.data.vocabulary.count_runs import CountChunk, MemoryRun, merged_runs, packed_entries
from dlrm_scale.data.vocabulary.id_counts import FileIdCounts
from dlrm_scale.data.vocabulary.id_hash import id_hashes
from dlrm_scale.data.vocabulary.merged_counts import MergedCounts
from dlrm_scale.data.vocabulary.vocabulary import frequency_vocabulary
from dlrm_scale.data.vocabulary.vocabulary_file import save_vocabulary, vocabulary_file
from dlrm_scale.errors import DatasetError
from dlrm_scale.units import GIB, KIB, MIB

TINY = 64 * KIB
AMPLE = 256 * MIB

Ids = npt.NDArray[np.uint32]


def _ids(seed: int, rows: int) -> Ids:
    random = np.random.default_rng(seed)
    ids = np.concatenate(
        [random.integers(0, 2**32, rows // 2, np.uint32), (random.zipf(1.3, rows // 2) % 2**32).astype(np.uint32)]
    )
    random.shuffle(ids)
    return ids


def _count(path: Path, ids: Ids, *, memory_bytes: int, column: int = 2, block: int = 8192) -> Path:
    with FileIdCounts(path, memory_bytes=memory_bytes) as counts:
        for start in range(0, len(ids), block):
            counts.add_ids(column, ids[start : start + block])
        counts.close()
    return path


def _check_order(chunks: Iterable[CountChunk]) -> dict[int, int]:
    """Return the counts, having checked that ids come once and in hash order."""
    parts = list(chunks)
    ids = np.concatenate([np.empty(0, np.uint32), *(ids for ids, _ in parts)])
    counts = np.concatenate([np.empty(0, np.int64), *(counts for _, counts in parts)])
    assert (ids.dtype, counts.dtype) == (np.uint32, np.int64)
    hashes = id_hashes(ids)
    assert np.all(hashes[1:] > hashes[:-1])
    return dict(zip(ids.tolist(), counts.tolist(), strict=True))


@pytest.mark.parametrize("memory_bytes", [TINY, 2 * MIB, AMPLE])
def test_counts_of_several_files_equal_a_slow_count(tmp_path: Path, memory_bytes: int) -> None:
    files = [_ids(seed, 200_000) for seed in range(3)]
    paths = [
        _count(tmp_path / f"counts-{index}", ids, memory_bytes=memory_bytes, block=17_000 + index)
        for index, ids in enumerate(files)
    ]
    merged = MergedCounts(paths, 2, memory_bytes=memory_bytes)
    expected = Counter(np.concatenate(files).tolist())
    assert _check_order(merged) == expected
    # Again, and in other chunks.
    assert _check_order(MergedCounts(paths[::-1], 2, memory_bytes=AMPLE)) == expected
    assert _check_order(merged) == expected
    assert _check_order(MergedCounts(paths, 3, memory_bytes=memory_bytes)) == {}


def test_a_tiny_budget_spills_many_runs_and_an_ample_one_none(tmp_path: Path) -> None:
    ids = _ids(0, 200_000)
    for memory_bytes, least, most in ((TINY, 100, 100_000), (AMPLE, 1, 1)):
        path = _count(tmp_path / "counts", ids, memory_bytes=memory_bytes)
        with count_file.CountFile(path) as file:
            assert least <= len(file.runs) <= most
            assert sum(run.occurrences for run in file.runs) == len(ids)


def test_missing_ids_are_not_counted_and_columns_are_kept_apart(tmp_path: Path) -> None:
    ids = np.arange(1000, dtype=np.uint32) % 10
    other = ids + np.uint32(5)
    missing = np.zeros(1000, np.uint64)
    missing[:500] |= np.uint64(1 << (FIRST_CATEGORY_BIT + 4))
    missing[500:] |= np.uint64(1 << (FIRST_CATEGORY_BIT + 5))
    with FileIdCounts(tmp_path / "counts", memory_bytes=AMPLE) as counts:
        counts.add(4, ids, missing)
        counts.add(25, other, missing)
        counts.close()
    found = {
        column: _check_order(MergedCounts([tmp_path / "counts"], column, memory_bytes=AMPLE)) for column in (4, 5, 25)
    }
    assert found == {4: dict.fromkeys(range(10), 50), 5: {}, 25: dict.fromkeys(range(5, 15), 100)}


@pytest.mark.parametrize("memory_bytes", [TINY, 4 * MIB])
def test_counts_do_not_depend_on_threads(tmp_path: Path, memory_bytes: int) -> None:
    blocks = [_ids(seed, 10_000) for seed in range(12)]
    columns = (0, 7, 25)
    errors: list[BaseException] = []
    counts = FileIdCounts(tmp_path / "counts", memory_bytes=memory_bytes)

    def work(part: int) -> None:
        try:
            for block in blocks[part::4]:
                for column in columns:
                    counts.add_ids(column, block + np.uint32(column))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)
    counts.close()
    for column in columns:
        expected = Counter((np.concatenate(blocks) + np.uint32(column)).tolist())
        assert _check_order(MergedCounts([tmp_path / "counts"], column, memory_bytes=memory_bytes)) == expected


def test_the_vocabulary_is_bit_identical_with_a_huge_and_a_tiny_budget(tmp_path: Path) -> None:
    files = [_ids(seed, 100_000) for seed in range(2)]
    contents = set()
    for memory_bytes in (TINY, AMPLE):
        paths = [
            _count(tmp_path / f"{memory_bytes}-{index}", ids, memory_bytes=memory_bytes)
            for index, ids in enumerate(files)
        ]
        counts = MergedCounts(paths, 2, memory_bytes=memory_bytes)
        vocabulary = frequency_vocabulary("C3", counts, threshold=1, max_rows=90_000)
        save_vocabulary(tmp_path, vocabulary, counts)
        contents.add((tmp_path / vocabulary_file("C3")).read_bytes())
    assert len(contents) == 1
    assert vocabulary.table_rows == 90_000


@settings(max_examples=100, deadline=None)
@given(
    runs=st.lists(st.dictionaries(st.integers(0, 2**32 - 1), st.integers(1, 2**32 - 1), max_size=40), max_size=6),
    shared=st.dictionaries(st.integers(0, 50), st.integers(1, 9), max_size=30),
)
def test_merging_runs_adds_up_dictionaries(runs: list[dict[int, int]], shared: dict[int, int]) -> None:
    expected: Counter[int] = Counter()
    made = []
    for run in [*runs, shared, shared]:
        expected.update(run)
        made.append(_run(np.array([*run], np.uint32), np.array([*run.values()], np.int64)))
    assert _check_order(merged_runs(made, 64)) == expected


def _run(ids: Ids, counts: npt.NDArray[np.int64]) -> MemoryRun:
    order = np.argsort(id_hashes(ids))
    return MemoryRun(packed_entries(ids[order], counts[order]))


def test_ids_whose_hashes_crowd_are_merged_like_others() -> None:
    # Hashes that share their 9 first bits, and a few far away: ranges and slots must follow the ids that there are.
    candidates = np.arange(4_000_000, dtype=np.uint32)
    hashes = id_hashes(candidates)
    crowd = candidates[(hashes >> np.uint64(55)) == 123]
    ids = np.union1d(crowd, candidates[:100])
    assert len(crowd) > 7_000
    random = np.random.default_rng(0)
    runs = [_run(random.permutation(ids)[: len(ids) - 50], np.full(len(ids) - 50, 3)) for _ in range(20)]
    expected: Counter[int] = Counter()
    for run in runs:
        expected.update(dict.fromkeys((run.array >> np.uint64(32)).tolist(), 3))
    for buffer_entries in (1 << 12, 1 << 20):
        assert _check_order(merged_runs(runs, buffer_entries)) == expected


def test_an_id_in_more_runs_than_a_merge_range_holds_is_added_up() -> None:
    runs = [_run(np.array([7, 9], np.uint32), np.array([2, 1])) for _ in range(17_000)]
    assert _check_order(merged_runs(runs, 1 << 10)) == {7: 34_000, 9: 17_000}


def test_counts_beyond_32_bits_are_summed_from_several_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(id_counts, "_MOST_OCCURRENCES", 1000)
    ids = np.array([1, 2, 3, 3], np.uint32).repeat(2500)
    path = _count(tmp_path / "counts", ids, memory_bytes=AMPLE)
    with count_file.CountFile(path) as file:
        assert len(file.runs) == 10
        assert max(run.occurrences for run in file.runs) <= 1000
    assert _check_order(MergedCounts([path], 2, memory_bytes=AMPLE)) == {1: 2500, 2: 2500, 3: 5000}
    full = _run(np.array([5], np.uint32), np.array([2**32 - 1]))
    assert _check_order(merged_runs([full, full, full], 1 << 10)) == {5: 3 * (2**32 - 1)}


def test_nothing_stands_under_the_name_before_close_and_nothing_is_left_without_it(tmp_path: Path) -> None:
    path = tmp_path / "counts"
    with FileIdCounts(path, memory_bytes=TINY) as counts:
        counts.add_ids(0, _ids(0, 50_000))
        assert not path.exists()
        assert os.path.getsize(f"{path}.tmp") > 0
    assert list(tmp_path.iterdir()) == []
    _count(path, _ids(0, 50_000), memory_bytes=TINY)
    assert [file.name for file in tmp_path.iterdir()] == ["counts"]


def _cut(content: bytes) -> bytes:
    return content[:-1]


def _without_entries(content: bytes) -> bytes:
    return content[80:]


def _with_another_count(content: bytes) -> bytes:
    return bytes([content[0] ^ 1]) + content[1:]


def _with_another_id(content: bytes) -> bytes:
    return content[:-3000] + bytes([content[-3000] ^ 1]) + content[-2999:]


@pytest.mark.parametrize("damage", [_cut, _without_entries, _with_another_count, _with_another_id, lambda content: b""])
def test_a_damaged_file_of_counts_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = _count(tmp_path / "counts-00003.bin", _ids(0, 5_000), memory_bytes=AMPLE)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DatasetError, match=r"counts-00003\.bin"):
        list(MergedCounts([path], 2, memory_bytes=AMPLE))


def test_an_absent_file_of_counts_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"counts-7.*can't be read"):
        list(MergedCounts([tmp_path / "counts-7"], 2, memory_bytes=AMPLE))


@pytest.fixture
def _files_of_at_most_256_kib() -> Iterator[None]:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores SIGXFSZ, so that a write beyond the limit is an error as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (256 * KIB, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.mark.usefixtures("_files_of_at_most_256_kib")
def test_a_full_disk_while_spilling_is_a_named_error_in_every_thread(tmp_path: Path) -> None:
    counts = FileIdCounts(tmp_path / "counts", memory_bytes=TINY)
    errors = []

    def work(seed: int) -> None:
        try:
            for _ in range(50):
                counts.add_ids(seed, _ids(seed, 20_000))
        except DatasetError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(errors) == 3
    for message in errors:
        assert "counts.tmp can't be written" in message
        assert "free space" in message
    with pytest.raises(DatasetError, match="can't be written"):
        counts.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_files_of_at_most_256_kib")
def test_a_full_disk_while_closing_is_a_named_error(tmp_path: Path) -> None:
    counts = FileIdCounts(tmp_path / "counts", memory_bytes=AMPLE)
    counts.add_ids(0, _ids(0, 200_000))
    with pytest.raises(DatasetError, match=r"counts\.tmp can't be written"):
        counts.close()
    assert list(tmp_path.iterdir()) == []


_COUNT_100_MILLION = """
import resource, sys
from pathlib import Path
import numpy as np
from dlrm_scale.data.vocabulary.id_counts import FileIdCounts
from dlrm_scale.data.vocabulary.merged_counts import MergedCounts
from dlrm_scale.data.vocabulary.vocabulary import frequency_vocabulary
from dlrm_scale.data.vocabulary.vocabulary_file import save_vocabulary, load_vocabulary

folder, rows, step = Path(sys.argv[1]), 100_000_000, 1 << 16
counts = FileIdCounts(folder / "counts", memory_bytes=512 << 20)
# An odd factor permutes 32 bits: all ids are distinct, and come in no order. A tenth of them comes twice.
for first in [*range(0, rows, step), *range(0, rows // 10, step)]:
    ids = np.arange(first, min(first + step, rows), dtype=np.uint32) * np.uint32(2654435761)
    counts.add_ids(0, ids)
counts.close()
twice = -(-(rows // 10) // step) * step
merged = MergedCounts([folder / "counts"], 0, memory_bytes=512 << 20)
vocabulary = frequency_vocabulary("C1", merged, threshold=2)
assert vocabulary.table_rows == 2 + twice, vocabulary.table_rows
save_vocabulary(folder, vocabulary, merged)
del vocabulary
loaded = load_vocabulary(folder, "C1")
found = np.empty(1000, np.int32)
loaded.map_ids(np.arange(1000, dtype=np.uint32) * np.uint32(2654435761), found)
assert len(np.unique(found)) == 1000 and found.min() >= 2
loaded.map_ids(np.arange(twice, twice + 1000, dtype=np.uint32) * np.uint32(2654435761), found)
assert set(found.tolist()) == {1}
assert sum(len(ids) for ids, _ in merged) == rows
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
def test_a_column_of_100_million_distinct_ids_is_counted_within_1_gib(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _COUNT_100_MILLION, str(tmp_path)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= GIB
