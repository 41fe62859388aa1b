"""Runs a pass over the input: several files at a time, and within each file several pieces at a time.

    file 0   read ─ piece ─ piece ─ piece …      one thread reads a file in order, …
                      │       │       │
             parse, map   parse, map   …         … any worker takes the next piece, of whichever file, …
                      │       │       │
             consume ─┴───────┴───────┴─ …       … and the reading thread consumes the results in order.

Threads suffice: the parser, the vocabularies, decompression and writing all release the GIL. At most `jobs` of them
compute at a time; pieces in flight are bounded, and with them memory.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from dlrm_scale.data.source.inputs import InputFile
from dlrm_scale.data.stoppable import StoppedError, run_until_error

__all__ = ["OnProgress", "PassProgress", "ProgressReport", "Workers", "files_at_a_time", "pieces_in_flight"]

P = TypeVar("P")
T = TypeVar("T")
_END = object()


def files_at_a_time(jobs: int, files: int) -> int:
    """How many files are read at a time: reading and decompressing one keeps about two workers busy."""
    return min(files, -(-jobs // 2))


def pieces_in_flight(jobs: int, files: int) -> int:
    """How many pieces are in memory at most: one in each worker, one waiting for it, one being read in each file."""
    return 2 * jobs + files_at_a_time(jobs, files)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressReport:
    """How far a pass over the input is.

    Attributes:
        name: what the pass does.
        step: its number, from 1.
        steps: number of passes.
        done_bytes: stored input bytes read.
        total_bytes: stored input bytes of all files.
        rows: rows parsed; 0 in a pass that counts lines.
        bad_rows: rows left out.
        earlier_bytes: of `done_bytes`, those of files that an earlier process finished: no time was spent on them.
        earlier_rows: of `rows`, the same.
    """

    name: str
    step: int
    steps: int
    done_bytes: int
    total_bytes: int
    rows: int
    bad_rows: int
    earlier_bytes: int = 0
    earlier_rows: int = 0


OnProgress = Callable[[ProgressReport], None]


class PassProgress:
    """Adds up what the threads of one pass have done.

    Args:
        name: what the pass does.
        step: its number, from 1.
        steps: number of passes.
        files: all input files.
        on_progress: called after each piece, from the threads, one at a time; None: nobody is told.
    """

    def __init__(
        self, name: str, step: int, steps: int, files: Sequence[InputFile], on_progress: OnProgress | None
    ) -> None:
        self._about = (name, step, steps)
        self._total_bytes = sum(file.size_bytes for file in files)
        self._done_bytes = [0] * len(files)
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._rows = self._bad_rows = 0
        self._earlier_bytes = self._earlier_rows = 0

    def tick(self, index: int, position_bytes: int, *, rows: int = 0, bad_rows: int = 0) -> None:
        """Report that file `index` has been read up to a position, with that many more rows."""
        self._add(index, position_bytes, rows, bad_rows, earlier=False)

    def skip(self, index: int, size_bytes: int, *, rows: int, bad_rows: int) -> None:
        """Report that an earlier process finished file `index`."""
        self._add(index, size_bytes, rows, bad_rows, earlier=True)

    def _add(self, index: int, position_bytes: int, rows: int, bad_rows: int, *, earlier: bool) -> None:
        if self._stop.is_set():
            raise StoppedError
        with self._lock:
            self._done_bytes[index] = position_bytes
            self._rows += rows
            self._bad_rows += bad_rows
            if earlier:
                self._earlier_bytes += position_bytes
                self._earlier_rows += rows
            if self._on_progress is not None:
                name, step, steps = self._about
                self._on_progress(
                    ProgressReport(
                        name=name,
                        step=step,
                        steps=steps,
                        done_bytes=sum(self._done_bytes),
                        total_bytes=self._total_bytes,
                        rows=self._rows,
                        bad_rows=self._bad_rows,
                        earlier_bytes=self._earlier_bytes,
                        earlier_rows=self._earlier_rows,
                    )
                )

    def stop(self) -> None:
        """Make every thread end at its next tick."""
        self._stop.set()


class Workers:
    """Threads for one pass; a context manager.

    Args:
        jobs: threads that compute at a time.
        files: input files.
    """

    def __init__(self, jobs: int, files: int) -> None:
        self._files = files
        self._pool = ThreadPoolExecutor(jobs, thread_name_prefix="preprocess")
        self._readers = ThreadPoolExecutor(files_at_a_time(jobs, files), thread_name_prefix="preprocess-file")
        self._computing = threading.Semaphore(jobs)
        self._room = threading.Semaphore(pieces_in_flight(jobs, files))

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *error: object) -> None:
        self._readers.shutdown()
        self._pool.shutdown()

    def over_files(self, work: Callable[[int], T], progress: PassProgress) -> list[T]:
        """Call `work(i)` for each file, several at a time.

        Returns:
            The results in file order.

        Raises:
            Exception: the error of the first file, in order, that failed by itself; the others are stopped.
        """
        return run_until_error(self._readers, work, range(self._files), progress.stop)

    def over_pieces(self, pieces: Iterable[P], work: Callable[[P], T], consume: Callable[[T], None]) -> None:
        """Read pieces in order, work on them in parallel, consume the results in order; from `work` of `over_files`.

        Args:
            pieces: of one file; iterated in this thread.
            work: any thread.
            consume: this thread.

        Raises:
            Exception: the first error in the order of the file.
        """
        pending: deque[Future[T]] = deque()
        iterator = iter(pieces)
        try:
            while True:
                with self._computing:
                    piece: Any = next(iterator, _END)
                if piece is _END:
                    break
                # A thread never waits for room while its own results could make some.
                while not self._room.acquire(blocking=not pending):
                    self._consume_first(pending, consume)
                pending.append(self._pool.submit(self._compute, work, piece))
                while pending and pending[0].done():
                    self._consume_first(pending, consume)
            while pending:
                self._consume_first(pending, consume)
        finally:
            for future in pending:
                future.cancel()
            wait(pending)
            if pending:
                self._room.release(len(pending))

    def _compute(self, work: Callable[[P], T], piece: P) -> T:
        with self._computing:
            return work(piece)

    def _consume_first(self, pending: deque[Future[T]], consume: Callable[[T], None]) -> None:
        result = pending[0].result()
        with self._computing:
            consume(result)
        pending.popleft()
        self._room.release()
