"""The harness notices when a promise of the commit is broken: each mutant is a way in which checkpoints go wrong."""

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from dlrm_scale.checkpoint.files import format as file_format
from dlrm_scale.checkpoint.files import manifest_text
from dlrm_scale.checkpoint.files.file_names import merge_number
from dlrm_scale.checkpoint.files.manifest import Manifest, TableRecord
from dlrm_scale.checkpoint.saving import commit, engine, open_start, persist
from dlrm_scale.checkpoint.saving.snapshot import ShardSnapshot
from dlrm_scale.checkpoint.storage.object_storage import ObjectStorage
from dlrm_scale.checkpoint.upkeep import sweep
from dlrm_scale.checkpoint.upkeep.merge_rows import RowsMerge
from dlrm_scale.checkpoint.upkeep.merge_run import MergeRun
from dlrm_scale.touched_rows import TouchedRows
from tests.checkpoint import faulty_storage
from tests.checkpoint.crash_buckets import BucketLife, examine_bucket
from tests.checkpoint.crash_examine import examine
from tests.checkpoint.crash_judge import judge
from tests.checkpoint.crash_life import Life, Meets
from tests.checkpoint.crash_lives import quantized_life, resized_life
from tests.checkpoint.faulty_storage import TracedStorage
from tests.checkpoint.memory_storage import MemoryStorage
from tests.checkpoint.test_crash_buckets import whole_life as bucket_life
from tests.checkpoint.test_crash_races import racing_life, removal_within_a_commit


def short_life(baseline_ratio: float = 1e-9) -> Life:
    """A baseline, a delta, a failed save, and a baseline after which the old chain is removed; then a delta."""
    life = Life(baseline_ratio=baseline_ratio, keep_baselines=1)
    life.start()
    life.save()
    life.save()
    life.save(fail=Meets("write", "-r1."))
    life.save()
    life.save()
    return life


def merging_life() -> Life:
    """Deltas, a merge of them, a commit that can't be made durable, and a start after it."""
    life = Life(baseline_ratio=100)
    life.start()
    life.save()
    life.save()
    life.merge("delta")
    life.save()
    life.save(fail=Meets("sync_folder", "manifests"))
    life.start()
    life.save()
    return life


def _problems(live: Callable[[], Life] = short_life, until: str | None = None) -> list[str]:
    # A mutant may show in the last few states alone, and threads order them anew in each run: then all are judged.
    return examine(live(), share=0.1 if until is None else 1.0, samples=2, until=until).problems


def _notices(words: str, live: Callable[[], Life] = short_life) -> bool:
    return any(words in problem for problem in _problems(live, words))


def test_without_a_mutant_nothing_is_found() -> None:
    assert _problems() == []
    assert _problems(merging_life) == []


@pytest.fixture
def lose(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Makes the program skip a kind of operation on names with a part: neither done nor recorded."""

    def lose(operation: str, part: str) -> None:
        if operation == "sync":
            sync = faulty_storage._TracedFile.sync
            monkeypatch.setattr(faulty_storage._TracedFile, "sync", lambda f: None if part in f.name else sync(f))
        else:
            kept = getattr(TracedStorage, operation)
            monkeypatch.setattr(TracedStorage, operation, lambda s, name: None if part in name else kept(s, name))

    return lose


@pytest.mark.parametrize(
    ("operation", "part"),
    [("sync", "-r1."), ("sync", "-dense."), ("sync", ".tmp"), ("sync_folder", "data"), ("sync_folder", "manifests")],
)
def test_a_missing_sync_is_noticed(lose: Callable[[str, str], None], operation: str, part: str) -> None:
    lose(operation, part)
    assert _notices("was acknowledged")


def test_rows_released_before_the_commit_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TouchedRows, "merge_back", TouchedRows.release)
    assert _notices("isn't that of step", lambda: short_life(baseline_ratio=100))


def test_rows_forgotten_by_the_snapshot_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    freeze = TouchedRows.freeze

    def forgetful(self: TouchedRows) -> object:
        frozen = freeze(self)
        for marks in frozen:
            found = marks.nonzero()
            marks[found[-1:].flatten()] = 0
        return frozen

    monkeypatch.setattr(TouchedRows, "freeze", forgetful)
    assert _notices("isn't that of step")


def test_an_outcome_announced_before_the_link_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    link = TracedStorage.link

    def hasty(self: TracedStorage, source: str, target: str) -> None:
        self._trace.note("outcome", json.dumps({"committed": True}))
        link(self, source, target)

    monkeypatch.setattr(TracedStorage, "link", hasty)
    assert _notices("was acknowledged")


def test_a_skipped_validation_before_the_commit_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def incomplete() -> Life:
        """Rank 1 leaves a table out of its vote."""
        life = Life()
        life.start()
        life.save()
        assert life.run is not None
        writer = life.run.engines[1]._writer
        write = writer.write

        def short(request: object) -> object:
            vote = write(request)  # type: ignore[arg-type]
            (file,) = vote.files
            return vote.model_copy(update={"files": (file.model_copy(update={"entries": file.entries[1:]}),)})

        monkeypatch.setattr(writer, "write", short)
        life.save()
        return life

    assert _problems(incomplete) == []
    monkeypatch.setattr(commit, "check_manifest", lambda manifest: None)
    assert _notices("was acknowledged", incomplete)


def test_a_skipped_look_at_the_files_before_the_commit_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's file doesn't reach the storage that rank 0 sees."""

    def unshared() -> Life:
        life = Life()
        life.start()
        life.save()
        assert life.run is not None
        writer = life.run.engines[1]._writer
        write = writer.write

        def elsewhere(request: object) -> object:
            vote = write(request)  # type: ignore[arg-type]
            for file in vote.files:
                writer.storage.remove(file.name)
            return vote

        monkeypatch.setattr(writer, "write", elsewhere)
        life.save()
        return life

    assert _problems(unshared) == []
    size = MemoryStorage.size_bytes

    def commit_blindly(storage: MemoryStorage, checked: Manifest) -> str:
        sizes = {file.name: file.size_bytes for file in checked.files}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TracedStorage, "exists", lambda s, name: True)
            patch.setattr(TracedStorage, "size_bytes", lambda s, name: sizes.get(name) or size(s._inner, name))
            return commit.commit_manifest(storage, checked)

    monkeypatch.setattr(persist, "commit_manifest", commit_blindly)
    assert _notices("was acknowledged", unshared)


