"""Putting a checkpoint's state back, whatever ranks and plan it came from.

A restore reads each file once and checks the hash of every byte that it uses. Where one is damaged, all ranks drop what
they have read and restore the next best chain over it: a chain begins with a baseline, which sets every row and state
anew, and dense parameters and random state are set only after all ranks have read their part. Bytes that no rank needs,
as the headers of files, are left to `checkpoint verify`.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace

import torch

from dlrm_scale.checkpoint import Chain, DamagedFileError, Restored, restore
from dlrm_scale.checkpoint.chain.lossy import lossy_restores_after
from dlrm_scale.checkpoint.chain.schema_match import SchemaChanges
from dlrm_scale.config import Config
from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.errors import CheckpointError, DlrmScaleError
from dlrm_scale.models.initial_rows import fill_initial_rows
from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.sharding.shard import ShardedModel
from dlrm_scale.train.chain_choice import gather_patiently
from dlrm_scale.train.feature_mapping import check_feature_mapping
from dlrm_scale.train.random_state import restore_random_state
from dlrm_scale.train.restore_notes import chain_notes, change_notes, lossy_notes, trained_precision_notes
from dlrm_scale.train.warm_start import WarmStart
from dlrm_scale.units import format_bytes

__all__ = ["RestoreReport", "RestoredRun", "describe_restore", "restore_run"]


@dataclass(frozen=True, kw_only=True)
class RestoreReport:
    """What a restore took; also `restore` in `result.json`.

    Attributes:
        step: of the checkpoint.
        checkpoints: in its chain.
        chain_bytes: of all files of the chain.
        read_bytes: by all ranks together.
        seconds: of the slowest rank, attempts at damaged chains included.
        damaged: what was wrong with files that it met.
    """

    step: int
    checkpoints: int
    chain_bytes: int
    read_bytes: int
    seconds: float
    damaged: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        """JSON-ready values by name."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class RestoredRun:
    """Where a restored run stands.

    Attributes:
        step: completed steps.
        cursor: data position; None before the first step.
        chain: what was read.
        rows_consumed: training rows so far, or None if the checkpoint doesn't say.
        same_ranks: the checkpoint came from as many ranks.
        rank_state: this rank's own tensors in it; empty from another number of ranks.
        lossy_restores: of the run so far, this one included.
        report: what it took.
        notes: lines for the user.
    """

    step: int
    cursor: Mapping[str, object] | None
    chain: Chain
    rows_consumed: int | None
    same_ranks: bool
    rank_state: Mapping[str, torch.Tensor]
    lossy_restores: int
    report: RestoreReport
    notes: list[str] = field(default_factory=list)


