"""Lives on an object store, and what a crash leaves of one: requests that were answered, and those on their way.

A store that answers has made the change for good, so a loss of power takes nothing back. What a crash leaves open is
every request that was sent and not answered: it has been carried out or not, or will be later, when another trainer is
at work already. A request that is given up for want of an answer is on its way too, while its sender goes on.

life.save(hang=Meets("put", "manifests/"))      such a request gets no answer
life.land()                                     now it is carried out, if it still can be
"""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, TypeVar

from dlrm_scale.checkpoint.storage.object_storage import ObjectStorage
from dlrm_scale.checkpoint.storage.storage import Storage
from dlrm_scale.checkpoint.storage.store_calls import Retries, StoreCalls, StoreTimeoutError, _as_os_error
from dlrm_scale.checkpoint.upkeep.merge_plan import MergeTarget
from tests.checkpoint.crash_examine import Findings
from tests.checkpoint.crash_judge import judge
from tests.checkpoint.crash_life import Condition, Life
from tests.checkpoint.faulty_bucket import Bucket

__all__ = ["BucketLife", "BucketState", "bucket_states", "examine_bucket"]

CHANGING = ("put", "end", "delete")
T = TypeVar("T")


@dataclass(frozen=True)
class Sent:
    """A request that changes something leaves for the store."""

    number: int


@dataclass(frozen=True)
class Done:
    """The store carries it out: what became of which objects, None for removed ones."""

    number: int
    request: str
    change: tuple[tuple[str, bytes | None], ...]


@dataclass(frozen=True)
class Told:
    """Somebody was told that a step is saved."""

    step: int


class RecordedBucket(Bucket):
    """Notes when requests leave and when they are carried out; one that `hangs` says so waits for `land`."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Sent | Done | Told] = []
        self.hangs: Callable[[str, str], bool] = lambda kind, name: False
        self.hanging: list[Callable[[], None]] = []
        self._sent = 0

    def do(self, kind: str, path: str, effect: Callable[[], Any]) -> Any:
        name = path.split("/", 2)[-1]
        self.before(kind, name)
        if kind not in CHANGING:
            with self.lock:
                return effect()
        with self.lock:
            self._sent += 1
            number = self._sent
            self.log.append(Sent(number))
        carry_out = partial(self._carry_out, number, f"{kind} {name}", effect)
        if self.hangs(kind, name):
            self.hanging.append(carry_out)
            raise _NoAnswerError
        result = carry_out()
        self.after(kind, name)
        return result

    def land(self) -> set[str]:
        """Carry out what hangs, of which nobody hears; names of the objects that it makes."""
        before = set(self.objects)
        for carry_out in self.hanging:
            with suppress(FileExistsError):
                carry_out()
        self.hanging.clear()
        return {name.removeprefix("b/run/") for name in set(self.objects) - before}

    def _carry_out(self, number: int, request: str, effect: Callable[[], Any]) -> Any:
        with self.lock:
            before = dict(self.objects)
            try:
                return effect()
            finally:
                names = before.keys() | self.objects.keys()
                changed = [n for n in sorted(names) if before.get(n) is not self.objects.get(n)]
                self.log.append(Done(number, request, tuple((n, self.objects.get(n)) for n in changed)))


class _NoAnswerError(Exception):
    """As if the time for an answer were over."""


class _PromptCalls(StoreCalls):
    """Calls without a thread and a wait: a request that hangs has timed out already."""

    def _once(self, what: str, call: Callable[[], T], timeout_seconds: float) -> T:
        try:
            return call()
        except _NoAnswerError:
            raise StoreTimeoutError(errno.ETIMEDOUT, f"{what}: no answer") from None
        except Exception as error:
            failure = _as_os_error(error, what)
            raise failure from (None if failure is error else error)


def prompt_storage(bucket: Bucket, part_bytes: int = 1 << 20) -> ObjectStorage:
    """A storage on a bucket, without threads and patience: the first failure is the answer."""
    retries = Retries(attempts=1)
    storage = ObjectStorage(bucket, "b/run", address="s3://b/run", retries=retries, part_bytes=part_bytes)
    storage._calls = _PromptCalls(retries)
    return storage


class BucketLife(Life):
    """A life whose root is in a bucket: `fail`, `kill` and `beside` meet requests, as `put` and `delete`.

    Args:
        part_bytes: of a multi-part upload.
        config: settings of every trainer.

    Attributes:
        late: manifests that the store made when another trainer or merge had begun, and might have swept their data.
    """

    def __init__(self, *, part_bytes: int = 1 << 20, **config: object) -> None:
        super().__init__(**config)
        self.bucket = RecordedBucket()
        self.bucket.before = lambda kind, name: self._act(0, kind, name)
        self.late: set[str] = set()
        self._part_bytes = part_bytes
        self._programs = 0
        self._hung_in = 0
        self.storage = prompt_storage(self.bucket)

    @property
    def hangs(self) -> bool:
        """Whether a request has got no answer and wasn't carried out yet."""
        return bool(self.bucket.hanging)

    def start(self, *arguments: Any, **options: Any) -> bool:
        """As `Life.start`."""
        self._programs += 1
        return super().start(*arguments, **options)

    def save(self, *, hang: Condition | None = None, **how: Any) -> bool:
        """As `Life.save`; a request that meets `hang` gets no answer."""
        with self._hanging(hang):
            return super().save(**how)

    def merge(self, to: MergeTarget = "auto", *, hang: Condition | None = None, **how: Any) -> bool:
        """As `Life.merge`; a request that meets `hang` gets no answer."""
        self._programs += 1
        with self._hanging(hang):
            return super().merge(to, **how)

    @contextmanager
    def _hanging(self, hang: Condition | None) -> Iterator[None]:
        self.may_fail = hang is not None
        if hang is not None:
            self.bucket.hangs, self._hung_in = hang, self._programs
        try:
            yield
        finally:
            self.bucket.hangs, self.may_fail = lambda kind, name: False, False

    def land(self) -> None:
        """Carry out what hangs."""
        made = self.bucket.land()
        if self._hung_in < self._programs:
            self.late |= {name for name in made if name.startswith("manifests/") and name.endswith(".json")}

    def _storages(self, count: int) -> list[Storage]:
        return [prompt_storage(self.bucket, self._part_bytes) for _ in range(count)]

    def _acknowledge(self) -> None:
        super()._acknowledge()
        with self.bucket.lock:
            self.bucket.log.append(Told(self.step))


