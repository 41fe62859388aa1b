"""From measurements to a verdict and to settings worth a trial, without running anything."""

from dataclasses import replace

import pytest

from dlrm_scale.config import Config
from dlrm_scale.diagnose.measurements import Interval, Measurements, interval
from dlrm_scale.diagnose.settings import (
    Candidate,
    Trial,
    candidates,
    is_better,
    predicted_gain,
    recommended,
    with_setting,
)
from dlrm_scale.diagnose.verdict import reach_verdict

_GIB = 1 << 30
_HEALTHY = Measurements(
    rows_per_step=2000,
    synthetic_seconds=(0.100, 0.102, 0.101),
    warm_seconds=(0.101, 0.102, 0.102),
    cold_seconds=(0.102, 0.103, 0.102),
    synthetic_wait_seconds=(0.0,) * 3,
    warm_wait_seconds=(0.0001,) * 3,
    cold_wait_seconds=(0.0002,) * 3,
    warm_loader_seconds=(0.002,) * 3,
    cold_loader_seconds=(0.004,) * 3,
    busy_seconds_per_rank=(0.095, 0.094),
    collective_seconds_per_rank=(0.005, 0.006),
    delay_share=0.0,
    major_faults_per_step=0.0,
    peak_memory_bytes_per_rank=(_GIB, _GIB),
    host_memory_bytes=16 * _GIB,
    local_ranks=2,
    epoch_start_seconds=(0.1, 0.2),
    steps_per_epoch=1000,
    still_cached_share=0.0,
    dataset_bytes=_GIB,
    bytes_per_row=160.0,
)


def _slower(values: tuple[float, ...], seconds: float) -> tuple[float, ...]:
    return tuple(v + seconds for v in values)


def test_equal_times_mean_that_the_step_sets_the_pace() -> None:
    verdict = reach_verdict(_HEALTHY)
    assert (verdict.bound, verdict.rank, verdict.share) == ("compute-bound", None, 0.0)


def test_stalls_are_shares_of_a_step_from_cold_storage() -> None:
    m = replace(_HEALTHY, synthetic_seconds=(0.06,), warm_seconds=(0.08,), cold_seconds=(0.1,))
    assert m.prep_stall.median == pytest.approx(0.2)
    assert m.fetch_stall.median == pytest.approx(0.2)


def _waiting(*, warm: float = 0.0, cold: float = 0.0) -> Measurements:
    """A run whose loader lets it wait, in seconds a step."""
    return replace(
        _HEALTHY,
        warm_seconds=_slower(_HEALTHY.synthetic_seconds, warm),
        warm_wait_seconds=_slower(_HEALTHY.synthetic_wait_seconds, warm),
        cold_seconds=_slower(_HEALTHY.synthetic_seconds, cold),
        cold_wait_seconds=_slower(_HEALTHY.synthetic_wait_seconds, cold),
    )


def test_the_larger_stall_is_named() -> None:
    assert reach_verdict(_waiting(warm=0.03, cold=0.05)).bound == "prep-bound"
    assert reach_verdict(_waiting(warm=0.03, cold=0.08)).bound == "fetch-bound"


def test_times_that_differ_without_waiting_need_several_rounds() -> None:
    slower = replace(_HEALTHY, warm_seconds=(0.12,) * 3, cold_seconds=(0.12,) * 3)
    assert reach_verdict(slower).bound == "compute-bound"
    times, waits = (0.12,) * 5, (0.0,) * 5
    several = replace(
        slower,
        synthetic_seconds=(0.1,) * 5,
        warm_seconds=times,
        cold_seconds=times,
        synthetic_wait_seconds=waits,
        warm_wait_seconds=waits,
        cold_wait_seconds=waits,
    )
    assert reach_verdict(several).bound == "prep-bound"
    spread = (0.09, 0.08, 0.12, 0.12, 0.12)
    assert reach_verdict(replace(several, warm_seconds=spread, cold_seconds=spread)).bound == "compute-bound"


def test_fetch_words_say_whether_the_dataset_fits_into_memory() -> None:
    m = _waiting(cold=0.1)
    assert "only the first epoch" in reach_verdict(m).words
    assert "every epoch" in reach_verdict(replace(m, dataset_bytes=100 * _GIB)).words


def test_the_busiest_rank_of_an_uneven_plan_is_named() -> None:
    m = replace(_HEALTHY, busy_seconds_per_rank=(0.03, 0.03, 0.09, 0.03), collective_seconds_per_rank=(0.07,) * 4)
    m = replace(m, peak_memory_bytes_per_rank=(_GIB,) * 4, local_ranks=4, collective_seconds_per_rank=())
    verdict = reach_verdict(m)
    assert (verdict.bound, verdict.rank) == ("imbalanced plan", 2)
    assert verdict.share == pytest.approx(0.045 / 0.101)


def test_waiting_for_a_slower_rank_is_not_communication() -> None:
    m = replace(_HEALTHY, collective_seconds_per_rank=(0.002, 0.07))
    assert m.exposed_communication == pytest.approx(0.002 / 0.101)
    m = replace(m, collective_seconds_per_rank=(0.05, 0.06))
    assert reach_verdict(m).bound == "communication-bound"


def test_one_rank_has_no_communication_and_no_imbalance() -> None:
    one = replace(
        _HEALTHY,
        busy_seconds_per_rank=(0.01,),
        collective_seconds_per_rank=(0.05,),
        peak_memory_bytes_per_rank=(_GIB,),
        local_ranks=1,
    )
    assert (one.exposed_communication, one.busy_imbalance) == (0.0, None)


