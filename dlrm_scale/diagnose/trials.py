"""Trying settings that may help: pairs of rounds, with a setting and without it."""

from collections.abc import Callable
from dataclasses import replace

import torch

from dlrm_scale.config import Config
from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.diagnose.data import few_streams, window_steps
from dlrm_scale.diagnose.measurements import Measurements, interval, paired_ratios
from dlrm_scale.diagnose.rounds import Lengths, Rehearsal, Round, Rounds
from dlrm_scale.diagnose.settings import (
    Candidate,
    Trial,
    candidates,
    is_better,
    predicted_gain,
    with_setting,
)
from dlrm_scale.diagnose.verdict import Verdict
from dlrm_scale.errors import DlrmScaleError
from dlrm_scale.host_cores import usable_cores
from dlrm_scale.host_memory import host_memory
from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.train.run_folder import check_config

__all__ = ["Trials"]

_PAIRS = 3
_LONGER = 8
"""A round for readers takes no more times as long as another."""
_HOPELESS = 0.5
"""A setting that is this much slower in a pair of rounds isn't measured again."""


class Trials:
    """Measures settings against the run as it is configured, on this rank together with the others.

    Args:
        rounds: runs them.
        base: the model as configured.
        dataset: sets the tables' rows of other models.
        ranks: the process group.
        lengths: of a round.
        rounds_limit: pairs of rounds at most.

    Attributes:
        notes: what a reader must know.
    """

    def __init__(
        self, rounds: Rounds, base: Rehearsal, dataset: Dataset, ranks: Ranks, lengths: Lengths, rounds_limit: int
    ) -> None:
        self._rounds = rounds
        self._base = base
        self._config = base.config
        self._dataset = dataset
        self._ranks = ranks
        self._lengths = lengths
        self._rounds_limit = rounds_limit
        self.notes: list[str] = []

    def run(
        self, m: Measurements, verdict: Verdict, has_time: Callable[[], bool], say: Callable[[str], None]
    ) -> list[Trial]:
        """Try what may help against a verdict; a collective.

        Args:
            m: measured without any of it.
            verdict: reached without it.
            has_time: whether another trial may begin; asked on all ranks.
            say: told of progress.

        Raises:
            TrainingError: a rank was told to stop.
        """
        cores = max(1, usable_cores() // self._ranks.local_ranks)
        found = candidates(
            self._config,
            verdict,
            cores_per_rank=int(str(self._ranks.broadcast_object(cores))),
            heaviest_table=self._heaviest_table(verdict.rank),
        )
        trials = []
        for candidate in found:
            if has_time():
                trials.append(self._try(candidate, m, verdict))
                say(f"tried {candidate.setting}")
            else:
                trials.append(_untried(candidate, "not tried: the time limit was reached"))
        return trials

    def _try(self, candidate: Candidate, m: Measurements, verdict: Verdict) -> Trial:
        source, rounds = candidate.source, self._rounds
        changed = base = self._base
        try:
            config = with_setting(self._config, candidate)
            check_config(config)
            if candidate.rebuilds:
                lacking = self._lacks_memory()
                if lacking:
                    return _untried(candidate, lacking)
                changed = Rehearsal(config, self._dataset, self._ranks)
        except DlrmScaleError as error:
            return _untried(candidate, f"not tried: {error.message}")
        lengths = self._lengths_for(config)
        loader_seconds = rounds.load(config, source, lengths).seconds if source != "synthetic" else None
        predicted = predicted_gain(candidate, m, verdict, config=self._config, loader_seconds=loader_seconds)
        growth = config.data.batch_size / self._config.data.batch_size
        without: list[float] = []
        with_it: list[float] = []
        for number in range(min(_PAIRS, self._rounds_limit)):
            for is_base in (True, False) if number % 2 == 0 else (False, True):
                if is_base:
                    without.append(self._paired(rounds.train(base, self._config, source, lengths), candidate))
                else:
                    with_it.append(self._paired(rounds.train(changed, config, source, lengths), candidate))
            if growth * without[-1] / with_it[-1] < _HOPELESS:
                break
        measured = interval([growth * ratio for ratio in paired_ratios(without, with_it)])
        return Trial(
            setting=candidate.setting,
            predicted=predicted,
            measured=measured,
            better=is_better(measured),
            note=candidate.caution,
        )

    def _lengths_for(self, config: Config) -> Lengths:
        """A round in which readers read as much as it takes: what they read before the clock starts would flatter it.

        They read as many windows at a time as there are readers, so the pattern repeats after so many windows.
        """
        if config.data.readers == 1:
            return self._lengths
        steps = config.data.readers * window_steps(few_streams(config.data, self._ranks.ranks))
        least = self._lengths.steps
        return replace(self._lengths, steps=max(least, min(steps, _LONGER * least)))

    def _paired(self, measured: Round, candidate: Candidate) -> float:
        # A plan has as many threads as another. Threads that a setting adds hinder each other, and that must count.
        on_cpu = self._ranks.device.type == "cpu"
        return measured.undisturbed_seconds if on_cpu and candidate.is_plan else measured.seconds

    def _heaviest_table(self, rank: int | None) -> str | None:
        """Name the table with most lookups on a rank, if it lies there whole."""
        if rank is None:
            return None
        lookups = self._rounds.lookups_per_table(self._config, self._lengths)
        whole = [
            table.spec
            for table in self._base.sharded.layout.tables
            if not table.replicated and [region.rank for region in table.regions] == [rank]
        ]
        if not whole:
            return None
        heaviest = max(whole, key=lambda spec: lookups[spec.name] * spec.dim).name
        all_there = sum(lookups[spec.name] for spec in whole)
        self.notes.append(
            f"of the lookups in tables that rank {rank} has alone, {heaviest} has "
            f"{lookups[heaviest] / max(1, all_there):.0%}"
        )
        return heaviest

    def _lacks_memory(self) -> str:
        """Say why there can't be a second model, on all ranks alike; "" if there can."""
        needed = sum(s.weight.nbytes + sum(t.nbytes for t in s.state.values()) for s in self._base.sharded.local_shards)
        if self._ranks.device.type == "cuda":
            free = torch.cuda.mem_get_info(self._ranks.device)[0]
        else:
            free = host_memory().free_bytes // self._ranks.local_ranks
        # a plan that is less even may put twice as much on a rank
        lacking = any(self._ranks.gather_objects(2 * needed > free))
        return "not tried: there is no memory for a second model" if lacking else ""


def _untried(candidate: Candidate, why: str) -> Trial:
    return Trial(setting=candidate.setting, predicted=None, measured=None, better=False, note=why)
