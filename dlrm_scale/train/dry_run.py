"""What a run would do: checked up to the point at which tables are allocated, with nothing left behind."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dlrm_scale.checkpoint import Chain, open_storage
from dlrm_scale.checkpoint.chain.lossy import lossy_restores_after
from dlrm_scale.checkpoint.chain.schema_match import check_row_state, check_schema
from dlrm_scale.checkpoint.upkeep.leftovers import unread_starts
from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.data.loading.loader import TrainLoader
from dlrm_scale.errors import ConfigError, PlanError
from dlrm_scale.install import check_install
from dlrm_scale.layout import ShardLayout
from dlrm_scale.sharding.given_plan import plan_path
from dlrm_scale.sharding.plan_file import load_plan
from dlrm_scale.sharding.plan_rows import plan_rows
from dlrm_scale.sharding.ranks import Ranks, close_ranks, init_ranks
from dlrm_scale.train.auto_plan import choose_auto_plan
from dlrm_scale.train.checkpoint_place import unwritable_folder, write_check
from dlrm_scale.train.feature_mapping import check_feature_mapping
from dlrm_scale.train.memory.memory_check import MemoryCheck, RankMemory, describe_memory
from dlrm_scale.train.micro_batch_rows import check_micro_batches
from dlrm_scale.train.plan_table import describe_plan
from dlrm_scale.train.restore_notes import chain_notes, change_notes, lossy_notes, trained_precision_notes
from dlrm_scale.train.run_folder import RunRequest
from dlrm_scale.train.setup import (
    build_on_ranks,
    device_kind,
    plan_notes,
    precision_notes,
    retention_notes,
    set_threads,
)
from dlrm_scale.train.starting_values import NO_CHECKPOINT_YET, choose_start
from dlrm_scale.train.stop import StopRequest
from dlrm_scale.train.summary import text_table
from dlrm_scale.train.trainer import check_equal_runs
from dlrm_scale.train.warm_start import WarmStart
from dlrm_scale.units import format_bytes, format_count

__all__ = ["DryRun", "describe_dry_run", "dry_run_rank"]

_RANKS_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What a run would do.

    Attributes:
        ranks: how many.
        device: `cpu` or `cuda`.
        training_rows: of an epoch.
        validation_rows: of the dataset's split.
        dropped_rows: of each epoch, by `data.drop_last`.
        batch_size: global.
        steps_per_epoch: of all training rows.
        start_step: steps that are done already.
        last_step: the run's last.
        start: where weights come from.
        plan: a table each, see `plan_rows`.
        needs: memory of all ranks, by rank.
        local_ranks: ranks that share a host's memory.
        notes: what a run would say at its beginning.
        refusal: why the run would be refused for its memory; None if it would start.
    """

    ranks: int
    device: str
    training_rows: int
    validation_rows: int
    dropped_rows: int
    batch_size: int
    steps_per_epoch: int
    start_step: int
    last_step: int
    start: str
    plan: Sequence[Mapping[str, object]]
    needs: Sequence[RankMemory]
    local_ranks: int
    notes: Sequence[str]
    refusal: PlanError | None

    def as_dict(self) -> dict[str, object]:
        """JSON-ready values by name; `memory` has a dict for each rank."""
        values = {name: value for name, value in vars(self).items() if name not in ("needs", "refusal")}
        refusal = None if self.refusal is None else str(self.refusal)
        return {**values, "memory": [_memory(need) for need in self.needs], "refusal": refusal}


class _Planned(Exception):
    """Ends the building of a model once its plan is known: what follows is the allocation of its tables."""


def dry_run_rank(request: RunRequest, stop: StopRequest) -> DryRun:
    """Go as far as a run goes before it allocates tables or writes; called on every rank with the same request.

    Raises:
        DlrmScaleError: what `train_rank` would raise; memory that is too short for the plan is in the result.
    """
    config = request.config
    kind = device_kind(config)
    check_install(device=kind)
    ranks = init_ranks(kind, config.train.collective_timeout_seconds)
    try:
        set_threads(config, ranks.local_ranks)
        return _rehearse(request, ranks, stop)
    finally:
        close_ranks()


def _rehearse(request: RunRequest, ranks: Ranks, stop: StopRequest) -> DryRun:
    config = request.config
    dataset = Dataset.open(Path(config.data.path))
    check_equal_runs(request, dataset, ranks)
    check_micro_batches(config, ranks.ranks)
    problem = ranks.broadcast_object(unwritable_folder(Path(config.run.path)))
    if problem is not None:
        raise ConfigError(f"run.path {config.run.path}: {problem}", remedy="name a folder that can be written")
    notes = [f"changed by --set: {path} from {before} to {after}" for path, before, after in request.changes]
    chain, continues = choose_start(request, ranks)
    notes += write_check(request, ranks)
    notes += unread_starts(open_storage(request.checkpoints)) if ranks.rank == 0 else []
    if request.resume and not continues:
        notes.append(NO_CHECKPOINT_YET)
    start, cursor = "initial values", None
    if chain is not None:
        start, cursor = _read_start(chain, continues, request, dataset, notes)
    loader = TrainLoader(
        dataset, config.data, rank=ranks.rank, ranks=ranks.ranks, epochs=config.train.epochs, cursor=cursor
    )
    memory = MemoryCheck(config, dataset, loader, ranks)
    memory.check_dense()
    auto = choose_auto_plan(request, dataset, cursor, ranks, stop, measure=False)
    notes += auto.notes
    plan: list[dict[str, object]] = []
    refusal: PlanError | None = None

    def end_here(layout: ShardLayout) -> None:
        nonlocal refusal
        plan.extend(plan_rows(layout, config.sparse_optimizer.kind))
        try:
            memory.check(layout)
        except PlanError as error:
            refusal = error
        if refusal is None and chain is not None:
            notes.extend(_compare_tables(chain, continues, request, layout))
        raise _Planned

    with suppress(_Planned):
        build_on_ranks(config, dataset, ranks, end_here, auto.plan)
    named = plan_path(config.sharding)
    if named is not None and ranks.rank == 0:
        notes += plan_notes(config, load_plan(named), ranks)
    notes += [f"warning: {warning}" for warning in memory.warnings]
    return DryRun(
        ranks=ranks.ranks,
        device=ranks.device.type,
        training_rows=loader.rows,
        validation_rows=dataset.split_rows("validation"),
        dropped_rows=loader.dropped_rows,
        batch_size=config.data.batch_size,
        steps_per_epoch=loader.steps_per_epoch,
        start_step=loader.start_step,
        last_step=min(config.train.max_steps or loader.total_steps, loader.total_steps),
        start=start,
        plan=plan,
        needs=memory.needs,
        local_ranks=ranks.local_ranks,
        notes=[*notes, *precision_notes(config, ranks.device), *retention_notes(config)],
        refusal=refusal,
    )