def test_a_full_host_is_named_before_anything_else() -> None:
    m = replace(_HEALTHY, peak_memory_bytes_per_rank=(7 * _GIB, 8 * _GIB), cold_seconds=(1.0, 1.0, 1.0))
    assert reach_verdict(m).bound == "memory-bound"
    assert reach_verdict(replace(_HEALTHY, major_faults_per_step=50.0)).bound == "memory-bound"


def test_an_interval_is_the_median_between_quartiles() -> None:
    assert interval([3.0, 1.0, 2.0, 4.0, 5.0]) == Interval(median=3.0, low=2.0, high=4.0)
    assert interval([2.0]) == Interval(median=2.0, low=2.0, high=2.0)


def test_a_loader_that_is_the_limit_gains_nothing_from_reading_further_ahead() -> None:
    m = replace(_waiting(warm=0.1, cold=0.1), warm_seconds=(0.2,) * 3)
    verdict, config = reach_verdict(m), Config()
    deeper = Candidate(key="data.prefetch_batches", value=16, source="warm")
    assert predicted_gain(deeper, m, verdict, config=config, loader_seconds=0.2) == pytest.approx(1)
    assert predicted_gain(deeper, m, verdict, config=config, loader_seconds=0.05) == pytest.approx(0.2 / 0.101)
    larger = Candidate(key="data.batch_size", value=4096, source="warm")
    assert predicted_gain(larger, m, verdict, config=config, loader_seconds=0.25) == pytest.approx(2 * 0.2 / 0.25)


def test_an_even_plan_saves_no_more_than_the_imbalance() -> None:
    m = replace(_HEALTHY, busy_seconds_per_rank=(0.09, 0.03), collective_seconds_per_rank=())
    verdict = reach_verdict(m)
    split = Candidate(key="sharding.tables.C3", value="row_wise", source="synthetic", rebuilds=True)
    gain = predicted_gain(split, m, verdict, config=Config(), loader_seconds=None)
    assert gain == pytest.approx(0.101 / (0.101 - 0.03))


def test_settings_fit_the_verdict() -> None:
    config = Config()

    def tried(m: Measurements) -> list[str]:
        found = candidates(config, reach_verdict(m), cores_per_rank=4, heaviest_table="C3")
        return [c.setting for c in found]

    assert tried(_HEALTHY) == ["train.precision=bf16"]
    deeper = ["data.prefetch_batches=16", "data.readers=4", "data.window_rows=4096", "data.batch_size=4096"]
    assert tried(_waiting(cold=0.1)) == deeper
    assert tried(_waiting(warm=0.1, cold=0.1)) == [*deeper[:3], "train.threads_per_rank=3", deeper[3]]
    uneven = replace(_HEALTHY, busy_seconds_per_rank=(0.09, 0.03))
    assert tried(uneven) == ["sharding.tables.C3=row_wise", "sharding.kind=row_wise"]


def test_more_readers_than_there_are_already_are_offered() -> None:
    config = with_setting(Config(), Candidate(key="data.readers", value=4, source="cold"))
    verdict = reach_verdict(_waiting(cold=0.1))
    found = candidates(config, verdict, cores_per_rank=4, heaviest_table=None)
    assert found[1].setting == "data.readers=8"
    # readers that take as long as one gain nothing, and the prediction says so
    assert predicted_gain(found[1], _waiting(cold=0.1), verdict, config=config, loader_seconds=0.201) == pytest.approx(
        1, abs=0.01
    )


def test_unused_cores_are_offered_to_a_step_that_sets_the_pace() -> None:
    config = with_setting(Config(), Candidate(key="train.threads_per_rank", value=1, source="synthetic"))
    found = candidates(config, reach_verdict(_HEALTHY), cores_per_rank=4, heaviest_table=None)
    assert [c.setting for c in found] == ["train.threads_per_rank=4", "train.precision=bf16"]
    assert predicted_gain(found[0], _HEALTHY, reach_verdict(_HEALTHY), config=config, loader_seconds=None) == 4


def test_a_tables_type_is_set_by_its_name() -> None:
    split = Candidate(key="sharding.tables.C3", value="row_wise", source="synthetic", rebuilds=True)
    assert with_setting(Config(), split).sharding.tables == {"C3": "row_wise"}


def _trial(setting: str, low: float, median: float, note: str = "") -> Trial:
    measured = Interval(median=median, low=low, high=median)
    return Trial(setting=setting, predicted=None, measured=measured, better=is_better(measured), note=note)


def test_only_what_measured_better_is_recommended_and_the_smaller_change_wins() -> None:
    assert recommended([_trial("a=1", 0.9, 1.5), _trial("b=1", 1.001, 1.01)]) is None
    tried = [_trial("a=1", 0.9, 1.5), _trial("b=1", 1.1, 1.27), _trial("c=1", 1.2, 1.30)]
    best = recommended(tried)
    assert best is not None
    assert best.setting == "b=1"


def test_a_setting_that_changes_the_training_must_gain_much_more() -> None:
    plain, larger = _trial("a=1", 1.1, 1.2), _trial("b=1", 1.2, 1.4, note="tune the learning rates")
    assert recommended([plain, larger]) is plain
    assert recommended([plain, _trial("b=1", 1.5, 1.9, note="tune the learning rates")]) is not plain
    assert recommended([_trial("a=1", 1.0, 1.01), larger]) is larger
