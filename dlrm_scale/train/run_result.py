"""The summary of one start of a run."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from dlrm_scale.checkpoint.saving.cadence import of_slowest_rank
from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.train.attribution.attribution import Attribution, RankTime
from dlrm_scale.train.loop import LoopEnd
from dlrm_scale.train.memory.process_memory import peak_resident_bytes
from dlrm_scale.train.metrics.metrics import ClickMetrics

__all__ = ["RunResult", "make_result"]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The summary of a start of a run; also `result.json`.

    Attributes:
        state: `finished` or `stopped`.
        step: completed steps of the run.
        start_step: step that this start began with.
        ranks: how many ranks trained.
        rows: training rows of this start.
        seconds: wall time of the loop, without evaluation.
        samples_per_second: rows over seconds.
        data_wait_share: share of seconds in which rank 0 waited for batches.
        loss: mean training loss of the last log window; None without steps.
        validation: metrics of the last validation; None after a stop or without such rows.
        baseline_bytes: bytes of the last committed baseline, or None.
        delta_bytes: mean bytes of the committed deltas, or None.
        checkpoints_committed: of this start.
        checkpoints_failed: of this start.
        checkpoints: what they hold, and cost the slowest rank; see `Cadence.summary` and `of_slowest_rank`.
        peak_memory_bytes: largest resident host memory of a rank's process, over ranks.
        restore: what the restore at its beginning took, see `RestoreReport`; None without one.
        best: the best checkpoint of the run as in best.json; None where no validation has told one.
        memory: predicted and actual memory of all ranks; see `memory_use`.
        warnings: that the model may have collapsed, or that memory was short.
        attribution: where the time of all ranks went, the last validation included; see `Attribution.as_dict`.
    """

    state: str
    step: int
    start_step: int
    ranks: int
    rows: int
    seconds: float
    samples_per_second: float
    data_wait_share: float
    loss: float | None
    validation: dict[str, object] | None
    baseline_bytes: int | None
    delta_bytes: float | None
    checkpoints_committed: int
    checkpoints_failed: int
    checkpoints: dict[str, object]
    peak_memory_bytes: int
    restore: dict[str, object] | None = None
    best: dict[str, object] | None = None
    memory: dict[str, object] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    attribution: dict[str, object]


def make_result(
    end: LoopEnd, start_step: int, validation: ClickMetrics | None, time: RankTime, ranks: Ranks
) -> RunResult:
    """Sum up a start of a run; a collective.

    Args:
        end: how the loop ended.
        start_step: step it began with.
        validation: of the whole split, if there was one.
        time: of this rank.
        ranks: the process group.
    """
    committed = [outcome for outcome in end.outcomes if outcome.committed]
    baselines = [outcome.bytes for outcome in committed if outcome.kind == "baseline"]
    deltas = [outcome.bytes for outcome in committed if outcome.kind == "delta"]
    return RunResult(
        state=end.state,
        step=end.step,
        start_step=start_step,
        ranks=ranks.ranks,
        rows=end.rows,
        seconds=end.seconds,
        samples_per_second=end.rows / end.seconds,
        data_wait_share=end.data_wait_seconds / end.seconds,
        loss=end.final_loss,
        validation=validation.as_dict() if validation else None,
        baseline_bytes=baselines[-1] if baselines else None,
        delta_bytes=sum(deltas) / len(deltas) if deltas else None,
        checkpoints_committed=len(committed),
        checkpoints_failed=len(end.outcomes) - len(committed),
        checkpoints=of_slowest_rank([c for c in ranks.gather_objects(end.checkpoints) if isinstance(c, dict)]),
        peak_memory_bytes=_peak_memory_bytes(ranks),
        attribution=Attribution(times=_times_of_ranks(time, ranks)).as_dict(),
    )


def _times_of_ranks(time: RankTime, ranks: Ranks) -> tuple[RankTime, ...]:
    times = ranks.gather_objects(time)
    return tuple(t for t in times if isinstance(t, RankTime))


def _peak_memory_bytes(ranks: Ranks) -> int:
    peak = torch.tensor([peak_resident_bytes()])
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=ranks.control_group)
    return int(peak.item())
