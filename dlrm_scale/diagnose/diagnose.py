"""Finding out what holds a training run back: rounds, a verdict, and trials of what might help.

Nothing outlasts it: no run folder, no checkpoint, and the weights are thrown away.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dlrm_scale.config import Config
from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.data.loading.loader import TrainLoader
from dlrm_scale.diagnose.data import Source, Storage, few_streams, window_steps
from dlrm_scale.diagnose.measurements import Interval, Measurements, interval
from dlrm_scale.diagnose.rounds import Lengths, Rehearsal, Round, Rounds
from dlrm_scale.diagnose.settings import Trial, recommended
from dlrm_scale.diagnose.trials import Trials
from dlrm_scale.diagnose.verdict import Verdict, reach_verdict
from dlrm_scale.errors import ConfigError
from dlrm_scale.host_memory import host_memory
from dlrm_scale.install import check_install
from dlrm_scale.recipes import load_config
from dlrm_scale.sharding.ranks import Ranks, close_ranks, init_ranks
from dlrm_scale.train.memory.memory_check import MemoryCheck
from dlrm_scale.train.memory.process_memory import peak_resident_bytes
from dlrm_scale.train.run_folder import check_config
from dlrm_scale.train.setup import device_kind, set_threads
from dlrm_scale.train.stop import StopRequest

__all__ = ["DiagnoseRequest", "Diagnosis", "diagnose", "diagnose_rank", "resolve_request"]

_WARMUP_STEPS = 5
_DELAY_SHARE = 0.1
"""Of a step: with more disturbance the reader is warned."""
_SOURCES: tuple[Source, ...] = ("synthetic", "warm", "cold")


@dataclass(frozen=True, kw_only=True)
class DiagnoseRequest:
    """What a user asked for; the same on every rank.

    Attributes:
        config: complete and checked.
        steps: timed steps of a round.
        rounds: of each kind.
        what_if: try settings that may help.
        time_limit_seconds: no round is begun after it.
    """

    config: Config
    steps: int
    rounds: int
    what_if: bool
    time_limit_seconds: float


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What was found.

    Attributes:
        ranks: how many.
        device: `cpu` or `cuda`.
        steps: timed steps of a round.
        rounds: of each kind that were run.
        measurements: of the run as configured.
        prep_stall: share of a step.
        fetch_stall: share of a step.
        exposed_communication: share of a step, or None.
        verdict: what holds it back.
        trials: of settings.
        recommended: the setting that gained most, or None.
        notes: what a reader must know.
        seconds: all of it took.
    """

    ranks: int
    device: str
    steps: int
    rounds: int
    measurements: Measurements
    prep_stall: Interval
    fetch_stall: Interval
    exposed_communication: float | None
    verdict: Verdict
    trials: list[Trial]
    recommended: Trial | None
    notes: list[str]
    seconds: float


def resolve_request(
    source: str, overrides: Sequence[str], *, steps: int, rounds: int, what_if: bool, time_limit_seconds: float
) -> DiagnoseRequest:
    """Read the config as `train` would; a run's folder isn't needed and not looked at.

    Raises:
        ConfigError: no dataset is named, or a setting is wrong; PlanError: sharding that isn't allowed.
    """
    config = load_config(source, overrides)
    if not config.data.path:
        raise ConfigError("data.path is not set", remedy="add --set data.path=DATASET")
    check_config(config)
    return DiagnoseRequest(
        config=config, steps=steps, rounds=rounds, what_if=what_if, time_limit_seconds=time_limit_seconds
    )


def diagnose_rank(request: DiagnoseRequest, stop: StopRequest) -> Diagnosis:
    """Diagnose on this rank; called on every rank with the same request.

    Raises:
        DlrmScaleError: whatever a user can mend; a TrainingError with exit code 130 after a signal.
    """
    config = request.config
    kind = device_kind(config)
    check_install(device=kind)
    ranks = init_ranks(kind, config.train.collective_timeout_seconds)
    try:
        dataset = Dataset.open(Path(config.data.path))
        return diagnose(request, dataset, Storage(dataset), ranks, stop)
    finally:
        close_ranks()


