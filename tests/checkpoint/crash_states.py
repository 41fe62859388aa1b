"""What a loss of power can leave behind, made from the operations that a run performed (as in ALICE, OSDI'14).

A file system keeps what was synced and is free in the rest, for each prefix of the operations:

- a written part of a file that wasn't synced is there, or missing (zeros, where a later part is there), or torn at a
  block's boundary;
- a created, linked or removed name in a folder that wasn't synced since is there or not, each for itself; names of
  one folder may come in any order.

SIGKILL is the case in which everything is kept. Folders themselves are durable once they are made: `make_folders`
promises that, and the tests of the storages check it.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product

from tests.checkpoint.faulty_storage import Event

__all__ = ["CrashState", "Disk", "crash_states"]

BLOCK_BYTES = 512
EXHAUSTIVE_CHOICES = 5
"""Up to so many open choices, every combination is made."""

Keep = Callable[[bytes], bytes | None]
"""What is left of a written part: None, or as many bytes as it had."""


@dataclass(frozen=True, kw_only=True)
class CrashState:
    """One possible disk.

    Attributes:
        operations: how many were performed before the crash.
        files: content by name.
        folders: those that exist.
        acknowledged: the newest step that somebody was told is saved; 0 for none.
        kept: which choices were made, for messages.
    """

    operations: int
    files: dict[str, bytes]
    folders: frozenset[str]
    acknowledged: int
    kept: str


@dataclass
class _Inode:
    durable: bytes = b""
    open: list[tuple[int, bytes]] = field(default_factory=list)
    size: int = 0


@dataclass
class Disk:
    """Follows operations; knows what is durable and what isn't yet."""

    inodes: list[_Inode] = field(default_factory=list)
    live: dict[str, int] = field(default_factory=dict)
    durable: dict[str, int] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)
    open_names: list[tuple[str, int | None]] = field(default_factory=list)
    """Changes of names since their folder's last sync: the inode that a name was given, None if it was removed."""
    acknowledged: int = 0

    @classmethod
    def of(cls, files: dict[str, bytes], folders: frozenset[str], acknowledged: int = 0) -> "Disk":
        """A disk on which all of this is durable."""
        disk = cls(folders=set(folders), acknowledged=acknowledged)
        for name, data in files.items():
            disk.live[name] = disk.durable[name] = len(disk.inodes)
            disk.inodes.append(_Inode(durable=data, size=len(data)))
        return disk

    def perform(self, event: Event) -> None:
        """Do one operation."""
        if event.operation == "make_folder":
            self.folders.add(event.name)
        elif event.operation == "create":
            self.inodes.append(_Inode())
            self._name(event.name, len(self.inodes) - 1)
        elif event.operation == "link":
            self._name(event.name, self.live[event.source])
        elif event.operation == "remove":
            if event.name in self.live:
                self._name(event.name, None)
        elif event.operation == "write":
            inode = self.inodes[self.live[event.name]]
            inode.open.append((inode.size, event.data))
            inode.size += len(event.data)
        elif event.operation == "sync":
            inode = self.inodes[self.live[event.name]]
            inode.durable = _content(inode, [_whole] * len(inode.open))
            inode.open = []
        elif event.operation == "sync_folder":
            self._sync_folder(event.name)
        elif event.operation == "acknowledge":
            self.acknowledged = max(self.acknowledged, event.step)

    def _name(self, name: str, inode: int | None) -> None:
        if inode is None:
            del self.live[name]
        else:
            self.live[name] = inode
        self.open_names.append((name, inode))

    def _sync_folder(self, folder: str) -> None:
        left = []
        for name, inode in self.open_names:
            if _folder(name) == folder:
                _apply(self.durable, name, inode)
            else:
                left.append((name, inode))
        self.open_names = left

    def states(self, chance: random.Random, samples: int) -> Iterator[tuple[Callable[[], dict[str, bytes]], str]]:
        """What may be left of this moment: makers of files, with a word on each."""
        parts = [(i, k) for i, inode in enumerate(self.inodes) for k in range(len(inode.open))]
        names, writes = len(self.open_names), len(parts)

        def files(kept_names: Sequence[bool], kept_writes: Sequence[Keep]) -> dict[str, bytes]:
            found = dict(self.durable)
            for (name, inode), kept in zip(self.open_names, kept_names, strict=True):
                if kept:
                    _apply(found, name, inode)
            keeps: dict[int, list[Keep]] = {i: [_nothing] * len(self.inodes[i].open) for i, _ in parts}
            for (i, k), keep in zip(parts, kept_writes, strict=True):
                keeps[i][k] = keep
            return {name: _content(self.inodes[i], keeps.get(i, [])) for name, i in found.items()}

        def make(kept_names: Sequence[bool], kept_writes: Sequence[Keep]) -> Callable[[], dict[str, bytes]]:
            return partial(files, kept_names, kept_writes)

        all_names, all_writes = [True] * names, [_whole] * writes
        yield make(all_names, all_writes), "everything"
        if not names + writes:
            return
        yield make([False] * names, [_nothing] * writes), "what was synced"
        yield make(all_names, [_nothing] * writes), "names without content"
        yield make(all_names, [_zeros] * writes), "names, sizes and zeros"
        yield make([False] * names, all_writes), "content without names"
        for n in range(names):
            yield make(_with(all_names, n, False), all_writes), f"all but the name {self.open_names[n][0]}"
            yield make(_with([False] * names, n, True), all_writes), f"only the name {self.open_names[n][0]}"
        for w in range(writes):
            for keep in (_nothing, _zeros, _first_blocks, _last_block):
                yield make(all_names, _with(all_writes, w, keep)), f"{keep.__name__} of written part {w}"
        if names + writes <= EXHAUSTIVE_CHOICES:
            for chosen in product([False, True], repeat=names + writes):
                kept_writes = [_whole if kept else _nothing for kept in chosen[names:]]
                yield make(chosen[:names], kept_writes), f"choices {chosen}"
            return
        for _ in range(samples):
            kept_names = [chance.random() < 0.5 for _ in range(names)]
            seed = chance.random()
            kept_writes = [chance.choice((_whole, _nothing, _zeros, _some_blocks(seed))) for _ in range(writes)]
            yield make(kept_names, kept_writes), f"names {kept_names} and a choice of writes with seed {seed}"