@dataclass(frozen=True, kw_only=True)
class BucketState:
    """What a crash may leave.

    Attributes:
        objects: content by name.
        acknowledged: the newest step that somebody was told is saved; 0 for none.
        place: the last request that was carried out, and which of those on their way were too.
        open: how many were on their way.
    """

    objects: dict[str, bytes]
    acknowledged: int
    place: str
    open: int


@dataclass
class _Way:
    """What is known at a place of the log."""

    objects: dict[str, bytes] = field(default_factory=dict)
    open: dict[int, Done] = field(default_factory=dict)
    acknowledged: int = 0
    last: str = "nothing"


def bucket_states(log: list[Sent | Done | Told]) -> Iterator[BucketState]:
    """Every prefix of a log, with every choice of the requests on their way carried out; no state twice."""
    effects = {event.number: event for event in log if isinstance(event, Done)}
    way, seen = _Way(), set()
    for event in log:
        if isinstance(event, Told):
            way.acknowledged = max(way.acknowledged, event.step)
        elif isinstance(event, Sent):
            if event.number in effects:
                way.open[event.number] = effects[event.number]
        else:
            way.open.pop(event.number)
            _apply(way.objects, event)
            way.last = event.request
        for chosen in product([False, True], repeat=len(way.open)):
            objects = dict(way.objects)
            early = [done for done, is_chosen in zip(way.open.values(), chosen, strict=True) if is_chosen]
            for done in early:
                _apply(objects, done)
            key = (way.acknowledged, frozenset(objects.items()))
            if key not in seen:
                seen.add(key)
                yield BucketState(
                    objects=objects,
                    acknowledged=way.acknowledged,
                    place=f"after {way.last}, with {[done.request for done in early]} of {len(way.open)} on their way",
                    open=len(way.open),
                )


def _apply(objects: dict[str, bytes], done: Done) -> None:
    for name, content in done.change:
        if content is None:
            objects.pop(name, None)
        else:
            objects[name] = content


def examine_bucket(life: BucketLife, *, resume_every: int = 0) -> Findings:
    """Judge every state that a crash may leave of a life; from each so many-th a trainer goes on and crashes again.

    Args:
        life: as lived.
        resume_every: 0 for none.
    """
    found = Findings()
    for state in bucket_states(life.bucket.log):
        found.states += 1
        bucket = Bucket()
        bucket.objects = dict(state.objects)
        step, problems = judge(prompt_storage(bucket), encoded=life.encoded, excused=life.late)
        if step < state.acknowledged:
            problems = [*problems, f"step {state.acknowledged} was acknowledged, {step} is found"]
        found.problems += [f"{problem}: {state.place}" for problem in problems]
        if resume_every and found.states % resume_every == 0 and not problems:
            found.resumed += 1
            inner = examine_bucket(_go_on(life, state))
            found.states += inner.states
            found.problems += [f"{problem}, of a run that resumed {state.place}" for problem in inner.problems]
    return found


def _go_on(life: BucketLife, state: BucketState) -> BucketLife:
    again = BucketLife(**life.config)
    again.bucket.objects = dict(state.objects)
    again.acknowledged, again.late = state.acknowledged, set(life.late)
    again.bucket.log = [
        Sent(0),
        Done(0, "the crash", tuple(state.objects.items())),
        Told(state.acknowledged),
    ]
    again.start(tables=life.tables)
    assert again.save()
    assert again.save()
    return again
