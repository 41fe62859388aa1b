"""Leases: how programs that know nothing of each other use one root without taking files from one another.

    leases/restore-<token>-<beat>-<expires>.json     a restore in progress reads these manifests
    leases/merge-<token>-<beat>-<expires>.json       a merge reads them and writes files of the number <token>
    leases/removal-<token>-<beat>-<expires>.json     these manifests are being removed

A reader writes its lease, then looks for removals; a remover writes what it wants to remove, then looks for readers.
Whatever the order of these four steps, at least one of the two sees the other:

    reader     take the lease, then a removal that holds one of my manifests?  wait, and choose again
               then, are my manifests still there?                            no: choose again
    remover    take the lease, then what do the leases and pins of others hold?   that stays

There is one removal at a time; another one leaves it to the first.

    leases/<kind>-<token>-<beat>-<expires>.all       of a disk without room for a list: it holds every manifest

An empty file takes an entry of its folder and no block, so a full disk still has room for this one. A reader that holds
everything can't be undercut, and no reader begins while a removal holds everything: so `gc` may make room.

A lease is renewed by a new file and the old one's removal, as no file is ever overwritten. A holder that dies stops
renewing and its lease expires: by the wall clock, so hosts' clocks are assumed to differ by less than
`CLOCK_SKEW_SECONDS`. If they differ by more, or a reader is stopped for longer than `LEASE_SECONDS`, its files may be
removed while it reads. Then it fails with the missing file's name, and never with wrong rows.

A lease whose process has ended on this host (see `holders`) is over at once: of a restore in any storage, as nobody
reads any more; of a merge or a removal where what it has written can't appear later. Elsewhere such a merge holds its
manifests and its files until the lease runs out, but nobody has to wait for it with the next merge.
"""

import atexit
import errno
import json
import os
import re
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from dlrm_scale.checkpoint.chain.chain import Chain
from dlrm_scale.checkpoint.chain.holders import has_ended, process_record, writes_end_with_process
from dlrm_scale.checkpoint.storage.storage import Storage
from dlrm_scale.errors import CheckpointWarning, StorageError
from dlrm_scale.units import MIB

__all__ = [
    "CLOCK_SKEW_SECONDS",
    "LEASE_SECONDS",
    "Lease",
    "LeaseRecord",
    "expired_leases",
    "give_back_leases",
    "hold_chain",
    "keep_renewing",
    "read_leases",
    "removals_of",
]

LEASE_SECONDS = 300
"""From a renewal to the end of a lease."""

CLOCK_SKEW_SECONDS = 120
"""What others wait beyond the end, for clocks that differ."""

_RENEW_SECONDS = LEASE_SECONDS / 5
_LOOK_AGAIN_SECONDS = 0.2
_NAME = re.compile(r"leases/(restore|merge|removal)-([0-9a-z]+)-([0-9]+)-([0-9]+)\.(json|all)")
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})

LeaseKind = Literal["restore", "merge", "removal"]


@dataclass(frozen=True, kw_only=True)
class LeaseRecord:
    """Somebody's lease.

    Attributes:
        name: of its file.
        kind: what for.
        token: tells leases of a kind apart; a merge's number.
        holds: names of manifests; see `holds_any` for one that holds all.
        expires_unix_seconds: by the holder's clock.
        owner: host and process, for messages.
        holds_all: it was written on a full disk.
        has_ended: its process is gone, and what it wrote last may still appear.
    """

    name: str
    kind: LeaseKind
    token: str
    holds: frozenset[str]
    expires_unix_seconds: float
    owner: str
    holds_all: bool = False
    has_ended: bool = False

    def holds_any(self, names: Collection[str]) -> bool:
        """Whether it holds one of these manifests."""
        return bool(names) and (self.holds_all or not self.holds.isdisjoint(names))


