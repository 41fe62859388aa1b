"""Putting a checkpoint's state back, whatever ranks and plan it came from."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch.distributed as dist

from dlrm_scale.checkpoint import (
    Chain,
    Location,
    Storage,
    find_chain,
    list_checkpoints,
    open_chain,
    open_storage,
    restore,
)
from dlrm_scale.config import Config
from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.errors import CheckpointError
from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.sharding.shard import ShardedModel
from dlrm_scale.train.feature_mapping import check_feature_mapping
from dlrm_scale.train.random_state import restore_random_state

__all__ = ["RestoredRun", "agree_on_chain", "restore_run"]


@dataclass(frozen=True, kw_only=True)
class RestoredRun:
    """Where a restored run stands.

    Attributes:
        step: completed steps.
        cursor: data position; None before the first step.
        chain: what was read.
        rows_consumed: training rows so far, or None if the checkpoint doesn't say.
        same_ranks: the checkpoint came from as many ranks.
        notes: lines for the user.
    """

    step: int
    cursor: Mapping[str, object] | None
    chain: Chain
    rows_consumed: int | None
    same_ranks: bool
    notes: list[str] = field(default_factory=list)


def agree_on_chain(location: Location, ranks: Ranks, step: int | None = None, *, manifest: str = "") -> Chain | None:
    """Find the newest valid checkpoint, the same on every rank.

    Rank 0 checks every hash of the newest, so that a damaged file is found before anything is restored; the others
    follow it. A checkpoint asked for by its step is checked while it is read.

    Args:
        location: of the run's checkpoints.
        ranks: the process group.
        step: take the checkpoint of this step instead of the newest.
        manifest: take the checkpoint of this manifest, by its name; "" for one of the others.

    Raises:
        CheckpointError: checkpoints exist but none is whole, or ranks see different files.
    """
    storage = open_storage(location)
    verdict: object = None
    if ranks.rank == 0:
        try:
            chain = open_chain(storage, manifest) if manifest else _choose(storage, step)
            verdict = (chain.tip.name, chain.tip_sha256, chain.skipped) if chain is not None else None
        except CheckpointError as error:
            verdict = error
        except OSError as error:
            verdict = CheckpointError(f"{storage.address} can't be read: {error}")
    verdict = _broadcast_patiently(verdict, ranks)
    if isinstance(verdict, CheckpointError):
        raise verdict
    if verdict is None:
        return None
    assert isinstance(verdict, tuple)
    name, expected, skipped = verdict
    failure: object = None
    try:
        chain = open_chain(storage, name)
        if chain.tip_sha256 != expected:
            raise CheckpointError(f"{name} is another one here than on rank 0")
    except CheckpointError as error:
        failure = error
    except OSError as error:
        failure = CheckpointError(f"{storage.address} can't be read: {error}")
    for rank, view in enumerate(ranks.gather_objects(failure)):
        if isinstance(view, CheckpointError):
            raise CheckpointError(
                f"rank {rank} can't open the checkpoint that rank 0 chose: {view.message}",
                remedy="put run.path on storage that all hosts share",
            )
    assert chain is not None
    return replace(chain, skipped=skipped)


def _broadcast_patiently(value: object, ranks: Ranks) -> object:
    """Rank 0's value, however long it hashes: 1 TiB takes longer than any collective should be waited for."""
    if ranks.ranks == 1:
        return value
    holder = [value]
    group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
    dist.broadcast_object_list(holder, src=0, group=group)
    dist.destroy_process_group(group)
    return holder[0]


def _choose(storage: Storage, step: int | None) -> Chain | None:
    if step is None:
        return find_chain(storage, verify="full")
    names = {row.step: row.name for row in list_checkpoints(storage) if row.state == "ok"}
    if step not in names:
        known = ", ".join(map(str, sorted(s for s in names if s is not None))) or "none"
        raise CheckpointError(
            f"{storage.address} has no whole checkpoint of step {step}", remedy=f"name one of these: {known}"
        )
    return open_chain(storage, names[step])


def restore_run(
    chain: Chain, config: Config, sharded: ShardedModel, dataset: Dataset, ranks: Ranks, *, position: bool
) -> RestoredRun:
    """Read a chain into the live shards, dense parameters and optimizers.

    Args:
        chain: from `agree_on_chain`.
        config: of this run.
        sharded: this rank's part; written in place.
        dataset: what the model will be used on.
        ranks: the process group.
        position: also put back the random state; otherwise only weights and optimizer state are taken.

    Raises:
        CheckpointError: tables or dense parameters that don't match, each named.
        DatasetError: the dataset maps raw values to features in another way.
    """
    check_feature_mapping(chain.tip.extra["feature_mapping"], dataset)
    restored = restore(
        chain,
        layout=sharded.layout,
        shards=sharded.local_shards,
        rank=ranks.rank,
        ranks=ranks.ranks,
        optimizer=config.sparse_optimizer.kind,
        allow_split_row_state=config.sharding.allow_split_row_state,
    )
    sharded.load_dense_state(restored.dense)
    sharded.set_table_iterations(restored.extra["table_iterations"])
    if position and restored.rank_state is not None:
        restore_random_state(restored.rank_state)
    return RestoredRun(
        step=restored.step,
        cursor=restored.cursor or None,
        chain=chain,
        rows_consumed=restored.rows_consumed,
        same_ranks=restored.rank_state is not None,
        notes=[f"skipped a newer checkpoint, {reason}" for reason in chain.skipped]
        + _precision_notes(restored.extra.get("precision", "fp32"), config.train.precision),
    )


def _precision_notes(trained: str, now: str) -> list[str]:
    if trained == now:
        return []
    return [f"the checkpoint was trained with train.precision = {trained!r}; from here on the dense part runs in {now}"]
