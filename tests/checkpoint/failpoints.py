"""Named places of a save at which a rank can be killed, told from what it does with storage, store and touched rows.

every rank        before_freeze, after_freeze                        in the stall
                  after_snapshot, before_write, half_written, before_sync, after_write, before_vote, after_vote
rank 0 goes on    before_manifest, half_a_manifest, before_link, after_link, after_link_synced, before_outcome,
                  after_outcome, in_retention, in_retention_of_data
every rank        before_release, after_release                      in the next save, or in a wait
"""

from collections.abc import Callable
from dataclasses import dataclass

from dlrm_scale.touched_rows import TouchedRows
from tests.checkpoint.faulty_storage import Trace

__all__ = ["POINTS", "Point", "TracedTouchedRows", "arm"]


@dataclass(frozen=True)
class Point:
    """Before or after an operation whose name contains `part`; `{rank}` in it is the rank's number.

    Attributes:
        after: after the operation, not before it.
        operation: as `Trace` calls it.
        part: of the name.
        nth: which such operation since the point was armed.
        every_rank: every rank comes there, not rank 0 alone.
    """

    after: bool
    operation: str
    part: str = ""
    nth: int = 1
    every_rank: bool = True


_OWN = "-r{rank}.safetensors"

POINTS = {
    "in_start": Point(False, "sync_folder", "starts", every_rank=False),
    "in_sweep": Point(False, "remove", "data/", every_rank=False),
    "before_freeze": Point(False, "freeze"),
    "after_freeze": Point(True, "freeze"),
    "after_snapshot": Point(False, "create", _OWN),
    "before_write": Point(True, "create", _OWN),
    "half_written": Point(True, "write", _OWN, nth=3),
    "before_sync": Point(False, "sync", _OWN),
    "after_write": Point(True, "sync", _OWN),
    "before_vote": Point(False, "vote"),
    "after_vote": Point(True, "vote"),
    "before_manifest": Point(False, "create", ".tmp", every_rank=False),
    "half_a_manifest": Point(False, "write", ".tmp", nth=2, every_rank=False),
    "before_link": Point(False, "link", "manifests/", every_rank=False),
    "after_link": Point(True, "link", "manifests/", every_rank=False),
    "after_link_synced": Point(True, "sync_folder", "manifests", nth=2, every_rank=False),
    "before_outcome": Point(False, "outcome", every_rank=False),
    "after_outcome": Point(True, "outcome", every_rank=False),
    "in_retention": Point(False, "remove", ".json", nth=3, every_rank=False),
    "in_retention_of_data": Point(True, "remove", "data/", nth=2, every_rank=False),
    "before_release": Point(False, "release"),
    "after_release": Point(True, "release"),
}


class TracedTouchedRows(TouchedRows):
    """Touched rows that tell a trace when they are frozen, released or merged back."""

    trace: Trace

    def freeze(self) -> list:
        return self._told("freeze", super().freeze)

    def release(self, *, baseline: bool = False) -> None:
        return self._told("release", lambda: super(TracedTouchedRows, self).release(baseline=baseline))

    def merge_back(self) -> None:
        return self._told("merge_back", super().merge_back)

    def _told(self, operation: str, work: Callable[[], object]) -> object:
        self.trace.note(operation, "")
        done = work()
        if self.trace.after is not None:
            self.trace.after(operation, "")
        return done


def arm(trace: Trace, point: Point, rank: int, strike: Callable[[], None]) -> None:
    """Call `strike` when this rank comes to a point."""
    part, left = point.part.format(rank=rank), point.nth

    def come(operation: str, name: str) -> None:
        nonlocal left
        if operation == point.operation and part in name:
            left -= 1
            if left == 0:
                strike()

    if point.after:
        trace.after = come
    else:
        trace.act = lambda index, operation, name: come(operation, name)
