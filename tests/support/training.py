"""Whole training runs on ranks, observed: rows used in each step, losses, and the tables at the end."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dlrm_scale.batch import Batch
from dlrm_scale.checkpoint import find_chain, restore
from dlrm_scale.layout import LocalShard, ShardLayout, ShardRegion, TableLayout
from dlrm_scale.recipes import find_checkpoints
from dlrm_scale.schema import TableSpec
from dlrm_scale.train.loop import TrainingLoop
from dlrm_scale.train.run_folder import resolve_run
from dlrm_scale.train.run_result import RunResult
from dlrm_scale.train.stop import StopRequest
from dlrm_scale.train.trainer import train_rank
from dlrm_scale.train.warm_start import WarmStart
from tests.support.datasets import row_numbers
from tests.support.rank_runner import run_ranks

__all__ = ["SMALL_MODEL", "Observed", "assemble", "log_records", "losses", "read_tables", "run_training", "same_tables"]

SMALL_MODEL = (
    "model.dim=16",
    "model.dense_layers=[16]",
    "model.over_layers=[16, 1]",
    "data.batch_size=32",
    "data.window_rows=64",
    "train.device=cpu",
    "train.threads_per_rank=1",
    "train.log_every_steps=1",
    "checkpoint.every_steps=3",
)
"""Overrides of the recipe `sample` for tests."""


@dataclass
class Observed:
    """What a rank saw.

    Attributes:
        result: the summary.
        rows_per_step: numbers of the true rows of each step on this rank.
        learning_rates: (dense, sparse) set for each step.
        first_shards: this rank's rows and state before the first step of this start: (table, row start, column start,
            name, values).
    """

    result: RunResult
    rows_per_step: list[list[int]]
    learning_rates: list[tuple[float, ...]]
    first_shards: list[tuple[str, int, int, str, np.ndarray]]


def run_training(
    ranks: int,
    run: Path,
    dataset: Path,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    step: int | None = None,
    init_from: str = "",
    init_options: Mapping[str, bool] | None = None,
    ranks_per_host: int | None = None,
) -> list[Observed]:
    """Train in the rank pool and return what each rank saw."""
    return run_ranks(
        ranks,
        _train,
        str(run),
        str(dataset),
        list(overrides),
        resume,
        step,
        WarmStart(run=init_from, **(init_options or {})) if init_from else None,
        ranks_per_host=ranks_per_host,
    )


def _train(
    run: str, dataset: str, overrides: list[str], resume: bool, step: int | None, warm_start: WarmStart | None
) -> Observed:
    settings = [f"run.path={run}"]
    if not resume:
        settings += [f"data.path={dataset}", *SMALL_MODEL]
    request = resolve_run(
        None if resume else "sample", [*settings, *overrides], resume=resume, step=step, warm_start=warm_start
    )
    rows: list[list[int]] = []
    rates: list[tuple[float, ...]] = []
    shards: list[tuple[str, int, int, str, np.ndarray]] = []
    note, rate, begin = TrainingLoop._note, TrainingLoop._set_learning_rates, TrainingLoop._begin

    def watched_begin(self: TrainingLoop) -> None:
        begin(self)
        for shard in self.sharded.local_shards:
            for name, values in (("weight", shard.weight), *shard.state.items()):
                region = shard.region
                place = (region.table, region.row_start, region.column_start, name)
                shards.append((*place, values.detach().clone().numpy()))

    def watched_note(self: TrainingLoop, batch: Batch, row_loss_sum: torch.Tensor, logits: torch.Tensor) -> None:
        rows.append(row_numbers(batch.dense_features[: batch.rows_local]).tolist())
        note(self, batch, row_loss_sum, logits)

    def watched_rate(self: TrainingLoop) -> None:
        rate(self)
        acting = self.sharded.learning_rates()
        # fused kernels keep their rate in float32, the optimizer of data-parallel tables in float64
        dense, sparse = ({*np.float32(acting[name]).tolist()} for name in ("dense", "sparse"))
        assert len(dense) == 1
        assert len(sparse) <= 1
        rates.append((*dense, *(sparse or {-1.0})))

    TrainingLoop._note, TrainingLoop._set_learning_rates = watched_note, watched_rate
    TrainingLoop._begin = watched_begin
    try:
        result = train_rank(request, StopRequest())
    finally:
        TrainingLoop._note, TrainingLoop._set_learning_rates, TrainingLoop._begin = note, rate, begin
    return Observed(result=result, rows_per_step=rows, learning_rates=rates[: len(rows)], first_shards=shards)


def assemble(observed: Sequence[Observed], like: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Put all ranks' first shards together into whole tables, named and shaped as in `like`."""
    whole = {name: np.full_like(v, np.nan) for name, v in like.items() if not name.startswith("dense.")}
    for rank in observed:
        for table, row, column, name, values in rank.first_shards:
            target = whole[f"{table}.{name}"]
            columns = (slice(column, column + values.shape[1]),) if values.ndim == 2 else ()
            target[(slice(row, row + len(values)), *columns)] = values
    return whole


def log_records(run: Path, event: str) -> list[dict[str, object]]:
    """Log records of one kind, in order."""
    lines = (run / "log.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]


def losses(run: Path) -> dict[int, float]:
    """Training loss by step; a step that was trained twice keeps the later value."""
    return {int(str(r["step"])): float(str(r["loss"])) for r in log_records(run, "train")}


def read_tables(run: Path, optimizer: str = "rowwise_adagrad", *, split_state: bool = False) -> dict[str, np.ndarray]:
    """Every table and its optimizer state out of a run's newest checkpoint, read in one piece.

    Args:
        run: the run's folder.
        optimizer: of the tables.
        split_state: the checkpoint has row-wise state for each column shard; it is averaged.
    """
    chain = find_chain(find_checkpoints(str(run)), verify="full")
    assert chain is not None
    layouts, shards = [], []
    for table in chain.tip.tables:
        spec = TableSpec(name=table.name, rows=table.rows, dim=table.dim)
        region = ShardRegion(
            table=spec.name, row_start=0, row_end=spec.rows, column_start=0, column_end=spec.dim, rank=0
        )
        layouts.append(TableLayout(spec=spec, sharding_type="table_wise", regions=(region,)))
        state = {"momentum1": torch.full((spec.rows,), -1.0)} if optimizer == "rowwise_adagrad" else {}
        shards.append(LocalShard(region=region, weight=torch.full((spec.rows, spec.dim), -1.0), state=state))
    restored = restore(
        chain,
        layout=ShardLayout(ranks=1, tables=tuple(layouts)),
        shards=shards,
        rank=0,
        ranks=1,
        optimizer=optimizer,
        allow_split_row_state=split_state,
    )
    found = {f"{s.region.table}.weight": s.weight.numpy() for s in shards}
    found |= {f"{s.region.table}.{name}": value.numpy() for s in shards for name, value in s.state.items()}
    return found | {f"dense.{name}": value.numpy() for name, value in restored.dense.items()}


def same_tables(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    """Whether two results of `read_tables` are equal bit for bit."""
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)
