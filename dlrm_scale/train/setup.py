"""From a config to a sharded model on this process's rank: what training and evaluation share."""

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from dlrm_scale.config import Config
from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.host_cores import usable_cores
from dlrm_scale.layout import ShardLayout
from dlrm_scale.models.build import build_model
from dlrm_scale.models.compiled_layers import compile_dense_part, late_failure, use_eager_layers
from dlrm_scale.models.dense_part import DensePart
from dlrm_scale.models.initial_rows import fill_initial_rows
from dlrm_scale.models.tables import table_specs
from dlrm_scale.schema import TableSpec
from dlrm_scale.sharding.given_plan import plan_path
from dlrm_scale.sharding.plan_file import PlanFile
from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.sharding.shard import ShardedModel, shard_model
from dlrm_scale.train.tf32 import check_tf32
from dlrm_scale.units import format_count

__all__ = [
    "ModelOnRanks",
    "build_on_ranks",
    "compile_layers",
    "compile_warnings",
    "device_kind",
    "exchange_notes",
    "pipeline_kind",
    "plan_notes",
    "precision_notes",
    "retention_notes",
    "set_threads",
]


@dataclass(frozen=True, kw_only=True)
class ModelOnRanks:
    """A sharded model with what describes it.

    Attributes:
        sharded: this rank's part.
        tables: every table, whole.
    """

    sharded: ShardedModel
    tables: tuple[TableSpec, ...]

    def fill_initial_rows(self, seed: int) -> None:
        """Give every local row its initial value, a function of (seed, table, global row, column)."""
        specs = {spec.name: spec for spec in self.tables}
        for shard in self.sharded.local_shards:
            fill_initial_rows(shard.weight, specs[shard.region.table], shard.region, seed)


def device_kind(config: Config) -> Literal["cpu", "cuda"]:
    """Settle `train.device = auto`."""
    if config.train.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.train.device


def pipeline_kind(config: Config, device: torch.device) -> Literal["plain", "sparse_dist"]:
    """Settle `train.pipeline = auto`: on CPU sparse_dist costs 10-17 % and hides nothing."""
    if config.train.pipeline == "auto":
        return "sparse_dist" if device.type == "cuda" else "plain"
    return config.train.pipeline


