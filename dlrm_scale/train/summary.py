"""The table at the end of a run."""

from dlrm_scale.train.attribution.attribution_table import attribution_lines
from dlrm_scale.train.checkpoint_rows import checkpoint_rows
from dlrm_scale.train.memory.memory_use import memory_rows
from dlrm_scale.train.metrics.collapse import collapse_warning
from dlrm_scale.train.run_result import RunResult
from dlrm_scale.units import format_bytes, format_count, format_seconds

__all__ = ["metric_rows", "summary_table", "text_table"]


def text_table(rows: list[tuple[str, str]]) -> str:
    """Lay out name and value in two columns."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def metric_rows(metrics: dict[str, object]) -> list[tuple[str, str]]:
    """Names and values of `ClickMetrics` for people; undefined ones say so."""
    rows = [("rows evaluated", format_count(int(str(metrics["rows"]))))]
    for name, label in (
        ("auc", "AUC"),
        ("logloss", "logloss"),
        ("base_rate_logloss", "logloss of the base rate"),
        ("normalized_entropy", "normalized entropy"),
        ("calibration", "calibration"),
    ):
        value = metrics[name]
        rows.append((label, "undefined" if value is None else f"{value:.5f}"))
        if name == "auc" and metrics["auc_error_bound"]:
            rows.append(("AUC is exact to within", f"{metrics['auc_error_bound']:.1e}"))
    warning = collapse_warning(metrics)
    if warning is not None:
        rows.append(("warning", warning))
    if metrics["note"]:
        rows.append(("note", str(metrics["note"])))
    return rows


def summary_table(result: RunResult, run_path: str) -> str:
    """Describe a finished or stopped start of a run, and where its time went."""
    rows = [
        ("run", run_path),
        ("state", result.state + (": continue with --resume auto" if result.state == "stopped" else "")),
        ("steps", f"{format_count(result.step)} (this start began at {format_count(result.start_step)})"),
        ("ranks", str(result.ranks)),
        ("rows trained", format_count(result.rows)),
    ]
    if result.rows:  # shares of no time say nothing
        rows += [
            ("time", format_seconds(result.seconds)),
            ("samples/s", format_count(result.samples_per_second)),
            ("waiting for data", f"{result.data_wait_share:.2%} of the time"),
        ]
    rows += checkpoint_rows(result.checkpoints, result.ranks)
    rows.append(("peak memory of a rank", format_bytes(result.peak_memory_bytes)))
    rows += memory_rows(result.memory)
    if result.baseline_bytes is not None:
        rows.append(("bytes of a baseline", format_bytes(result.baseline_bytes)))
    if result.delta_bytes is not None:
        rows.append(("bytes of a delta (mean)", format_bytes(result.delta_bytes)))
    if result.loss is not None:
        rows.append(("training loss, last window", f"{result.loss:.5f}"))
    if result.best is not None:
        value = float(str(result.best["value"]))
        rows.append(("best checkpoint", f"step {result.best['step']}, {result.best['metric']} {value:.5f}"))
    if result.validation is not None:
        rows += [(f"validation {name}", value) for name, value in metric_rows(result.validation)]
    return "\n".join([text_table(rows), "", *attribution_lines(result.attribution)])