def restore_run(
    chain: Chain,
    config: Config,
    sharded: ShardedModel,
    dataset: Dataset,
    ranks: Ranks,
    *,
    position: bool,
    next_best: Callable[[Mapping[str, str]], Chain | None],
    warm_start: WarmStart | None = None,
) -> RestoredRun:
    """Read a chain into the live shards, dense parameters and optimizers; a collective.

    Args:
        chain: from `agree_on_chain`.
        config: of this run.
        sharded: this rank's part; written in place.
        dataset: what the model will be used on.
        ranks: the process group.
        position: also put back the random state; otherwise only weights and optimizer state are taken.
        next_best: gives the chain to take instead of one with damaged files, of which it gets names and what is wrong;
            None where just this checkpoint will do, and no other way leads to it.
        warm_start: what to take and what may differ; None to take all of an equal model.

    Raises:
        CheckpointError: tables or dense parameters that don't match, each named, or damaged files without a chain that
            does without them; on every rank.
        DatasetError: the dataset maps raw values to features in another way.
    """
    started = time.perf_counter()
    options = warm_start if warm_start is not None else WarmStart(run="")
    mapping = check_feature_mapping(
        chain.tip.extra["feature_mapping"],
        dataset,
        dense=not options.tables_only,
        vocabularies=not (options.allow_new_tables or options.allow_resized_tables),
        warm_start=not position,
    )
    damaged: dict[str, str] = {}
    while True:
        restored = _restore(chain, config, sharded, ranks, options)
        views = gather_patiently(restored if not isinstance(restored, Restored) else restored.bytes_read, ranks)
        failures = [view for view in views if isinstance(view, DlrmScaleError)]
        if failures:
            raise failures[0]
        found: dict[str, str] = dict(view for view in views if isinstance(view, tuple))
        if not found:
            break
        damaged |= found
        chain.release()
        instead = next_best(damaged)
        if instead is None:
            raise CheckpointError(
                f"checkpoint {chain.name} (step {chain.step}) is damaged:\n  " + "\n  ".join(damaged.values()),
                remedy="put the files back from a copy, or take the next best checkpoint: `checkpoint ls` lists them, "
                "and --resume auto takes it",
            )
        chain = instead
    assert isinstance(restored, Restored)
    read_bytes = sum(view for view in views if isinstance(view, int))
    if not options.tables_only:
        sharded.load_dense_state(restored.dense)
    sharded.set_table_iterations(restored.extra["table_iterations"])
    _fill_missing(sharded, restored.changes, config.model.seed)
    if position and restored.rank_state is not None:
        restore_random_state(restored.rank_state)
    seconds = max(float(str(value)) for value in gather_patiently(time.perf_counter() - started, ranks))
    chain.release()  # every rank has read its part
    lossy_restores = lossy_restores_after(chain.manifests)
    return RestoredRun(
        step=restored.step,
        cursor=restored.cursor or None,
        chain=chain,
        rows_consumed=restored.rows_consumed,
        same_ranks=restored.rank_state is not None,
        rank_state=restored.rank_state or {},
        lossy_restores=lossy_restores,
        report=RestoreReport(
            step=restored.step,
            checkpoints=len(chain.manifests),
            chain_bytes=chain.size_bytes,
            read_bytes=read_bytes,
            seconds=seconds,
            damaged=tuple(damaged.values()),
        ),
        notes=[
            *chain_notes(chain, damaged),
            *mapping,
            *change_notes(restored.changes),
            *lossy_notes(chain, lossy_restores, config.checkpoint),
            *trained_precision_notes(restored.extra.get("precision", "fp32"), config.train.precision),
        ],
    )


def _restore(
    chain: Chain, config: Config, sharded: ShardedModel, ranks: Ranks, options: WarmStart
) -> Restored | DlrmScaleError | tuple[str, str]:
    """What was restored; a damaged file and what is wrong with it; or an error that no other chain mends."""
    try:
        return restore(
            chain,
            layout=sharded.layout,
            shards=sharded.local_shards,
            rank=ranks.rank,
            ranks=ranks.ranks,
            optimizer=config.sparse_optimizer.kind,
            allow_split_row_state=config.sharding.allow_split_row_state,
            allow_new_tables=options.allow_new_tables,
            allow_resized_tables=options.allow_resized_tables,
        )
    except DamagedFileError as error:
        return error.file, error.message
    except DlrmScaleError as error:
        return error


def _fill_missing(sharded: ShardedModel, changes: SchemaChanges, seed: int) -> None:
    """Give rows that the checkpoint hasn't their initial values, a function of (seed, table, row), and empty state."""
    specs = {table.spec.name: table.spec for table in sharded.layout.tables}
    for shard in sharded.local_shards:
        region, spec = shard.region, specs[shard.region.table]
        first = max(changes.rows_before(spec.name, spec.rows), region.row_start)
        if first >= region.row_end:
            continue
        rows = slice(first - region.row_start, region.rows)
        fill_initial_rows(shard.weight[rows], spec, replace(region, row_start=first), seed)
        for state in shard.state.values():
            state.detach()[rows].zero_()


def describe_restore(report: RestoreReport, what: str, ranks: int) -> str:
    """One line for the user."""
    deltas = report.checkpoints - 1
    return (
        f"restored {what} at step {report.step} from a baseline and {deltas} {'delta' if deltas == 1 else 'deltas'} "
        f"({format_bytes(report.chain_bytes)}): {format_bytes(report.read_bytes)} read and checked by {ranks} "
        f"{'rank' if ranks == 1 else 'ranks'} in {report.seconds:.1f} s"
    )
