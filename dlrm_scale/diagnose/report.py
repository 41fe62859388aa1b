"""A diagnosis as text for a terminal."""

from dlrm_scale.diagnose.diagnose import Diagnosis
from dlrm_scale.diagnose.measurements import Interval, Measurements, interval
from dlrm_scale.diagnose.settings import Trial
from dlrm_scale.train.summary import text_table
from dlrm_scale.units import format_bytes, format_count, format_seconds

__all__ = ["describe_diagnosis"]


def describe_diagnosis(d: Diagnosis) -> str:
    """Lay out what was measured, the verdict, and the trials."""
    m = d.measurements
    rows = [
        ("ranks", f"{d.ranks} on {d.device}"),
        ("measured", f"{d.rounds} rounds of {d.steps} steps of {format_count(m.rows_per_step)} rows, each kind"),
        ("batches in memory", _pace(m, m.synthetic_seconds)),
        ("files in the page cache", _pace(m, m.warm_seconds)),
        ("files from storage", _pace(m, m.cold_seconds)),
        ("loader alone, page cache", _pace(m, m.warm_loader_seconds)),
        ("loader alone, storage", f"{_pace(m, m.cold_loader_seconds)}, {_read_rate(m)}"),
        ("prep stall", _share(d.prep_stall, m.prep_wait)),
        ("fetch stall", _share(d.fetch_stall, m.fetch_wait)),
        ("first batch of an epoch", _epoch_start(m)),
    ]
    if d.ranks > 1:
        known = d.exposed_communication is not None
        how = "" if m.collective_seconds_per_rank else " (by difference)"
        rows.append(("exposed communication", f"{d.exposed_communication:.1%} of a step{how}" if known else "unknown"))
        rows.append(("busy per rank", _busy(m)))
    rows.append(("peak memory per rank", ", ".join(format_bytes(b) for b in m.peak_memory_bytes_per_rank)))
    rows.append(("time of this diagnosis", format_seconds(d.seconds)))
    lines = [text_table(rows), "", f"verdict: {d.verdict.bound}", d.verdict.words]
    if d.trials:
        header = [("setting tried", "predicted, at best / measured")]
        lines += ["", text_table(header + [(t.setting, _trial(t)) for t in d.trials])]
    lines += ["", f"recommended: {_advice(d)}"]
    lines += [f"note: {note}" for note in d.notes]
    return "\n".join(lines)


def _pace(m: Measurements, seconds: tuple[float, ...]) -> str:
    i = interval(seconds)
    rate = format_count(m.rows_per_step / i.median)
    return f"{rate} rows/s, {1000 * i.median:.2f} ms a step ({1000 * i.low:.2f}-{1000 * i.high:.2f})"


def _read_rate(m: Measurements) -> str:
    rate = m.bytes_per_row * m.rows_per_step / interval(m.cold_loader_seconds).median
    return f"{format_bytes(rate)}/s"


def _share(stall: Interval, waited: float) -> str:
    noise = ", no more than noise" if stall.low <= 0 else ""
    return (
        f"{stall.median:.1%} of a step by difference ({stall.low:.1%} to {stall.high:.1%}{noise}); "
        f"{max(0.0, waited):.1%} seen waiting"
    )


def _epoch_start(m: Measurements) -> str:
    warm, cold = m.epoch_start_seconds
    epoch = m.steps_per_epoch * m.step_seconds
    return f"{warm:.2f} s from the page cache, {cold:.2f} s from storage: {cold / epoch:.1%} of an epoch"


def _busy(m: Measurements) -> str:
    if m.busy_imbalance is None:
        return "unknown"
    rank, ratio, _ = m.busy_imbalance
    busy = ", ".join(f"{1000 * seconds:.2f}" for seconds in m.busy_seconds_per_rank)
    return f"{busy} ms a step; slowest is rank {rank}, {ratio:.2f} times the mean"


def _trial(t: Trial) -> str:
    if t.measured is None:
        return t.note
    predicted = "-" if t.predicted is None else f"{t.predicted:.2f}x"
    outcome = "better" if t.better else "not better"
    text = f"{predicted} / {t.measured.median:.2f}x ({t.measured.low:.2f}-{t.measured.high:.2f}), {outcome}"
    return f"{text}; {t.note}" if t.note and t.better else text


def _advice(d: Diagnosis) -> str:
    if d.recommended is None or d.recommended.measured is None:
        return "nothing that was tried was measured to be better" if d.trials else "nothing"
    gain = d.recommended.measured.median
    caution = f"; {d.recommended.note}" if d.recommended.note else ""
    return f"--set {d.recommended.setting} ({gain:.2f} times the rows/s{caution})"