def diagnose(
    request: DiagnoseRequest, dataset: Dataset, storage: Storage, ranks: Ranks, stop: StopRequest
) -> Diagnosis:
    """Measure, conclude, and try what might help; a collective.

    Args:
        request: the same on every rank.
        dataset: of `data.path`.
        storage: of its files.
        ranks: the process group.
        stop: set by a signal.

    Raises:
        DlrmScaleError: whatever a user can mend; a TrainingError with exit code 130 after a signal.
    """
    return _Session(request, dataset, storage, ranks, stop).run()


class _Session:
    def __init__(
        self, request: DiagnoseRequest, dataset: Dataset, storage: Storage, ranks: Ranks, stop: StopRequest
    ) -> None:
        self._started = time.perf_counter()
        self._request = request
        self._config = request.config
        self._dataset = dataset
        self._ranks = ranks
        self._rounds = Rounds(dataset, storage, ranks, stop)
        self._notes: list[str] = []

    def run(self) -> Diagnosis:
        self._check_equal_requests()
        set_threads(self._config, self._ranks.local_ranks)
        # refuses what `train` would: too many ranks, no rows, more memory than there is
        plain = TrainLoader(self._dataset, self._config.data, rank=self._ranks.rank, ranks=self._ranks.ranks, epochs=1)
        plain.close()
        self._lengths = self._choose_lengths(plain.steps_per_epoch)
        self._say("building the model")
        memory = MemoryCheck(self._config, self._dataset, plain, self._ranks)
        memory.check_dense()
        rehearsal = Rehearsal(self._config, self._dataset, self._ranks, memory.check)
        self._notes += [*memory.warnings, *rehearsal.notes]
        self._rounds.train(rehearsal, self._config, "synthetic", self._lengths)
        measurements = self._measure(rehearsal, plain.steps_per_epoch)
        verdict = reach_verdict(measurements)
        self._say(f"verdict: {verdict.bound}")
        trials: list[Trial] = []
        if self._request.what_if:
            trying = Trials(self._rounds, rehearsal, self._dataset, self._ranks, self._lengths, self._request.rounds)
            trials = trying.run(measurements, verdict, self._has_time, self._say)
            self._notes += trying.notes
        return Diagnosis(
            ranks=self._ranks.ranks,
            device=self._ranks.device.type,
            steps=self._lengths.steps,
            rounds=len(measurements.cold_seconds),
            measurements=measurements,
            prep_stall=measurements.prep_stall,
            fetch_stall=measurements.fetch_stall,
            exposed_communication=measurements.exposed_communication,
            verdict=verdict,
            trials=trials,
            recommended=recommended(trials),
            notes=self._notes,
            seconds=time.perf_counter() - self._started,
        )

    def _check_equal_requests(self) -> None:
        """Refuse ranks that were started differently, on every rank: they would wait for each other for ever."""
        values = self._config.model_dump(mode="json")
        values["data"].pop("path")
        values["run"].pop("path")
        r = self._request
        views = self._ranks.gather_objects((values, r.steps, r.rounds, r.what_if, self._dataset.fingerprint))
        different = [rank for rank, view in enumerate(views) if view != views[0]]
        if different:
            raise ConfigError(
                f"rank {different[0]} was started with other settings or another dataset than rank 0",
                remedy="give every host the same command and the same dataset",
            )

    def _choose_lengths(self, steps_per_epoch: int) -> Lengths:
        """A round covers whole windows, of each reader as many, so that each reads as much as the others."""
        window, readers = window_steps(few_streams(self._config.data, self._ranks.ranks)), self._config.data.readers
        steps = self._request.steps
        cycle = window * readers if window * readers <= 2 * steps else window
        if cycle <= 2 * steps:
            steps = -(-steps // cycle) * cycle
        else:
            self._note(
                f"a window of data.window_rows = {self._config.data.window_rows} lasts {cycle} steps: rounds of "
                f"{steps} steps rarely read one (use --steps {cycle} or more)"
            )
        lengths = Lengths(warmup_steps=_WARMUP_STEPS, steps=steps)
        if lengths.all_steps > steps_per_epoch:
            self._note(
                f"an epoch has {steps_per_epoch} steps, a round {lengths.all_steps}: it reads rows again, from memory"
            )
        return lengths

    def _measure(self, rehearsal: Rehearsal, steps_per_epoch: int) -> Measurements:
        config, lengths, rounds = self._config, self._lengths, self._rounds
        trained: dict[Source, list[Round]] = {source: [] for source in _SOURCES}
        alone: dict[Source, list[Round]] = {"warm": [], "cold": []}
        for number in range(self._request.rounds):
            if number and not self._has_time():
                self._note(f"the time limit left {number} of {self._request.rounds} rounds")
                break
            for source in _SOURCES if number % 2 == 0 else _SOURCES[::-1]:
                if source in alone:
                    alone[source].append(rounds.load(config, source, lengths))
                trained[source].append(rounds.train(rehearsal, config, source, lengths))
            told = ", ".join(f"{source} {1000 * trained[source][-1].seconds:.1f}" for source in _SOURCES)
            self._say(f"round {number + 1} of {self._request.rounds}: ms a step: {told}")
        cold_start = rounds.first_batch(config, "cold").seconds
        warm_start = rounds.first_batch(config, "warm").seconds
        shares = [r.still_cached_share for r in trained["cold"] if r.still_cached_share is not None]
        if shares and max(shares) > 0.05:
            self._note(
                f"{max(shares):.0%} of the files stayed in memory although they were dropped (the file system ignores "
                "it, or another process uses them): cold rounds were not cold"
            )
        delay_share = interval([r.delay_seconds / r.seconds for r in trained["synthetic"]]).median
        if delay_share > _DELAY_SHARE:
            self._note(
                f"other programs, or more threads than cores, kept a rank from running for {delay_share:.0%} of the "
                "time: shares are uncertain, repeat this on an idle host"
            )
        local_ranks = self._ranks.local_ranks
        peaks = self._ranks.gather_objects(peak_resident_bytes())
        size_bytes = sum(part.size_bytes for part in self._dataset.manifest.parts)
        on_cpu = self._ranks.device.type == "cpu"
        memory_bytes = self._ranks.broadcast_object(host_memory().total_bytes)
        assert isinstance(memory_bytes, int)
        return Measurements(
            rows_per_step=config.data.batch_size,
            synthetic_seconds=_seconds(trained["synthetic"]),
            warm_seconds=_seconds(trained["warm"]),
            cold_seconds=_seconds(trained["cold"]),
            synthetic_wait_seconds=_waits(trained["synthetic"]),
            warm_wait_seconds=_waits(trained["warm"]),
            cold_wait_seconds=_waits(trained["cold"]),
            warm_loader_seconds=_seconds(alone["warm"]),
            cold_loader_seconds=_seconds(alone["cold"]),
            busy_seconds_per_rank=_medians([r.busy_seconds_per_rank for r in trained["synthetic"]]) if on_cpu else (),
            collective_seconds_per_rank=_medians([r.collective_seconds_per_rank for r in trained["synthetic"]])
            if on_cpu
            else (),
            delay_share=delay_share,
            major_faults_per_step=interval([r.major_faults for r in trained["synthetic"]]).median,
            peak_memory_bytes_per_rank=tuple(int(str(peak)) for peak in peaks),
            host_memory_bytes=memory_bytes,
            local_ranks=local_ranks,
            epoch_start_seconds=(warm_start, cold_start),
            steps_per_epoch=steps_per_epoch,
            still_cached_share=max(shares) if shares else None,
            dataset_bytes=size_bytes,
            bytes_per_row=size_bytes / max(1, self._dataset.rows),
        )

    def _has_time(self) -> bool:
        left = self._request.time_limit_seconds - (time.perf_counter() - self._started)
        return bool(self._ranks.broadcast_object(left > 0))

    def _note(self, text: str) -> None:
        self._notes.append(text)

    def _say(self, text: str) -> None:
        if self._ranks.rank == 0:
            sys.stderr.write(f"{time.perf_counter() - self._started:6.1f} s  {text}\n")
            sys.stderr.flush()


def _seconds(rounds: Sequence[Round]) -> tuple[float, ...]:
    return tuple(r.seconds for r in rounds)


def _waits(rounds: Sequence[Round]) -> tuple[float, ...]:
    return tuple(r.wait_seconds for r in rounds)


def _medians(rounds: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Median over rounds, by rank."""
    return tuple(interval(values).median for values in zip(*rounds, strict=True))