def test_a_link_that_replaces_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trainers that hold the same start number, as its file was lost."""

    def twins() -> Life:
        life = Life()
        life.start(1)
        life.save()
        life.save()
        first = life.run
        assert first is not None
        life.storage.remove("starts/1.json")
        life.start(1)
        life.save()
        found, problems = judge(life.storage)
        assert (found, problems) == (3, [])
        # The first one has other rows; it may not take the place of what was acknowledged.
        first.change("C1", [0, 1], 7.0)
        assert [o.committed for o in first.save_all(9)] == [replaces]
        return life

    replaces = False
    assert _problems(twins) == []
    replaces = True

    def replace(self: MemoryStorage, source: str, target: str) -> None:
        self.files[target] = self.files[source]

    monkeypatch.setattr(MemoryStorage, "link", replace)
    assert _problems(twins) != []


def test_retention_that_removes_data_first_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    remove, sync = TracedStorage.remove, TracedStorage.sync_folder

    def late(self: TracedStorage, name: str) -> None:
        if name.startswith("manifests/") and name.endswith(".json"):
            postponed.append(name)
        else:
            remove(self, name)

    def sync_and_remove(self: TracedStorage, name: str) -> None:
        sync(self, name)
        if name == "data":
            for late_name in postponed:
                remove(self, late_name)
            postponed.clear()

    postponed: list[str] = []
    monkeypatch.setattr(TracedStorage, "remove", late)
    monkeypatch.setattr(TracedStorage, "sync_folder", sync_and_remove)
    assert _notices("is there and its")


def test_a_sweep_that_does_not_wait_for_the_removal_of_manifests_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def killed_in_a_removal() -> Life:
        """Its manifests are removed, and that isn't durable yet; then a start sweeps their data."""
        life = Life(baseline_ratio=1e-9)
        life.start()
        assert all([life.save() for _ in range(2)])

        def is_removal(operation: str, name: str) -> bool:
            last = life.trace.done[-1]
            return operation == "sync_folder" and last.operation == "remove" and last.name.endswith("s1.json")

        life.save(kill=is_removal)
        assert life.dead
        assert life.start()
        return life

    assert _problems(killed_in_a_removal) == []

    def careless(storage: TracedStorage, names: list[str]) -> list[str]:
        for name in names:
            storage.remove(name)
        return names

    monkeypatch.setattr(sweep, "_remove", careless)
    assert _notices("is there and its", killed_in_a_removal)


def test_rows_that_a_codec_would_spoil_and_that_are_left_out_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = ShardSnapshot.encoded

    def without_exact_rows(self: ShardSnapshot, *arguments: object) -> list[ShardSnapshot]:
        return encoded(self, *arguments)[:1]  # type: ignore[arg-type]

    monkeypatch.setattr(ShardSnapshot, "encoded", without_exact_rows)
    assert _notices("isn't that of step", quantized_life)


