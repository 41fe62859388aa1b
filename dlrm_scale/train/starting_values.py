"""What a run begins with: its own newest checkpoint, another run's weights, or initial values."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dlrm_scale.checkpoint import Chain
from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.errors import CheckpointError, MissingCheckpointError
from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.train.chain_choice import agree_on_chain
from dlrm_scale.train.checkpoint_place import check_place
from dlrm_scale.train.resume import RestoredRun, describe_restore, restore_run
from dlrm_scale.train.run_folder import RunFolder, RunRequest
from dlrm_scale.train.setup import ModelOnRanks
from dlrm_scale.train.told_checkpoints import ToldCheckpoint, with_lost_steps
from dlrm_scale.train.told_on_ranks import told_on_all_ranks

__all__ = ["NO_CHECKPOINT_YET", "choose_start", "fill_model"]

NO_CHECKPOINT_YET = "the run has no checkpoint yet: starting from its beginning"


def choose_start(request: RunRequest, ranks: Ranks) -> tuple[Chain | None, bool]:
    """What to restore, and whether it is the run itself that continues (or another whose weights it takes).

    Raises:
        CheckpointError: what should be restored isn't there or isn't whole.
        ConfigError: the checkpoints would lie among those of another run, or ranks don't share the place.
    """
    check_place(request, ranks)
    if request.resume:
        told = told_on_all_ranks(request.folder, ranks)
        chain = agree_on_chain(request.checkpoints, ranks, request.resume_step)
        if chain is not None:
            return _beside_told(chain, told, request), True
        if told is not None:
            raise CheckpointError(
                f"{request.folder.path / told.source} tells of committed checkpoints, and {request.checkpoints} has "
                "none",
                remedy="put the files back, or start a new run in another run.path",
            )
    if request.warm_start is None:
        return None, False
    source = _source(request, False)
    told = told_on_all_ranks(source, ranks)
    chain = agree_on_chain(source.checkpoints, ranks)
    if chain is None and told is not None:
        raise CheckpointError(
            f"--init-from {request.warm_start.run}: {told.source} tells of committed checkpoints, and "
            f"{source.checkpoints} has none",
            remedy="put the files back from a copy, or name another run",
        )
    if chain is None:
        raise MissingCheckpointError(
            f"--init-from {request.warm_start.run}: that run has no checkpoint", remedy="name a run that has saved one"
        )
    return with_lost_steps(chain, told), False


def fill_model(
    model: ModelOnRanks,
    chain: Chain | None,
    continues: bool,
    dataset: Dataset,
    request: RunRequest,
    ranks: Ranks,
    notes: list[str],
) -> RestoredRun | None:
    """Give the model its values; return what was restored, None for a run that begins with initial values."""
    if request.resume and not continues:
        notes.append(NO_CHECKPOINT_YET)
    told = told_on_all_ranks(_source(request, continues), ranks) if chain is not None else None
    if chain is None:
        model.fill_initial_rows(request.config.model.seed)
        return None
    restored = restore_run(
        chain,
        request.config,
        model.sharded,
        dataset,
        ranks,
        position=continues,
        next_best=lambda damaged: _next_best(chain, told, request, continues, ranks, damaged),
        warm_start=None if continues else request.warm_start,
    )
    notes.extend(restored.notes)
    what = "the run"
    if not continues and request.warm_start is not None:
        what = f"weights and optimizer state of {request.warm_start.run}"
        if request.warm_start.tables_only:
            what = f"the tables, with their optimizer state, of {request.warm_start.run}"
            notes.append("the dense part begins with initial values")
    notes.append(describe_restore(restored.report, what, ranks.ranks))
    if continues and not restored.same_ranks:
        notes.append("the number of ranks changed: rows and state are exact, losses agree to rounding")
    return restored


def _next_best(
    chain: Chain,
    told: ToldCheckpoint | None,
    request: RunRequest,
    continues: bool,
    ranks: Ranks,
    damaged: Mapping[str, str],
) -> Chain | None:
    if continues:
        found = agree_on_chain(request.checkpoints, ranks, request.resume_step, damaged=damaged)
        if found is None or request.resume_step is None:
            return None if found is None else _beside_told(found, told, request)
        # The same step by other files: what was saved meanwhile isn't left behind knowingly.
        return replace(found, newest_seen=chain.newest_seen)
    found = agree_on_chain(_source(request, continues).checkpoints, ranks, damaged=damaged)
    return None if found is None else with_lost_steps(found, told)


def _source(request: RunRequest, continues: bool) -> RunFolder:
    """The run whose values it begins with."""
    if continues or request.warm_start is None:
        return request.folder
    return RunFolder(path=Path(request.warm_start.run))


def _beside_told(chain: Chain, told: ToldCheckpoint | None, request: RunRequest) -> Chain:
    """Who names a step goes back to it on purpose, and loses nothing."""
    return chain if request.resume_step is not None else with_lost_steps(chain, told)
