"""Merge, gc, save, restore and pin in each other's middle: at every operation of one, another runs from start to end.

Storage operations are atomic, so two programs at once are their operations in some order. An order in which one runs
through while the other stands still is where a check and what it was for are furthest apart.
"""

import copy
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from dlrm_scale.checkpoint import Chain, find_chain, open_chain, verify
from dlrm_scale.checkpoint.chain.leases import Lease, hold_chain
from dlrm_scale.checkpoint.chain.pins import pin_step
from dlrm_scale.checkpoint.files.file_names import parse_temporary_name
from dlrm_scale.checkpoint.storage.local_storage import LocalStorage
from dlrm_scale.checkpoint.storage.storage import ReadableFile, Storage
from dlrm_scale.checkpoint.upkeep.collect_garbage import collect_garbage
from dlrm_scale.checkpoint.upkeep.sweep import sweep_stale
from dlrm_scale.errors import CheckpointError
from tests.checkpoint.faulty_storage import Trace, TracedStorage
from tests.checkpoint.merging import ADAGRAD, go_on, merge, start, truth_of
from tests.checkpoint.simulated_run import Run, load_chain, make_layout

REPOSITORY = Path(__file__).resolve().parents[2]
LAYOUT = make_layout("row_wise", 1)


class WatchedStorage(TracedStorage):
    """Tells its trace of reads too: a removal before one of them is what undercuts a reader."""

    def __init__(self, root: Path, trace: Trace) -> None:
        super().__init__(root, trace)
        self._watch = trace

    @contextmanager
    def open(self, name: str) -> Iterator[ReadableFile]:
        self._watch.note("open", name)
        with super().open(name) as file:
            yield file

    def read(self, name: str, limit_bytes: int) -> bytes:
        self._watch.note("read", name)
        return super().read(name, limit_bytes)

    def list_names(self, folder: str) -> list[str]:
        self._watch.note("list", folder)
        return super().list_names(folder)

    def exists(self, name: str) -> bool:
        self._watch.note("exists", name)
        return super().exists(name)


class World:
    """A root with a chain, merges of it, and a trainer that goes on; each program through a storage of its own."""

    def __init__(self, root: Path, storage: Storage | None = None) -> None:
        self.root = root
        chain = find_chain(root)
        assert chain is not None
        self.truths = {step: truth_of(step) for step in range(chain.step + 4)}
        self.run = Run(
            root,
            make_layout("row_wise", 1),
            copy.deepcopy(self.truths[chain.step]),
            resumed_from=chain,
            merger=True,
            storages=[storage] if storage else None,
        )
        self.step = chain.step

    def save(self) -> None:
        self.step += 1
        go_on(self.run, range(self.step, self.step + 1))

    def check(self, chain: Chain) -> None:
        """Restore a chain; it has the rows of its step."""
        like = self.truths[chain.step]
        assert load_chain(chain, LAYOUT, like, optimizer=ADAGRAD).equals(like)


def _merge(world: World, storage: Storage) -> None:
    try:
        merge(storage, "baseline", pause=_hurry)
    except CheckpointError as error:
        # Of two at a time one, or both, leave it to the other.
        if "is merging in" not in str(error):
            raise


def _gc(world: World, storage: Storage) -> None:
    try:
        collect_garbage(storage, keep_baselines=2, dry_run=False)
    except CheckpointError as error:
        if "is removing checkpoints in" not in str(error):
            raise


def _save(world: World, storage: Storage) -> None:
    world.save()


def _restore(world: World, storage: Storage) -> None:
    with hold_chain(storage, lambda: find_chain(storage), pause=_hurry) as chain:
        assert chain is not None
        world.check(chain)


def _pin(world: World, storage: Storage) -> None:
    try:
        name = pin_step(storage, 3, pause=_hurry)
    except CheckpointError:
        assert not list((world.root / "pins").glob("*")), "a pin of what is gone"
    else:
        world.check(open_chain(world.root, name))


class _WaitError(Exception):
    """Somebody waits for a program that stands still in this test until he is done."""


def _hurry(seconds: float) -> None:
    raise _WaitError


