"""The interval between saves follows what they cost, by CheckFreq's rule; all times are made up."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest

from dlrm_scale.checkpoint import SaveOutcome
from dlrm_scale.checkpoint.saving.cadence import Cadence, of_slowest_rank
from dlrm_scale.checkpoint.saving.interval import IntervalTuner, SaveCost, wanted_steps
from dlrm_scale.config import CheckpointConfig
from dlrm_scale.train.checkpoint_rows import checkpoint_rows


def _wanted(cost: float, persist: float, recovery: float = 1e9) -> tuple[int, str]:
    return wanted_steps(
        cost_seconds=cost,
        persist_seconds=persist,
        step_seconds=0.1,
        overhead_budget=0.035,
        recovery_point_seconds=recovery,
    )


def test_the_interval_is_the_larger_of_what_the_budget_and_the_writing_ask_for() -> None:
    assert _wanted(0.7, 1.0) == (200, "budget")  # 0.7 s are 3.5 % of 20 s, which are 200 steps
    assert _wanted(0.01, 5.0) == (50, "persist")  # one save at a time
    assert _wanted(0.0, 0.0) == (1, "persist")
    assert _wanted(-0.3, 0.2) == (2, "persist")  # noise


def test_the_recovery_point_goes_before_the_budget_and_the_writing_before_the_recovery_point() -> None:
    # a crash just before the commit costs the interval and the second of writing
    assert _wanted(7.0, 1.0, recovery=11.0) == (100, "recovery point")
    assert _wanted(7.0, 1.0, recovery=1000.0) == (2000, "budget")
    assert _wanted(7.0, 8.0, recovery=11.0) == (80, "recovery point")


def _cost(stall: float, interference: float | None = 0.0, persist: float = 0.1) -> SaveCost:
    return SaveCost(stall_seconds=stall, interference_seconds=interference, persist_seconds=persist)


def _tuner(first_steps: int = 100) -> IntervalTuner:
    return IntervalTuner(first_steps=first_steps, overhead_budget=0.035, recovery_point_seconds=1e9)


def test_an_interval_at_most_doubles_or_halves() -> None:
    tuner = _tuner()
    steps = [tuner.note(_cost(7.0), step_seconds=0.1, baseline=False).steps for _ in range(6)]
    assert steps == [200, 400, 800, 1600, 2000, 2000]
    cheap = [tuner.note(_cost(0.0, persist=0.05), step_seconds=0.1, baseline=False).steps for _ in range(40)]
    assert all(after >= before // 2 for before, after in itertools.pairwise([2000, *cheap]))
    # of the twelve saves remembered one still stalled, which passes for a hiccup
    assert cheap[9] > 100
    assert cheap[-1] == 1


def test_an_interval_shrinks_only_after_some_saves_of_known_interference() -> None:
    tuner, blind = _tuner(), _tuner()
    steps = [tuner.note(_cost(0.1), step_seconds=0.1, baseline=False).steps for _ in range(6)]
    assert steps == [100, 100, 100, 100, 50, 29]  # 0.1 s are 3.5 % of 29 steps
    unknown = [blind.note(_cost(0.1, None), step_seconds=0.1, baseline=False).steps for _ in range(20)]
    assert set(unknown) == {100}


def test_stalls_alone_bound_the_interval_whatever_interference_is_said_to_be() -> None:
    tuner = _tuner(8)
    steps = [tuner.note(_cost(0.7, -44.5), step_seconds=0.1, baseline=False).steps for _ in range(20)]
    assert steps[:6] == [16, 32, 64, 128, 200, 200]
    assert steps[-1] == 200


def test_interference_counts_as_far_as_it_exceeds_its_error() -> None:
    plain, noisy = _tuner(20), _tuner(20)
    for index in range(12):
        found = plain.note(_cost(0.07, 0.63), step_seconds=0.1, baseline=False)
        odd = noisy.note(_cost(0.07, 0.63 + (9.0, -9.0)[index % 2]), step_seconds=0.1, baseline=False)
    assert (found.steps, found.noisy) == (200, False)
    # -8.4 s or 9.6 s: the stalls' own 20 steps stay
    assert (odd.steps, odd.noisy) == (20, True)
    assert odd.error_seconds > 1.0


def test_one_hiccup_of_the_disk_moves_nothing_and_long_stalls_of_every_third_save_do() -> None:
    tuner = _tuner(200)
    for index in range(12):
        hiccup = tuner.note(_cost(30.0 if index == 7 else 0.7), step_seconds=0.1, baseline=False)
        assert hiccup.steps == 200
    often = _tuner(20)
    for index in range(12):
        chosen = often.note(_cost(1.4 if index % 3 == 0 else 0.07), step_seconds=0.1, baseline=False)
    assert chosen.steps > 120  # a mean of 0.51 s; a median would have said 20 steps


def test_the_cost_of_baselines_is_spread_over_the_saves_from_one_to_the_next() -> None:
    tuner = _tuner(1000)
    assert tuner.note(_cost(7.0), step_seconds=0.1, baseline=True).cost_seconds == 7.0
    assert tuner.note(_cost(0.6, 0.4), step_seconds=0.1, baseline=False).cost_seconds == pytest.approx(4.0)
    last = tuner.note(_cost(1.0), step_seconds=0.1, baseline=False)
    assert (last.cost_seconds, last.wanted_steps) == (pytest.approx(7.0 / 3 + 2 / 3), 858)
    # the next one will again be three saves away
    assert tuner.note(_cost(9.0), step_seconds=0.1, baseline=True).cost_seconds == pytest.approx(8.0 / 3 + 2 / 3)


def _outcome(step: int, kind: str = "delta", **values: object) -> SaveOutcome:
    told = {"committed": True, "bytes": 10, "rows": 3, "stall_seconds": 0.25, "persist_seconds": 1.0, **values}
    return SaveOutcome(step=step, seq=step, manifest="", kind=kind, **told)  # type: ignore[arg-type]


class _Trainer:
    """Steps of 1/8 s, of 3/16 s while a save is written for a second; a save stalls for a quarter of a second."""

    def __init__(self, cadence: Cadence, stall_seconds: float = 0.25, persist_seconds: float = 1.0) -> None:
        self.cadence, self.stall_seconds, self.persist_seconds = cadence, stall_seconds, persist_seconds
        self.step, self.now, self.trained = 0, 0.0, 0.0
        self.saved_at: list[int] = []
        self.began: float | None = None
        self.lines: list[dict[str, object]] = []
        cadence.begin(step=0, now_seconds=0.0)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            seconds = 0.1875 if self.began is not None else 0.125
            self.now, self.trained, self.step = self.now + seconds, self.trained + seconds, self.step + 1
            self.cadence.stepped(training_seconds=self.trained, saving=self.began is not None)
            if self.began is not None and self.now - self.began >= self.persist_seconds:
                kind = "baseline" if len(self.saved_at) == 1 else "delta"
                outcome = _outcome(
                    self.saved_at[-1], kind, stall_seconds=self.stall_seconds, persist_seconds=self.persist_seconds
                )
                self.lines.append(self.cadence.ended(outcome))
                self.began = None
            if self.cadence.wishes(step=self.step, now_seconds=self.now, saving=self.began is not None):
                self.save()

    def save(self) -> None:
        self.cadence.saved(step=self.step, now_seconds=self.now)
        self.now += self.stall_seconds
        self.saved_at.append(self.step)
        self.began = self.now


def _cadence(**config: object) -> Cadence:
    return Cadence(CheckpointConfig(**config))


def test_slower_steps_beside_a_save_are_measured_and_the_interval_settles_where_the_budget_is_met() -> None:
    cadence = _cadence(interval="auto", every_steps=50)
    trainer = _Trainer(cadence)
    trainer.run(4000)
    # a save lasts 6 steps of 3/16 s: 3/8 s slower, and 1/4 s of stall, are 3.5 % of 143 steps of 1/8 s
    assert trainer.lines[1]["interference_seconds"] == 0.375
    gaps = [after - before for before, after in itertools.pairwise(trainer.saved_at)]
    assert trainer.saved_at[0] == 50
    assert gaps[0] == 58  # the stall alone; interference counts once its error is known
    assert 140 <= gaps[-1] <= 143  # the interference of one baseline proves nothing
    summary = cadence.summary()
    assert summary["predicted_overhead"] == pytest.approx(0.035, rel=0.1)
    assert summary["measured_overhead"] == pytest.approx(0.035, rel=0.1)
    assert summary["too_noisy_to_predict"] is False
    assert summary["chosen_intervals"][0] == [50, 58]  # type: ignore[index]
    assert (summary["baselines"], summary["deltas"]) == (1, len(trainer.lines) - 1)
    assert (summary["fewest_steps_between"], cadence.conflict()) == (50, None)


def test_a_wanted_recovery_point_is_kept_and_the_run_says_that_it_costs_more() -> None:
    cadence = _cadence(interval="auto", every_steps=500, recovery_point_seconds=5.0)
    trainer = _Trainer(cadence)
    trainer.run(1000)
    assert trainer.saved_at[0] == 40
    # four seconds from one beginning to the next, and one of writing: stall, 6 slow steps, 21 quick ones
    assert {after - before for before, after in itertools.pairwise(trainer.saved_at)} == {27}
    assert "the recovery point goes first" in str(cadence.conflict())
    measured = cadence.summary()["measured_overhead"]
    assert isinstance(measured, float)
    assert measured > 0.1


def test_a_recovery_point_shorter_than_writing_takes_is_said_to_be_missed() -> None:
    cadence = _cadence(interval="auto", every_steps=20, recovery_point_seconds=5.0)
    trainer = _Trainer(cadence, persist_seconds=8.0)
    trainer.run(500)
    assert "a crash may cost more" in str(cadence.conflict())
    assert all(after - before >= 43 for before, after in itertools.pairwise(trainer.saved_at))  # one at a time


def test_seconds_are_counted_from_the_beginning_of_the_save_before() -> None:
    trainer = _Trainer(_cadence(interval="seconds", every_seconds=3.0))
    trainer.run(100)
    # the stall and 6 slow steps, 11/8 s, are part of the three seconds
    assert trainer.saved_at == [24, 43, 62, 81, 100]
    assert trainer.cadence.interval_steps is None
    assert trainer.cadence.summary()["chosen_intervals"] == []


def test_a_save_for_another_reason_puts_off_the_next() -> None:
    trainer = _Trainer(_cadence(interval="auto", every_steps=50))
    trainer.run(40)
    trainer.save()
    trainer.run(57)
    assert trainer.saved_at == [40]  # not 50
    trainer.run(1)
    assert trainer.saved_at == [40, 98]


def test_by_steps_nobody_wishes_and_costs_are_measured_all_the_same() -> None:
    cadence = _cadence(interval="steps", every_steps=40)
    trainer = _Trainer(cadence)
    for _ in range(6):
        trainer.run(40)
        trainer.save()
    trainer.run(20)
    assert trainer.saved_at == [40, 80, 120, 160, 200, 240]
    assert trainer.lines[3]["interval_steps"] == 40
    assert trainer.lines[3]["predicted_overhead"] == 0.625 / 5
    summary = cadence.summary()
    assert summary["measured_overhead"] == pytest.approx(6 * 0.625 / trainer.now)
    stalls = float(str(summary["stall_seconds"]))
    assert summary["stall_share"] == pytest.approx(stalls / trainer.now)
    assert stalls < 6 * 0.625


def test_a_failed_save_leaves_the_interval_as_it_was_and_a_resumed_run_goes_on_with_it() -> None:
    cadence = Cadence(CheckpointConfig(interval="auto", every_steps=50), first_steps=320)
    trainer = _Trainer(cadence)
    trainer.run(320)
    assert trainer.saved_at == [320]
    line = cadence.ended(_outcome(320, committed=False))
    assert (line["interval_steps"], line["predicted_overhead"]) == (320, None)
    assert cadence.summary()["failed"] == 1


def test_before_anything_is_known_nothing_is_claimed() -> None:
    cadence = _cadence(interval="steps", every_steps=1)
    cadence.begin(step=0, now_seconds=0.0)
    assert cadence.summary()["measured_overhead"] is None
    cadence.stepped(training_seconds=1.0, saving=False)
    cadence.saved(step=1, now_seconds=1.0)
    assert cadence.ended(_outcome(1))["interference_seconds"] is None
    assert cadence.summary()["predicted_overhead"] is None


class _Job:
    """A job on a made-up clock, whose saves cost what is said here, so that the truth is known.

    Args:
        step_seconds: of the step of that number.
        stall_seconds: of each save.
        persist_seconds: likewise, at least.
        slower_seconds: by which each step beside a save is slower.
        every_steps: the first interval.
    """

    def __init__(
        self,
        step_seconds: Callable[[int], float],
        stall_seconds: Callable[[], float],
        persist_seconds: Callable[[int], float],
        slower_seconds: float = 0.0,
        every_steps: int = 100,
    ) -> None:
        self.cadence = _cadence(interval="auto", every_steps=every_steps)
        self.step_seconds, self.stall_seconds = step_seconds, stall_seconds
        self.persist_seconds, self.slower_seconds = persist_seconds, slower_seconds
        self.step, self.now, self.trained, self.lost = 0, 0.0, 0.0, 0.0
        self.saves: list[int] = []
        self.cadence.begin(step=0, now_seconds=0.0)

    def run(self, steps: int) -> float:
        """Train, and return the share of the time that these steps truly lost to saves."""
        began, lost = self.now, self.lost
        for _ in range(steps):
            self.step += 1
            saving = bool(self.saves) and self.flying
            slower = self.slower_seconds if saving else 0.0
            seconds = self.step_seconds(self.step) + slower
            self.now, self.trained, self.lost = self.now + seconds, self.trained + seconds, self.lost + slower
            self.cadence.stepped(training_seconds=self.trained, saving=saving)
            wishes = self.cadence.wishes(step=self.step, now_seconds=self.now, saving=saving)
            if saving and self.now >= self.ends:
                kind = "baseline" if len(self.saves) == 1 else "delta"
                self.flying = False
                times = {"stall_seconds": self.stall, "persist_seconds": self.ends - self.began}
                self.line = self.cadence.ended(_outcome(self.saves[-1], kind, **times))
            elif wishes:
                self._save()
        return (self.lost - lost) / (self.now - began)

    def _save(self) -> None:
        self.cadence.saved(step=self.step, now_seconds=self.now)
        self.stall = self.stall_seconds() * (10 if not self.saves else 1)
        self.now, self.lost, self.flying = self.now + self.stall, self.lost + self.stall, True
        rows_steps = self.step - (self.saves[-1] if self.saves else 0)
        self.began, self.ends = self.now, self.now + self.persist_seconds(rows_steps)
        self.saves.append(self.step)

    def gaps(self, last: int) -> list[int]:
        """Steps between the last saves."""
        return [after - before for before, after in itertools.pairwise(self.saves[-last - 1 :])]


def test_a_quiet_job_ends_within_the_budget_and_its_interval_stays() -> None:
    job = _Job(lambda step: 0.1, lambda: 0.05, lambda steps: 1.0, slower_seconds=0.01)
    job.run(6000)
    assert job.run(4000) == pytest.approx(0.035, rel=0.1)
    assert max(job.gaps(20)) - min(job.gaps(20)) <= 1
    # ten steps of a save are slower by 0.01 s, and 0.15 s in all are 3.5 % of 43 steps
    assert 42 <= job.gaps(1)[0] <= 47


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("slower_seconds", [0.0, 0.004])
def test_a_small_job_of_noisy_steps_and_bursts_ends_within_the_budget(seed: int, slower_seconds: float) -> None:
    random = np.random.default_rng(seed)

    def step_seconds(step: int) -> float:
        burst = 10.0 if step % 150 < 6 else 1.0
        return float(0.01 * burst * random.lognormal(0.0, math.log(3.0)))

    def stall_seconds() -> float:
        return float(random.uniform(0.005, 0.1))

    job = _Job(step_seconds, stall_seconds, lambda steps: 0.1, slower_seconds=slower_seconds)
    job.run(10_000)
    # a stall of 0.05 s is 3.5 % of 143 steps of 0.01 s, which is the median
    assert job.run(20_000) < 0.035 * 1.25
    gaps = job.gaps(40)
    assert min(gaps) > 70
    assert max(gaps) < 1000
    assert all(after <= 2 * before + 2 for before, after in itertools.pairwise(gaps))


def test_what_a_noisy_job_loses_is_not_predicted_and_the_table_says_so() -> None:
    random = np.random.default_rng(0)
    job = _Job(lambda step: float(0.01 * random.lognormal(0.0, 1.5)), lambda: 0.005, lambda steps: 0.5)
    job.run(5000)
    summary = job.cadence.summary()
    assert summary["too_noisy_to_predict"] is True
    assert summary["predicted_overhead"] is None
    assert (job.line["too_noisy_to_predict"], job.line["predicted_overhead"]) == (True, None)
    assert min(job.gaps(20)) >= 14  # never below the stall's own, nor more often than saves are written
    cost = dict(checkpoint_rows(of_slowest_rank([summary]), 1))["cost of checkpoints"]
    assert cost.endswith("; too noisy to predict")


def test_a_job_with_a_slow_disk_saves_no_more_often_than_the_disk_takes() -> None:
    job = _Job(lambda step: 0.1, lambda: 0.01, lambda steps: 5.0 + 0.02 * steps, every_steps=10)
    job.run(2000)
    assert job.run(2000) < 0.035
    assert all(60 <= gap <= 70 for gap in job.gaps(10))


@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_a_job_whose_steps_change_midway_is_within_the_budget_again(factor: float) -> None:
    random = np.random.default_rng(1)

    def step_seconds(step: int) -> float:
        return float(0.1 * (factor if step > 5000 else 1.0) * random.uniform(0.8, 1.2))

    job = _Job(step_seconds, lambda: 0.2, lambda steps: 1.5, slower_seconds=0.005)
    before = job.run(5000)
    job.run(3000)
    after = job.run(6000)
    assert before < 0.05  # the first save is a baseline and takes ten times as long
    assert after < 0.035 * 1.1
    cost_seconds = 0.2 + 0.005 * 1.5 / (0.1 * factor + 0.005)
    assert job.gaps(1)[0] == pytest.approx(cost_seconds / (0.035 * 0.1 * factor), rel=0.2)


def test_what_saves_cost_is_told_of_the_rank_that_lost_most() -> None:
    summaries = []
    for rank, times in enumerate((1.0, 4.0, 2.0)):
        trainer = _Trainer(_cadence(interval="steps", every_steps=40), stall_seconds=0.25 * times)
        for _ in range(6):
            trainer.run(40)
            trainer.save()
        trainer.run(20)
        summaries.append(trainer.cadence.summary() | {"chosen_intervals": [[rank, rank]]})
    found = of_slowest_rank(summaries)
    costs = ("stall_seconds", "interference_seconds", "persist_seconds", "stall_share", "measured_overhead")
    assert {name: found[name] for name in costs} == {name: summaries[1][name] for name in costs}
    assert found["stall_seconds"] == 6 * 1.0
    assert found["slowest_rank"] == 1
    # what was decided, and on what ground, is rank 0's
    assert found["chosen_intervals"] == [[0, 0]]
    assert found["predicted_overhead"] == summaries[0]["predicted_overhead"] != summaries[1]["predicted_overhead"]