def crash_states(
    events: Sequence[Event], *, start: Disk | None = None, share: float = 1.0, samples: int = 8, seed: int = 0
) -> Iterator[CrashState]:
    """Every prefix's states, without repetitions of the same disk with the same acknowledged step.

    Args:
        events: performed operations.
        start: the disk before them, changed by this; an empty one if not given.
        share: of the states that are made, drawn at random.
        samples: random combinations for each prefix with more choices than can be gone through.
        seed: of those.
    """
    disk = start if start is not None else Disk()
    chance = random.Random(seed)
    seen: set[tuple[int, frozenset[tuple[str, bytes]]]] = set()
    for count in range(len(events) + 1):
        if count:
            disk.perform(events[count - 1])
        for make, kept in disk.states(chance, samples):
            if chance.random() >= share:
                continue
            files = make()
            key = (disk.acknowledged, frozenset(files.items()))
            if key not in seen:
                seen.add(key)
                yield CrashState(
                    operations=count,
                    files=files,
                    folders=frozenset(disk.folders),
                    acknowledged=disk.acknowledged,
                    kept=kept,
                )


def _apply(names: dict[str, int], name: str, inode: int | None) -> None:
    if inode is None:
        names.pop(name, None)
    else:
        names[name] = inode


def _folder(name: str) -> str:
    return name.rpartition("/")[0] or "."


def _content(inode: _Inode, keeps: Sequence[Keep]) -> bytes:
    if not keeps:
        return inode.durable
    content = bytearray(inode.durable)
    for (offset, data), keep in zip(inode.open, keeps, strict=True):
        kept = keep(data)
        if kept is None:
            continue
        if len(content) < offset:
            content.extend(bytes(offset - len(content)))
        content[offset : offset + len(kept)] = kept
    return bytes(content)


def _with(choices: list[bool] | list[Keep], index: int, choice: object) -> list:
    return [*choices[:index], choice, *choices[index + 1 :]]


def _whole(data: bytes) -> bytes | None:
    return data


def _nothing(data: bytes) -> bytes | None:
    return None


def _zeros(data: bytes) -> bytes | None:
    return bytes(len(data))


def _first_blocks(data: bytes) -> bytes | None:
    kept = len(data) // 2 // BLOCK_BYTES * BLOCK_BYTES
    return data[:kept] + bytes(len(data) - kept)


def _last_block(data: bytes) -> bytes | None:
    lost = max(0, len(data) - BLOCK_BYTES)
    return bytes(lost) + data[lost:]


def _some_blocks(seed: float) -> Keep:
    def keep(data: bytes) -> bytes | None:
        chance = random.Random(seed)
        blocks = [data[i : i + BLOCK_BYTES] for i in range(0, len(data), BLOCK_BYTES)]
        return b"".join(block if chance.random() < 0.5 else bytes(len(block)) for block in blocks)

    return keep