def test_a_merge_that_takes_an_older_delta_for_a_newer_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where rows are encoded, so that a row may have one of two values."""
    rectangles = MergeRun._rectangles

    def backwards(self: MergeRun, table: TableRecord) -> Iterator[RowsMerge]:
        for merge in rectangles(self, table):
            merge.found = merge.found[::-1]
            yield merge

    monkeypatch.setattr(MergeRun, "_rectangles", backwards)
    assert _notices("isn't that of step", quantized_life)


def test_a_delta_on_tables_of_another_size_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_start, "can_continue", lambda *arguments: True)
    assert _notices("was acknowledged", resized_life)


def test_a_resume_that_forgets_which_rows_changed_since_the_baseline_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def resumed() -> Life:
        life = Life(policy="one_shot", baseline_ratio=100)
        life.start()
        assert all([life.save() for _ in range(3)])
        life.start(1)
        assert life.save()
        return life

    assert _problems(resumed) == []
    monkeypatch.setattr(engine, "mark_rows_of_deltas", lambda *arguments: None)
    assert _notices("isn't that of step", resumed)


def test_a_merge_beside_a_save_whose_files_are_not_synced_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    sync = faulty_storage._TracedFile.sync

    def skip(file: faulty_storage._TracedFile) -> None:
        if merge_number(file.name) is None:
            sync(file)

    monkeypatch.setattr(faulty_storage._TracedFile, "sync", skip)
    assert _notices("is there and its", lambda: racing_life("save", "merge"))


def test_a_removal_for_a_checkpoint_whose_name_is_not_durable_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    sync = TracedStorage.sync_folder

    def skip(self: TracedStorage, name: str) -> None:
        # The one between what the removal takes its lease for and the first file that goes.
        if name != "manifests" or not self._trace.done[-1].name.startswith("leases/"):
            sync(self, name)

    monkeypatch.setattr(TracedStorage, "sync_folder", skip)
    assert _notices("was acknowledged", removal_within_a_commit)


def test_an_unanswered_commit_that_is_taken_for_a_failed_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "UncertainWriteError", ZeroDivisionError)
    problems = examine_bucket(bucket_life()).problems
    assert any("is there and its" in problem for problem in problems)


def test_a_bucket_whose_data_goes_before_its_manifests_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    remove = ObjectStorage.remove
    late: list[str] = []

    def data_first(self: ObjectStorage, name: str) -> None:
        if name.startswith("manifests/") and name.endswith(".json"):
            late.append(name)
            return
        remove(self, name)
        if name.startswith("data/"):
            while late:
                remove(self, late.pop())

    monkeypatch.setattr(ObjectStorage, "remove", data_first)
    life = BucketLife(baseline_ratio=1e-9)
    life.start(1)
    assert all([life.save() for _ in range(4)])
    assert any("is there and its" in problem for problem in examine_bucket(life).problems)


class _AnyText(str):
    """Equal to everything."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


def _whats_wrong_after(life: Life, name: str, damage: Callable[[bytearray], None]) -> list[str]:
    """What is wrong with a resume after damage to a file, besides that newer checkpoints are skipped for it."""
    files = {name: bytes(data) for name, data in life.storage.files.items()}
    damaged = MemoryStorage(files, life.storage.folders)
    damage(damaged.files[name])
    _, problems = judge(damaged)
    return [problem for problem in problems if "isn't that of" in problem or "aren't those of" in problem]


def test_a_manifest_that_is_read_without_its_hash_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    life = short_life()
    tip = max(name for name in life.storage.files if name.endswith(".json") and name.startswith("manifests"))

    def other_cursor(data: bytearray) -> None:
        at = data.index(b'"cursor":{"step":') + len(b'"cursor":{"step":')
        data[at : at + 1] = b"9"

    assert _whats_wrong_after(life, tip, other_cursor) == []
    hashed = SimpleNamespace(hexdigest=_AnyText)
    monkeypatch.setattr(manifest_text, "hashlib", SimpleNamespace(sha256=lambda data: hashed))
    assert any("cursor" in problem for problem in _whats_wrong_after(life, tip, other_cursor))


def test_data_that_is_read_without_its_hashes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    life = short_life()
    names = [name for name in life.storage.files if name.startswith("data/")]

    def flip(data: bytearray) -> None:
        data[len(data) - 2] ^= 4

    for name in names:
        assert _whats_wrong_after(life, name, flip) == []
    monkeypatch.setattr(file_format, "_hash_file", lambda storage, record: record.xxh3_128)
    monkeypatch.setattr(file_format.xxhash, "xxh3_128_hexdigest", lambda view: _AnyText())
    noticed = [name for name in names if _whats_wrong_after(life, name, flip)]
    assert len(noticed) >= len(names) / 2