def _read_start(
    chain: Chain, continues: bool, request: RunRequest, dataset: Dataset, notes: list[str]
) -> tuple[str, Mapping[str, object] | None]:
    """Look at the checkpoint that the run would begin with, and check that it was trained on such rows.

    Returns:
        Where weights come from, and the position in the data.
    """
    chain.release()  # its files aren't read
    config = request.config
    options = None if continues else request.warm_start
    resized = options is not None and (options.allow_new_tables or options.allow_resized_tables)
    notes += chain_notes(chain, {})
    notes += check_feature_mapping(
        chain.tip.extra["feature_mapping"],
        dataset,
        dense=options is None or not options.tables_only,
        vocabularies=not resized,
        warm_start=not continues,
    )
    notes += lossy_notes(chain, lossy_restores_after(chain.manifests), config.checkpoint)
    notes += trained_precision_notes(str(chain.tip.extra.get("precision", "fp32")), config.train.precision)
    start = f"checkpoint of step {chain.tip.step}" + ("" if options is None else f" of {options.run}")
    return start, (chain.tip.cursor or None) if continues else None


def _compare_tables(chain: Chain, continues: bool, request: RunRequest, layout: ShardLayout) -> list[str]:
    """Compare a checkpoint's tables with the plan's, as a restore does before it reads; what differs, if it may.

    Raises:
        CheckpointError: they don't fit.
    """
    config = request.config
    options = request.warm_start if request.warm_start is not None and not continues else WarmStart(run="")
    changes = check_schema(
        chain.tip,
        layout,
        (),
        config.sparse_optimizer.kind,
        allow_new_tables=options.allow_new_tables,
        allow_resized_tables=options.allow_resized_tables,
    )
    check_row_state(chain.manifests, layout, allowed=config.sharding.allow_split_row_state)
    return change_notes(changes)


def describe_dry_run(found: DryRun) -> str:
    """Lay it out for people: the plan, what the run would do, and the memory of the ranks that need most."""
    rows = [
        ("start from", found.start),
        ("ranks", f"{found.ranks} on {found.device}"),
        ("training rows", f"{format_count(found.training_rows)}, in batches of {format_count(found.batch_size)}"),
        ("validation rows", format_count(found.validation_rows)),
        ("steps an epoch", format_count(found.steps_per_epoch)),
        ("steps to do", f"{format_count(found.start_step + 1)} to {format_count(found.last_step)}"),
    ]
    if found.start_step >= found.last_step:
        rows[-1] = ("steps to do", f"none: {format_count(found.start_step)} are done already")
    if found.dropped_rows:
        rows.append(("dropped rows", f"{format_count(found.dropped_rows)} of each epoch"))
    fullest = sorted(found.needs, key=lambda need: -(need.estimate.host_bytes + need.estimate.device_bytes))
    lines = [describe_memory(need.estimate) for need in sorted(fullest[:_RANKS_SHOWN], key=lambda n: n.estimate.rank)]
    if len(fullest) > _RANKS_SHOWN:
        lines.append(f"and {len(fullest) - _RANKS_SHOWN} ranks that need less")
    free = format_bytes(min(need.host_free_bytes for need in found.needs))
    shared = f"for {found.local_ranks} ranks" if found.local_ranks > 1 else "for it"
    memory = f"memory to come, predicted; a host has {free} left {shared}:"
    on_devices = [need.device_free_bytes for need in found.needs if need.device_free_bytes is not None]
    if on_devices:
        memory = f"memory to come, predicted; a host has {free} left, a GPU {format_bytes(min(on_devices))}:"
    return "\n".join([*found.notes, describe_plan(found.plan), "", text_table(rows), "", memory, *lines])


def _memory(need: RankMemory) -> dict[str, object]:
    values: dict[str, object] = {
        "rank": need.estimate.rank,
        "needed_bytes": need.estimate.host_bytes,
        "free_bytes": need.host_free_bytes,
        "items": {item.name: item.size_bytes for item in need.estimate.items},
    }
    if need.device_free_bytes is not None:
        values |= {"needed_device_bytes": need.estimate.device_bytes, "free_device_bytes": need.device_free_bytes}
    return values