PROGRAMS: dict[str, Callable[[World, Storage], None]] = {
    "merge": _merge,
    "gc": _gc,
    "save": _save,
    "restore": _restore,
    "pin": _pin,
}


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 0 to 5, merged at 1 and 4: gc has something to remove, a merge something to merge."""
    root = tmp_path_factory.mktemp("races") / "before"
    run = start(root, make_layout("row_wise", 1))
    go_on(run, range(6))
    merge(root, "baseline", step=1, number=1)
    merge(root, "baseline", step=4, number=2)
    return root


def _race(before: Path, root: Path, first: str, second: str, index: int) -> bool:
    """Run `first`, and `second` before its operation `index`; says whether there is such an operation."""
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(before, root)
    trace = Trace()
    watched = WatchedStorage(root, trace)
    world = World(root, watched if first == "save" else None)
    started = len(trace.operations)
    met = []

    def act(now: int, operation: str, name: str) -> None:
        if now - started == index:
            trace.act = None
            met.append(name)
            try:
                PROGRAMS[second](
                    world, world.run.engines[0]._writer.storage if second == "save" else LocalStorage(root)
                )
            except _WaitError:
                met.append("waits")

    trace.act = act
    try:
        PROGRAMS[first](world, watched)
    except _WaitError:
        # It waits for `second`, which has ended without giving its lease back: a wait without end.
        pytest.fail(f"{first} waits for {second}, which is over")
    chain = find_chain(root, verify="full")
    assert chain is not None
    assert chain.step == world.step
    world.check(chain)
    assert verify(root) == [], (first, second, index)
    return bool(met)


def _all_races(before: Path, root: Path, first: str, second: str, stride: int) -> int:
    index = 0
    while _race(before, root, first, second, index):
        index += stride
    return index


PAIRS = [
    (first, second) for first in PROGRAMS for second in PROGRAMS if not (first == second and first in ("save", "pin"))
]


@pytest.mark.parametrize(
    ("first", "second", "stride"), [("gc", "restore", 19), ("restore", "gc", 5), ("merge", "gc", 29), ("gc", "pin", 19)]
)
def test_at_some_operations_of_one_program_another_runs_through(
    before: Path, tmp_path: Path, first: str, second: str, stride: int
) -> None:
    assert _all_races(before, tmp_path / "ck", first, second, stride) >= 20


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_at_every_operation_of_one_program_another_runs_through(
    before: Path, tmp_path: Path, first: str, second: str
) -> None:
    assert _all_races(before, tmp_path / "ck", first, second, 1) >= 15


def _sweep(storage: Storage) -> None:
    sweep_stale(storage, now=time.time())


def _collect(storage: Storage) -> None:
    collect_garbage(storage, keep_baselines=2, dry_run=False)


@pytest.mark.parametrize("work", [_sweep, pytest.param(_collect, marks=pytest.mark.slow)])
@pytest.mark.parametrize("claims_first", [False, True], ids=["acknowledged", "fenced off"])
def test_gc_takes_nothing_from_a_trainer_that_commits_while_the_next_one_takes_over(
    before: Path, tmp_path: Path, claims_first: bool, work: Callable[[Storage], None]
) -> None:
    """Before each operation of gc the link is made, and the next start is there: after it, or since before gc began."""
    made = tmp_path / "made"
    shutil.copytree(before, made)
    world = World(made)
    world.save()
    newest = f"manifests/{world.run.engines[0]._next_seq - 1:08d}-s2.json"
    temporary = f"manifests/.{newest.removeprefix('manifests/').removesuffix('.json')}a1.tmp"
    assert parse_temporary_name(temporary) is not None
    (made / newest).rename(made / temporary)
    if claims_first:
        (made / "starts/3.json").write_text('{"continues": "manifests/00000006-s1.json"}')
    root = tmp_path / "ck"
    index, linked = 0, 0
    while True:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(made, root)
        trace = Trace()
        met: list[bool] = []

        def act(now: int, operation: str, name: str, at: int = index, met: list[bool] = met) -> None:
            if now != at:
                return
            with suppress(FileNotFoundError):
                (root / temporary).rename(root / newest)
            met.append((root / newest).exists())
            (root / "starts/3.json").write_text('{"continues": "manifests/00000006-s1.json"}')

        trace.act = act
        work(WatchedStorage(root, trace))
        if not met:
            break
        linked += met[0]
        assert met[0] or claims_first, index
        assert verify(root) == [], index
        chain = find_chain(root, verify="full")
        assert chain is not None
        assert chain.step == (world.step if met[0] else world.step - 1), index
        world.check(chain)
        index += 1
    assert linked >= 3


def _restore_in_a_removal(before: Path, root: Path, stop_at: str, goes_on_at: int) -> bool:
    """Stop gc before the operation `stop_at`; a restore begins, and before its own operation gc goes on to its end.

    Returns:
        Whether the restore has so many operations.
    """
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(before, root)
    world = World(root)
    stopped, goes_on, ended = threading.Event(), threading.Event(), threading.Event()
    removing, reading = Trace(), Trace()
    met: list[str] = []

    def wait(index: int, operation: str, name: str) -> None:
        if f"{operation} {name}".startswith(stop_at) and not stopped.is_set():
            stopped.set()
            assert goes_on.wait(60)

    def go(index: int, operation: str, name: str) -> None:
        if index == goes_on_at:
            met.append(name)
            let_go(0.0)

    def let_go(seconds: float) -> None:
        goes_on.set()
        assert ended.wait(60)

    removing.act, reading.act = wait, go
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(_gc, world, TracedStorage(root, removing))
        result.add_done_callback(lambda _: (stopped.set(), ended.set()))
        try:
            assert stopped.wait(60)
            watched = WatchedStorage(root, reading)
            # As a trainer that has read the manifests by now: the newest chain, and the one that gc is removing.
            choose = iter([_first_chain(watched)])
            with hold_chain(watched, lambda: next(choose, None) or find_chain(watched), pause=let_go) as chain:
                assert chain is not None
                world.check(chain)
        finally:
            goes_on.set()
        result.result(60)
    assert verify(root) == []
    return bool(met)


def _first_chain(storage: Storage) -> Chain | None:
    """The trainer's chain to step 0, of which no merge is."""
    try:
        return open_chain(storage, "manifests/00000001-s1.json")
    except CheckpointError:
        return None


