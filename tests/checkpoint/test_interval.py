"""The interval between saves follows what they cost, by CheckFreq's rule; all times are made up."""

import itertools

import pytest

from dlrm_scale.checkpoint import SaveOutcome
from dlrm_scale.checkpoint.saving.cadence import Cadence, of_slowest_rank
from dlrm_scale.checkpoint.saving.interval import IntervalTuner, SaveCost, wanted_steps
from dlrm_scale.config import CheckpointConfig


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


def _cost(stall: float, interference: float = 0.0, persist: float = 0.1) -> SaveCost:
    return SaveCost(stall_seconds=stall, interference_seconds=interference, persist_seconds=persist)


def _tuner(first_steps: int = 100) -> IntervalTuner:
    return IntervalTuner(first_steps=first_steps, overhead_budget=0.035, recovery_point_seconds=1e9)


def test_an_interval_at_most_doubles_or_halves() -> None:
    tuner = _tuner()
    steps = [tuner.note(_cost(7.0), step_seconds=0.1, baseline=False).steps for _ in range(6)]
    assert steps == [200, 400, 800, 1600, 2000, 2000]
    cheap = [tuner.note(_cost(0.0), step_seconds=0.1, baseline=True).steps for _ in range(12)]
    assert cheap == [1000, 500, 250, 125, 63, 32, 16, 8, 4, 2, 1, 1]


def test_the_cost_of_a_baseline_is_spread_over_the_saves_since() -> None:
    tuner = _tuner(1000)
    assert tuner.note(_cost(7.0), step_seconds=0.1, baseline=True).cost_seconds == 7.0
    assert tuner.note(_cost(0.6, 0.4), step_seconds=0.1, baseline=False).cost_seconds == pytest.approx(4.0)
    last = tuner.note(_cost(1.0), step_seconds=0.1, baseline=False)
    assert (last.cost_seconds, last.wanted_steps) == (pytest.approx(3.0), 858)
    assert tuner.note(_cost(2.0), step_seconds=0.1, baseline=True).cost_seconds == 2.0


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
    assert gaps[0] == 100
    assert gaps[-1] == 143
    summary = cadence.summary()
    assert summary["predicted_overhead"] == pytest.approx(0.035, rel=0.1)
    assert summary["measured_overhead"] == pytest.approx(0.035, rel=0.1)
    assert summary["chosen_intervals"][0] == [50, 100]  # type: ignore[index]
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
    trainer.run(60)
    assert trainer.saved_at == [40]
    trainer.run(60)
    assert trainer.saved_at == [40, 140]


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
