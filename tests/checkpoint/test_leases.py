"""Readers and removers see one another, whichever looks first; the dead are forgotten in time."""

import errno
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dlrm_scale.checkpoint import find_chain
from dlrm_scale.checkpoint.chain.leases import (
    CLOCK_SKEW_SECONDS,
    LEASE_SECONDS,
    Lease,
    expired_leases,
    give_back_leases,
    hold_chain,
    keep_renewing,
    read_leases,
    removals_of,
)
from dlrm_scale.checkpoint.storage.local_storage import LocalStorage
from dlrm_scale.errors import StorageError
from tests.checkpoint.faulty_storage import Trace, TracedStorage
from tests.checkpoint.merging import go_on, start

OVER = LEASE_SECONDS + CLOCK_SKEW_SECONDS + 1


def test_a_lease_says_who_holds_what_until_it_is_over(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    lease = Lease(storage, "restore", now=lambda: 1000.0)
    lease.take(["manifests/a", "manifests/b"])
    for now in (1000.0, 1000.0 - CLOCK_SKEW_SECONDS, 1000.0 + OVER - 1):
        (found,) = read_leases(storage, now=now)
        assert (found.kind, found.holds) == ("restore", {"manifests/a", "manifests/b"})
        assert found.owner.startswith("process ")
    assert read_leases(storage, now=1000.0 + OVER) == []
    assert expired_leases(storage, now=1000.0 + OVER) == [found.name]
    assert expired_leases(storage, now=1000.0) == []
    lease.release()
    assert storage.list_names("leases") == []


def test_a_renewed_lease_is_one_lease_and_lasts_longer(tmp_path: Path) -> None:
    storage, clock = LocalStorage(tmp_path), [1000.0]
    lease = Lease(storage, "merge", token="7", now=lambda: clock[0])
    lease.take(["manifests/a"])
    clock[0] += LEASE_SECONDS - 1
    lease.check()
    lease.renew()
    clock[0] += LEASE_SECONDS - 1
    lease.check()
    (found,) = read_leases(storage, now=clock[0])
    assert (found.token, found.holds) == ("7", {"manifests/a"})
    assert len(storage.list_names("leases")) == 1
    clock[0] += 2
    with pytest.raises(StorageError, match=r"the lease of this merge .* has ended"):
        lease.check()


def test_a_lease_that_is_renewed_while_leases_are_read_is_not_missed(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    lease = Lease(storage, "restore")
    lease.take(["manifests/a"])

    class Renewing(LocalStorage):
        renewals = 2

        def list_names(self, folder: str) -> list[str]:
            names = super().list_names(folder)
            if self.renewals:
                self.renewals -= 1
                lease.renew()
            return names

    (found,) = read_leases(Renewing(tmp_path), now=time.time())
    assert found.holds == {"manifests/a"}


def test_a_lease_that_is_half_written_holds_nothing_yet(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.make_folders("leases")
    name = f"leases/restore-abc-0-{int(time.time()) + LEASE_SECONDS}.json"
    (tmp_path / name).write_bytes(b'{"holds": ["manif')
    assert read_leases(storage, now=time.time()) == []
    assert expired_leases(storage, now=time.time()) == []
    assert expired_leases(storage, now=time.time() + 2 * OVER) == [name]


def test_a_restore_waits_for_a_removal_of_its_files_and_chooses_again(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    go_on(start(root), range(2))
    storage = LocalStorage(root)
    removal = Lease(storage, "removal")
    removal.take(["manifests/00000002-s1.json"])
    pauses: list[float] = []

    def remove(seconds: float) -> None:
        # While the restore waits the remover does what it said.
        pauses.append(seconds)
        assert [lease.kind for lease in read_leases(storage, now=time.time())] == ["removal"]
        (root / "manifests/00000002-s1.json").unlink()
        removal.release()

    with hold_chain(storage, lambda: find_chain(root), pause=remove) as chain:
        assert chain is not None
        assert chain.step == 0
        held = read_leases(storage, now=time.time())
        assert [(lease.kind, lease.holds) for lease in held] == [("restore", {"manifests/00000001-s1.json"})]
    assert len(pauses) == 1
    assert read_leases(storage, now=time.time()) == []


def test_a_removal_that_ended_between_the_choice_and_the_lease_is_noticed(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    go_on(start(root), range(2))
    trace = Trace()

    def act(index: int, operation: str, name: str) -> None:
        if operation == "create" and name.startswith("leases/"):
            trace.act = None
            (root / "manifests/00000002-s1.json").unlink()

    trace.act = act
    with hold_chain(TracedStorage(root, trace), lambda: find_chain(root), pause=lambda seconds: None) as chain:
        assert chain is not None
        assert chain.step == 0


def test_removals_of_other_files_and_dead_ones_hold_up_nobody(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    Lease(storage, "removal", now=lambda: 1000.0).take(["manifests/a"])
    assert removals_of(storage, ["manifests/b"], now=1000.0) == []
    assert removals_of(storage, ["manifests/a"], now=1000.0 + OVER) == []
    assert len(removals_of(storage, ["manifests/a", "manifests/b"], now=1000.0)) == 1


def test_a_root_that_may_only_be_read_is_read_with_a_warning(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    go_on(start(root), range(1))

    class ReadOnly(LocalStorage):
        def make_folders(self, *names: str) -> None:
            raise PermissionError(13, "Permission denied")

    def read() -> int:
        with hold_chain(ReadOnly(root), lambda: find_chain(root)) as chain:
            assert chain is not None
            return chain.step

    with pytest.warns(RuntimeWarning, match="aren't kept from removal while they are read"):
        assert read() == 0


def test_an_empty_root_is_left_as_it_is(tmp_path: Path) -> None:
    with hold_chain(LocalStorage(tmp_path), lambda: find_chain(tmp_path)) as chain:
        assert chain is None
    assert list(tmp_path.iterdir()) == []


def _interrupt(operation: str, count: int) -> Callable[[int, str, str], None]:
    """Ctrl-C before the `count`-th operation of a kind on a lease."""
    left = [count]

    def act(index: int, now: str, name: str) -> None:
        if now == operation and name.startswith("leases"):
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt

    return act


@pytest.mark.parametrize(("operation", "count"), [("create", 1), ("write", 1), ("write", 2), ("sync", 1), ("close", 1)])
def test_a_restore_that_is_interrupted_while_it_takes_its_lease_leaves_none(
    tmp_path: Path, operation: str, count: int
) -> None:
    root = tmp_path / "ck"
    go_on(start(root), range(2))
    trace = Trace()
    trace.act = _interrupt(operation, count)
    with pytest.raises(KeyboardInterrupt), hold_chain(TracedStorage(root, trace), lambda: find_chain(root)):
        raise AssertionError("not reached")
    assert list(root.glob("leases/*")) == []


def test_a_restore_that_can_not_look_for_removals_leaves_no_lease(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    go_on(start(root), range(2))

    class Down(LocalStorage):
        def list_names(self, folder: str) -> list[str]:
            if folder == "leases":
                raise OSError(errno.ECONNREFUSED, "Connection refused")
            return super().list_names(folder)

    with pytest.raises(OSError, match="Connection refused"), hold_chain(Down(root), lambda: find_chain(root)):
        raise AssertionError("not reached")
    assert list(root.glob("leases/*")) == []


def test_a_lease_whose_release_is_interrupted_is_given_back_at_the_end_of_the_program(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from dlrm_scale.checkpoint.chain.leases import Lease, keep_renewing\n"
        "from dlrm_scale.checkpoint.storage.local_storage import LocalStorage\n"
        "kept = Lease(LocalStorage(Path(sys.argv[1])), 'restore')\n"
        "kept.take(['manifests/a'])\n"
        "print(len(list(Path(sys.argv[1]).glob('leases/*'))))\n"
        "raise ValueError('as an error that nobody catches')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (1, "1\n"), done.stderr
    assert list(tmp_path.glob("leases/*")) == []


def test_on_a_full_disk_a_lease_holds_everything_until_there_is_room(tmp_path: Path) -> None:
    trace = Trace()
    trace.room_bytes = 20
    storage = TracedStorage(tmp_path, trace)
    lease = Lease(storage, "restore")
    with keep_renewing(lease):
        lease.take(["manifests/a"])
        (found,) = read_leases(storage, now=time.time())
        assert (found.holds_all, found.holds_any(["manifests/b"]), found.holds_any([])) == (True, True, False)
        assert [path.stat().st_size for path in tmp_path.glob("leases/*")] == [0]
        trace.room_bytes = None
        lease.renew()
        (found,) = read_leases(storage, now=time.time())
        assert (found.holds_all, found.holds) == (False, {"manifests/a"})
        assert not found.holds_any(["manifests/b"])
        assert len(list(tmp_path.glob("leases/*"))) == 1
    assert list(tmp_path.glob("leases/*")) == []


def test_an_exit_in_a_hurry_gives_leases_back_and_does_not_wait_for_a_storage_that_hangs(tmp_path: Path) -> None:
    class Hanging(LocalStorage):
        def remove(self, name: str) -> None:
            hung.wait(60)

    hung = threading.Event()
    Lease(Hanging(tmp_path / "hung"), "restore").take(["manifests/a"])
    give_back_leases(0.05)
    assert len(list(tmp_path.glob("hung/leases/*"))) == 1
    hung.set()
    lease = Lease(LocalStorage(tmp_path / "local"), "restore")
    lease.take(["manifests/a"])
    give_back_leases(30.0)
    assert list(tmp_path.glob("local/leases/*")) == []