class Lease:
    """A lease of this program. One that is still held when the program ends is given back then, unless it is killed.

    Args:
        storage: the checkpoints.
        kind: what for.
        token: a merge's number; otherwise drawn.
        for_others: other processes read by it, so that it isn't over when this one has ended.
        now: a clock in Unix seconds.
    """

    def __init__(
        self,
        storage: Storage,
        kind: LeaseKind,
        *,
        token: str | None = None,
        for_others: bool = False,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.token = token if token is not None else secrets.token_hex(8)
        self._storage = storage
        self._kind = kind
        self._for_others = for_others
        self._now = now
        self._beat = 0
        self._name: str | None = None
        self._expires = 0.0
        self._holds: frozenset[str] = frozenset()
        self._lock = threading.Lock()

    def take(self, holds: Collection[str] = ()) -> None:
        """Write the lease, or renew it, with what it holds from now on.

        Raises:
            OSError: it can't be written.
        """
        with self._lock:
            self._holds = frozenset(holds)
            self._write()

    def renew(self) -> None:
        """Put the end off; nothing where the lease isn't taken."""
        with self._lock:
            if self._name is not None:
                self._write()

    def check(self) -> None:
        """Refuse to go on with a lease that has ended.

        Raises:
            StorageError: it has.
        """
        if self._name is None or self._now() > self._expires:
            raise StorageError(
                f"the lease of this {self._kind} in {self._storage.address} has ended: it wasn't renewed for "
                f"{LEASE_SECONDS} s",
                remedy="run it again",
            )

    def release(self) -> None:
        """Give it back; errors are left to its expiry."""
        with self._lock:
            if self._name is not None:
                with suppress(OSError):
                    self._storage.remove(self._name)
            # Not when it is interrupted: then it is tried again at the program's end.
            self._name = None
            _held.discard(self)

    def leave(self) -> None:
        """Leave it to its expiry: a call to a store may still take effect in its name."""
        with self._lock:
            self._name = None
            _held.discard(self)

    def _write(self) -> None:
        now = self._now()
        expires = now + LEASE_SECONDS
        stem = f"leases/{self._kind}-{self.token}-{self._beat}-{int(expires)}"
        record = {
            "holds": sorted(self._holds),
            **process_record(),
            "for_others": self._for_others,
            "created_unix_seconds": now,
        }
        if self._name is None:
            _give_back_at_the_end(self)
            self._storage.make_folders("leases")
        try:
            self._create(f"{stem}.json", json.dumps(record).encode() + b"\n")
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            self._create(f"{stem}.all", b"")
        self._expires = expires

    def _create(self, name: str, data: bytes) -> None:
        try:
            self._storage.write_durably(name, data)
            before, self._name, self._beat = self._name, name, self._beat + 1
        except BaseException:
            # also when it is interrupted
            with suppress(OSError):
                self._storage.remove(name)
            raise
        if before is not None:
            self._storage.remove(before)


_held: set[Lease] = set()
"""Of this program, to be given back at its end."""


def _give_back_at_the_end(lease: Lease) -> None:
    if not _held:
        atexit.unregister(_give_back)
        atexit.register(_give_back, os.getpid())
    _held.add(lease)


def give_back_leases(seconds: float = 2.0) -> None:
    """Give back all leases of this program, as far as that is done in so many seconds: before an exit in a hurry."""
    thread = threading.Thread(target=_give_back, args=(os.getpid(),), name="give back leases", daemon=True)
    thread.start()
    thread.join(seconds)


def _give_back(pid: int) -> None:
    if os.getpid() == pid:  # not in a fork of the program
        for lease in tuple(_held):
            lease.release()


@contextmanager
def keep_renewing(lease: Lease) -> Iterator[None]:
    """Renew a lease from a thread for as long as the block runs, and give it back at the end.

    It is best taken inside the block, so that nothing that interrupts the program leaves it behind.
    """
    stop = threading.Event()

    def renew() -> None:
        while not stop.wait(_RENEW_SECONDS):
            # What fails now may work next time; a lease that has ended is noticed by `check`.
            with suppress(OSError):
                lease.renew()

    thread = threading.Thread(target=renew, name="checkpoint-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        try:
            thread.join()
        finally:
            lease.release()


def read_leases(storage: Storage, *, now: float) -> list[LeaseRecord]:
    """Read the leases that haven't ended.

    Args:
        storage: the checkpoints.
        now: Unix seconds.

    Raises:
        OSError: one can't be read, so that it isn't known what it holds.
    """
    while True:
        names = [name for name in storage.list_names("leases") if _is_live(name, now)]
        found = [_read(storage, name) for name in names]
        if None not in found:
            return [lease for lease in found if lease is not None and lease.owner and not _is_over(storage, lease)]
        # One was renewed or given back in between; a renewed one must not be missed.


def removals_of(storage: Storage, names: Collection[str], *, now: float) -> list[LeaseRecord]:
    """Removals in progress of any of these manifests."""
    return [lease for lease in read_leases(storage, now=now) if lease.kind == "removal" and lease.holds_any(names)]


def expired_leases(storage: Storage, *, now: float) -> list[str]:
    """Names of leases that have ended, of holders that died.

    Raises:
        OSError: one can't be read.
    """
    names = [name for name in storage.list_names("leases") if _NAME.fullmatch(name)]
    return [
        name
        for name in names
        if not _is_live(name, now) or ((lease := _read(storage, name)) is not None and _is_over(storage, lease))
    ]


@contextmanager
def hold_chain(
    storage: Storage,
    choose: Callable[[], Chain | None],
    *,
    for_others: bool = False,
    now: Callable[[], float] = time.time,
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[Chain | None]:
    """Choose a chain and keep its files from being removed while the block runs.

    A removal of some of its files that has begun already is waited for, as long as its lease lasts, and the chain is
    chosen anew. Where no lease can be written, as in a root that may only be read, a `CheckpointWarning` says so.

    Args:
        storage: the checkpoints.
        choose: as `find_chain` or `open_chain`; may be called several times.
        for_others: other processes read them too, and may outlive this one.
        now: a clock in Unix seconds.
        pause: waits for some seconds.

    Raises:
        CheckpointError: as `choose` does.
    """
    lease = Lease(storage, "restore", for_others=for_others, now=now)
    chain = choose()
    if chain is None:
        yield None
        return
    with keep_renewing(lease):
        while chain is not None:
            names = [manifest.name for manifest in chain.manifests]
            try:
                lease.take(names)
            except OSError as error:
                warnings.warn(
                    f"the checkpoints in {storage.address} aren't kept from removal while they are read: "
                    f"{error.strerror or error}",
                    CheckpointWarning,
                    stacklevel=3,
                )
                break
            if not removals_of(storage, names, now=now()) and all(storage.exists(name) for name in names):
                break
            lease.release()
            pause(_LOOK_AGAIN_SECONDS)
            chain = choose()
        yield chain


def _is_live(name: str, now: float) -> bool:
    match = _NAME.fullmatch(name)
    return match is not None and now <= int(match[4]) + CLOCK_SKEW_SECONDS


def _is_over(storage: Storage, lease: LeaseRecord) -> bool:
    """Whether it has ended with its process, before its time."""
    return lease.has_ended and (lease.kind == "restore" or writes_end_with_process(storage))


def _read(storage: Storage, name: str) -> LeaseRecord | None:
    """A lease; None if it is gone, one without owner if it isn't taken yet."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    kind: LeaseKind = match[1]  # type: ignore[assignment]
    if match[5] == "all":
        return LeaseRecord(
            name=name,
            kind=kind,
            token=match[2],
            holds=frozenset(),
            expires_unix_seconds=int(match[4]),
            owner="a process that found the disk full",
            holds_all=True,
        )
    try:
        record = json.loads(storage.read(name, MIB))
        holds, owner = frozenset(record["holds"]), f"process {record['pid']} on {record['host']}"
        ended = not record.get("for_others") and has_ended(record)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, EOFError):
        # Being written: its holder hasn't looked for removals yet and will see ours. Or a loss of power cut it.
        holds, owner, ended = frozenset(), "", False
    return LeaseRecord(
        name=name,
        kind=kind,
        token=match[2],
        holds=holds,
        expires_unix_seconds=int(match[4]),
        owner=owner,
        has_ended=ended,
    )
