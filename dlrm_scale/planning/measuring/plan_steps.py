"""One plan's sharded model, doing real training steps on batches that are there already."""

import itertools
from collections.abc import Iterator, Sequence

import torch

from dlrm_scale.batch import Batch
from dlrm_scale.layout import ShardLayout
from dlrm_scale.models.initial_rows import fill_initial_rows
from dlrm_scale.planning.measuring.plan_workload import PlanWorkload, pipeline_of
from dlrm_scale.planning.plan.cost_models import PlanLoad
from dlrm_scale.planning.plan.request import PlanRequest
from dlrm_scale.planning.tables.table_set import TableSet
from dlrm_scale.sharding.pipeline import make_train_pipeline
from dlrm_scale.sharding.plan_file import PlanFile, Prediction, plan_of_layout, runs_of
from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.sharding.shard import shard_model
from dlrm_scale.sharding.shard_shapes import TableShape, table_layout

__all__ = ["PlanSteps", "plan_file_for", "predicted_plan_file"]


class PlanSteps:
    """A plan at work. Made and used by all ranks together.

    Every plan begins with the same values and takes the same batches in the same order, so that losses tell whether
    two plans do the same work.

    Args:
        workload: model and settings.
        shapes: the plan, by table.
        batches: this rank's, on its device.
        ranks: the process group.
        ranks_per_host: that count as one host.

    Attributes:
        loss_sums: of each step so far: this rank's sum over its rows, `[]` each.
    """

    def __init__(
        self,
        workload: PlanWorkload,
        shapes: Sequence[TableShape],
        batches: Sequence[Batch],
        ranks: Ranks,
        ranks_per_host: int,
    ) -> None:
        """Shard the model and give every row its initial value.

        Raises:
            PlanError: a plan that isn't allowed here; on every rank.
        """
        tables = [table.spec for table in workload.tables.tables]
        rows = max(1, workload.config.data.batch_size // ranks.ranks)
        plan = plan_file_for(workload.tables, shapes, ranks.ranks, ranks_per_host, rows)
        config = workload.config
        # Settings for TorchRec's planner don't hold for a plan that is given.
        sharding = config.sharding.model_copy(
            update={"plan": "torchrec", "kind": "auto", "tables": {}, "ranks_per_host": ranks_per_host}
        )
        config = config.model_copy(update={"sharding": sharding})
        self._sharded = shard_model(workload.model(), tables, config, ranks, given=plan)
        specs = {spec.name: spec for spec in tables}
        for shard in self._sharded.local_shards:
            fill_initial_rows(shard.weight, specs[shard.region.table], shard.region, config.model.seed)
            for state in shard.state.values():
                # Zeros take no memory before they are written, and a run writes them all sooner or later.
                state.detach().add_(0)
        self._batches: Iterator[Batch] = itertools.cycle(batches)
        self._pipeline = make_train_pipeline(self._sharded, pipeline_of(config, ranks.device))
        self.loss_sums: list[torch.Tensor] = []

    def step(self) -> None:
        """Do one whole training step."""
        _, row_loss_sum, _ = self._pipeline.progress(self._batches)
        self.loss_sums.append(row_loss_sum)


def plan_file_for(
    tables: TableSet, shapes: Sequence[TableShape], ranks: int, ranks_per_host: int, batch_size_per_rank: int
) -> PlanFile:
    """Write shapes down as a plan, for `shard_model`.

    Raises:
        PlanError: a table is cut as TorchRec can't; names it.
    """
    layout = ShardLayout(
        ranks=ranks,
        tables=tuple(
            table_layout(table.spec, shape, ranks=ranks, ranks_per_host=ranks_per_host)
            for table, shape in zip(tables.tables, shapes, strict=True)
        ),
    )
    return plan_of_layout(
        layout,
        planner="dlrm_scale",
        ranks_per_host=ranks_per_host,
        optimizer=tables.optimizer,
        batch_size_per_rank=batch_size_per_rank,
    )


def predicted_plan_file(request: PlanRequest, shapes: Sequence[TableShape], load: PlanLoad) -> PlanFile:
    """Write a plan down with what our costs predict of it."""
    plan = plan_file_for(request.tables, shapes, request.ranks, request.ranks_per_host, request.batch_size_per_rank)
    return plan.model_copy(
        update={
            "inputs": {
                "tables": request.tables.fingerprint(),
                "cluster": request.cluster_fingerprint(),
                "space": request.space,
            },
            "prediction": Prediction(
                costs=request.cluster.name,
                step_ms=float(f"{load.step_ms:.6g}"),
                phases_ms={name: runs_of(values) for name, values in load.phases_ms.items()},
                memory_bytes={name: runs_of(values) for name, values in load.memory_bytes.items()},
            ),
        }
    )
