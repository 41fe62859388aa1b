"""Every sharding type in fp32 trains to the same AUC as the plain-torch model with whole tables.

100 steps over rows whose labels depend on their ids, then a held-out set: losses of every step within 1e-5, AUC within
1e-4. Types that give each column shard its own row state are compared with a reference that does so too.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sklearn.metrics import roc_auc_score

from dlrm_scale.config import Config
from dlrm_scale.schema import TableSpec
from dlrm_scale.sharding.pipeline import make_eval_pipeline, make_train_pipeline
from dlrm_scale.sharding.ranks import Ranks, init_ranks
from dlrm_scale.sharding.sharder import ALL_SHARDING_TYPES
from tests.sharding.sharded_runs import build, make_config, rank_batches
from tests.support.random_batches import GlobalBatch, random_batches
from tests.support.rank_runner import run_ranks
from tests.support.reference import reference_logits, train_reference

LOSS_TOLERANCE = 1e-5
AUC_TOLERANCE = 1e-4
STEPS = 100
TABLES = (
    TableSpec(name="C1", rows=103, dim=16),
    TableSpec(name="C2", rows=40, dim=16),
    TableSpec(name="C3", rows=3, dim=16),
    TableSpec(name="C4", rows=211, dim=16),
)
FAST = ("table_wise", "row_wise", "column_wise", "data_parallel")
HOST_WISE = ("table_row_wise", "table_column_wise", "grid_shard")


class Scored(NamedTuple):
    """What a run gives: the loss of each step, and the logits of the held-out rows in order."""

    losses: list[float]
    logits: np.ndarray
    column_splits: dict[str, tuple[tuple[int, int], ...]]


@cache
def _rows() -> tuple[list[GlobalBatch], GlobalBatch]:
    """Training batches, and held-out rows of the same kind."""
    batches = random_batches(TABLES, [32] * STEPS + [2048], seed=3, most_ids_per_bag=3)
    rng = np.random.default_rng(4)
    effects = [rng.normal(size=table.rows) for table in TABLES]
    labelled = [_labelled(batch, effects, rng) for batch in batches]
    return labelled[:-1], labelled[-1]


def _labelled(batch: GlobalBatch, effects: Sequence[np.ndarray], rng: np.random.Generator) -> GlobalBatch:
    score = batch.dense_features[:, 0] - 0.5
    for effect, ids, lengths in zip(effects, batch.ids, batch.lengths, strict=True):
        bags = np.repeat(np.arange(batch.rows), lengths)
        score = score + np.bincount(bags, weights=effect[ids], minlength=batch.rows)
    return replace(batch, labels=(rng.random(batch.rows) < 1 / (1 + np.exp(-score))).astype(np.float32))


def _config(kind: str, optimizer: str, ranks_per_host: int = 0) -> Config:
    # SGD needs higher rates to learn anything in 100 steps
    rates = {"sgd": (0.5, 3.0), "rowwise_adagrad": (0.1, 0.1)}[optimizer]
    return make_config(
        kind,
        optimizer,
        dense_optimizer={"learning_rate": rates[0]},
        sparse_optimizer={"learning_rate": rates[1]},
        sharding={"ranks_per_host": ranks_per_host},
    )


def _train(config: Config, batches: Sequence[GlobalBatch], held_out: GlobalBatch, ranks: Ranks) -> Scored:
    sharded = build(config, TABLES, ranks)
    pipeline = make_train_pipeline(sharded, "plain")
    source = rank_batches(batches, TABLES, ranks)
    losses = []
    for batch in batches:
        _, row_loss_sum, _ = pipeline.progress(source)
        total = row_loss_sum.clone()
        dist.all_reduce(total, group=ranks.control_group)
        losses.append(total.item() / batch.rows)
    (scored,) = make_eval_pipeline(sharded, "plain").run(rank_batches([held_out], TABLES, ranks))
    batch, _, logits = scored
    parts = ranks.gather_objects(logits[: batch.rows_local].numpy())
    splits = {table.spec.name: table.column_splits for table in sharded.layout.tables}
    return Scored(losses, np.concatenate([part for part in parts if isinstance(part, np.ndarray)]), splits)


def _train_all(configs: Sequence[Config], batches: Sequence[GlobalBatch], held_out: GlobalBatch) -> list[Scored]:
    torch.set_num_threads(1)
    ranks = init_ranks("cpu", 60)
    return [_train(config, batches, held_out, ranks) for config in configs]


@cache
def _reference(optimizer: str, splits: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]) -> Scored:
    batches, held_out = _rows()
    config = _config("table_wise", optimizer)
    trained = train_reference(config, TABLES, batches, column_splits=dict(splits))
    with torch.no_grad():
        logits = reference_logits(config.model, TABLES, trained.tables, trained.dense, held_out)
    return Scored(trained.losses, logits.numpy(), dict(splits))


def _compare(ranks: int, kinds: Sequence[str], optimizers: Sequence[str], ranks_per_host: int = 0) -> None:
    batches, held_out = _rows()
    cases = [(kind, optimizer) for kind in kinds for optimizer in optimizers]
    configs = [_config(kind, optimizer, ranks_per_host) for kind, optimizer in cases]
    by_rank = run_ranks(ranks, _train_all, configs, batches, held_out)
    for (kind, optimizer), found in zip(cases, by_rank[0], strict=True):
        what = f"{kind}, {optimizer}, {ranks} ranks"
        split = found.column_splits if optimizer == "rowwise_adagrad" else {}
        expected = _reference(optimizer, tuple((name, ranges) for name, ranges in split.items() if len(ranges) > 1))
        assert len(found.losses) == STEPS
        assert found.losses == pytest.approx(expected.losses, abs=LOSS_TOLERANCE), what
        auc, expected_auc = (roc_auc_score(held_out.labels, scored.logits) for scored in (found, expected))
        assert expected_auc > 0.7, "the reference has learned nothing: nothing would be compared"
        assert abs(auc - expected_auc) <= AUC_TOLERANCE, what


def test_four_types_on_two_ranks_reach_the_reference_auc() -> None:
    _compare(2, FAST, ["rowwise_adagrad"])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_type_and_optimizer_reaches_the_reference_auc(ranks: int) -> None:
    _compare(ranks, ALL_SHARDING_TYPES, ["sgd", "rowwise_adagrad"])


@pytest.mark.slow
def test_host_wise_types_on_two_hosts_reach_the_reference_auc() -> None:
    _compare(4, HOST_WISE, ["sgd", "rowwise_adagrad"], ranks_per_host=2)