def set_threads(config: Config, local_ranks: int) -> None:
    """Share this host's cores among its ranks."""
    torch.set_num_threads(config.train.threads_per_rank or max(1, usable_cores() // local_ranks))


def build_on_ranks(
    config: Config,
    dataset: Dataset,
    ranks: Ranks,
    before_allocation: Callable[[ShardLayout], None] = lambda layout: None,
    given: PlanFile | None = None,
) -> ModelOnRanks:
    """Build the model for a dataset's tables and shard it; tables hold no values yet.

    `train.tf32` is set for the whole process.

    Args:
        config: model, optimizers, sharding, and how the dense part computes.
        dataset: its manifest sets the rows of the tables.
        ranks: the process group.
        before_allocation: called with the plan before a table has memory; it may refuse, on all ranks alike.
        given: a plan that goes before `sharding.plan`; rank 0's counts.

    Raises:
        ConfigError: a model that can't be built, TF32 on CPU, PlanError: a plan that isn't allowed.
    """
    check_tf32(config, ranks.device.type)
    if ranks.device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = config.train.tf32
    tables = table_specs(config.model, dataset.table_rows)
    model = build_model(config.model, tables, train=config.train)
    sharded = shard_model(model, tables, config, ranks, before_allocation, given)
    return ModelOnRanks(sharded=sharded, tables=tables)


def precision_notes(config: Config, device: torch.device) -> list[str]:
    """Warn of bf16 on an x86 CPU without instructions for it: a product of matrices then takes five times as long."""
    if config.train.precision != "bf16" or device.type != "cpu" or platform.machine() not in ("x86_64", "AMD64"):
        return []
    flags = Path("/proc/cpuinfo")
    known = flags.read_text() if flags.is_file() else "avx512_bf16"
    if "avx512_bf16" in known or "amx_bf16" in known:
        return []
    return [
        'warning: train.precision = "bf16": this CPU has neither AVX512-BF16 nor AMX, so the dense part is slower than '
        "in fp32"
    ]


def retention_notes(config: Config) -> list[str]:
    """Warn of a single chain, which `checkpoint gc` and `checkpoint merge` refuse to go down to."""
    if config.checkpoint.keep_baselines > 1:
        return []
    return [
        "warning: checkpoint.keep_baselines = 1 keeps a single chain, so one damaged file of its baseline loses every "
        "checkpoint; the default of 2 keeps another one, and so do `checkpoint gc` and `checkpoint merge`"
    ]


def exchange_notes(config: Config, layout: ShardLayout) -> list[str]:
    """Say that `sharding.all_to_all_precision` does nothing under this plan: then exchanges are none, or in fp32."""
    precision = config.sharding.all_to_all_precision
    if precision == "fp32":
        return []
    if layout.ranks == 1:
        why = "with one rank nothing travels"
    elif all(table.replicated for table in layout.tables):
        why = "every table of the plan is data_parallel, and their gradients are averaged in fp32"
    else:
        return []
    return [f'warning: sharding.all_to_all_precision = "{precision}" does nothing: {why}']


def plan_notes(config: Config, plan: PlanFile, ranks: Ranks) -> list[str]:
    """Say where a plan came from that TorchRec didn't make now, and that it was made for another batch size."""
    if plan_path(config.sharding) is None:
        return []
    notes = [f"sharding plan from {config.sharding.plan}, made by {plan.planner}"]
    rows = max(1, config.data.batch_size // ranks.ranks)
    if plan.batch_size_per_rank != rows:
        notes.append(
            f"the plan was made for {format_count(plan.batch_size_per_rank)} rows of a batch a rank, and here a rank "
            f"has {format_count(rows)}: memory and time aren't those that were predicted, and another plan may be "
            "faster"
        )
    return notes


def compile_layers(model: ModelOnRanks, config: Config, ranks: Ranks) -> list[str]:
    """Do what `train.compile` asks for, on all ranks or on none. A collective.

    Args:
        model: from `build_on_ranks`.
        config: `train.compile`, and the rows that layers get at a time, for the trial.
        ranks: the process group.

    Returns:
        Notes for the user: that layers are compiled, or which rank can't and why.
    """
    if config.train.compile == "off":
        return []
    part = model.sharded.module.module.dense_part
    assert isinstance(part, DensePart)
    started = time.perf_counter()
    rows = max(1, config.data.batch_size // ranks.ranks)
    slices = min(config.train.micro_batches, rows)
    failures = ranks.gather_objects(compile_dense_part(part, -(-rows // slices)))
    for rank, failure in enumerate(failures):
        if failure is not None:
            use_eager_layers(part)
            return [f"warning: train.compile: torch.compile fails on rank {rank}, training uncompiled: {failure}"]
    return [f"compiled the dense part in {time.perf_counter() - started:.1f} s"]


def compile_warnings(sharded: ShardedModel, config: Config, ranks: Ranks) -> list[str]:
    """Name the ranks on which compiled layers failed after their trial, say for a batch of another size. A collective.

    Args:
        sharded: of a model that went through `compile_layers`.
        config: `train.compile`.
        ranks: the process group.
    """
    if config.train.compile == "off":
        return []
    part = sharded.module.module.dense_part
    assert isinstance(part, DensePart)
    failures = [(rank, failure) for rank, failure in enumerate(ranks.gather_objects(late_failure(part))) if failure]
    if not failures:
        return []
    named = ", ".join(str(rank) for rank, _ in failures)
    return [f"train.compile: compiled layers failed on rank {named} and were replaced by plain ones: {failures[0][1]}"]