def _restores_in_removals(before: Path, root: Path, stop_at: str, stride: int) -> None:
    goes_on_at = 0
    while _restore_in_a_removal(before, root, stop_at, goes_on_at):
        goes_on_at += stride
    assert goes_on_at >= 4 * stride


@pytest.mark.parametrize(
    ("stop_at", "stride"),
    [
        ("remove manifests/0", 3),
        *(pytest.param(at, 1, marks=pytest.mark.slow) for at in ("create leases/removal", "remove leases/removal")),
        *(pytest.param(at, 1, marks=pytest.mark.slow) for at in ("remove manifests/0", "sync_folder", "remove data/")),
    ],
)
def test_a_restore_that_begins_within_a_removal_is_not_undercut(
    before: Path, tmp_path: Path, stop_at: str, stride: int
) -> None:
    _restores_in_removals(before, tmp_path / "ck", stop_at, stride)


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["removals_of", "take"])
def test_without_the_lease_or_the_look_for_removals_a_restore_is_undercut(
    before: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """The races above would notice."""
    if missing == "removals_of":
        monkeypatch.setattr("dlrm_scale.checkpoint.chain.leases.removals_of", lambda storage, names, now: [])
        with pytest.raises(CheckpointError, match=r"can't open data/00000001-s1a1"):
            _restores_in_removals(before, tmp_path / "ck", "remove manifests/0", 1)
        return
    take = Lease.take

    def take_removals(lease: Lease, holds: Collection[str] = ()) -> None:
        take(lease, holds if lease._kind == "removal" else ())

    monkeypatch.setattr(Lease, "take", take_removals)
    with pytest.raises(CheckpointError, match=r"can't open data/"):
        _restores_in_removals(before, tmp_path / "ck", "create leases/removal", 1)


@pytest.mark.slow
def test_trainer_merge_gc_and_restores_run_beside_one_another_as_processes(tmp_path: Path) -> None:
    root, stop = tmp_path / "ck", tmp_path / "stop"
    with ExitStack() as stack:
        trainer = stack.enter_context(_python("-m", "tests.checkpoint.beside_trainer", "train", str(root), str(stop)))
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "0\n"
        merging = ("checkpoint", "merge", str(root), "--watch", "0", "--keep", "2", "--json")
        merger = stack.enter_context(_python("-m", "dlrm_scale", *merging))
        reader = stack.enter_context(_python("-m", "tests.checkpoint.beside_trainer", "restore", str(root), str(stop)))
        assert merger.stdout is not None
        removed = 0
        merges = []
        for _ in range(2):
            merges.append(json.loads(merger.stdout.readline()))
            with _python("-m", "dlrm_scale", "checkpoint", "gc", str(root), "--json") as gc:
                text, _ = gc.communicate(timeout=120)
            # 4: the merge is removing just now
            assert gc.returncode in (0, 4)
            removed += len(json.loads(text)["removed"]) if text else 0
        stop.touch()
        steps = trainer.stdout.read()
        assert trainer.wait(120) == 0
        stop.write_text(steps.splitlines()[-1])
        restores, _ = reader.communicate(timeout=120)
        assert reader.returncode == 0
        merger.send_signal(signal.SIGTERM)
        merges += [json.loads(line) for line in merger.stdout.read().splitlines()]
        assert merger.wait(120) == 130
    assert sum(len(one["removed"]) for one in merges) + removed > 50
    assert int(restores) > 1
    assert verify(root) == []
    chain = find_chain(root, verify="full")
    assert chain is not None
    assert chain.step == int(stop.read_text())
    assert len(chain.manifests) < 0.5 * chain.step


@pytest.mark.slow
def test_a_killed_merge_leaves_the_chain_and_its_files_are_swept_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as on a disk of this host, whatever holds the temporary folder
    monkeypatch.setattr("dlrm_scale.checkpoint.chain.leases.writes_end_with_process", lambda storage: True)
    root = tmp_path / "ck"
    run = start(root, make_layout("row_wise", 1))
    go_on(run, range(4))
    names = {path.name for path in (root / "data").iterdir()}
    for at in ("create data/", "sync data/", "create manifests/", "link manifests/"):
        with _python("-m", "tests.checkpoint.beside_trainer", "merge", str(root), at) as killed:
            assert killed.wait(120) == -signal.SIGKILL
        chain = find_chain(root, verify="full")
        assert chain is not None
        assert load_chain(chain, LAYOUT, run.truth, optimizer=ADAGRAD).equals(run.truth)
        assert len(list((root / "leases").iterdir())) == 1
        collect_garbage(LocalStorage(root), keep_baselines=2, dry_run=False)
        assert {path.name for path in (root / "data").iterdir()} == names
        assert list((root / "leases").iterdir()) == []


def _python(*arguments: str) -> subprocess.Popen[str]:
    """A process whose messages go where pytest's do."""
    return subprocess.Popen([sys.executable, *arguments], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
