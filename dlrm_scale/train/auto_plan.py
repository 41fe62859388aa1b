"""`sharding.plan = "auto"`: the plan of a run is chosen at its start by predicting all and measuring a few.

Nothing of the run is touched: measured models are built from the run's seed and thrown away, batches come from a loader
of their own, and the random state is put back. A resumed run goes on with the plan that it kept.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from dlrm_scale.batch import Batch
from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.data.loading.loader import TrainLoader
from dlrm_scale.errors import ConfigError, DlrmScaleError, PlanError
from dlrm_scale.host_memory import host_memory
from dlrm_scale.models.tables import table_specs
from dlrm_scale.planning.cluster.cluster import Cluster
from dlrm_scale.planning.cluster.cluster_file import cluster_names, load_cluster
from dlrm_scale.planning.measuring.auto_choice import (
    AutoCandidate,
    auto_candidates,
    choose_by_measuring,
    torchrec_candidate,
)
from dlrm_scale.planning.measuring.calibration import CalibrationRequest, calibrate
from dlrm_scale.planning.measuring.plan_steps import plan_file_for
from dlrm_scale.planning.measuring.plan_workload import PlanWorkload, keep_batches
from dlrm_scale.planning.plan.request import PlanRequest, plan_request
from dlrm_scale.planning.tables.measure import Sampling, measure_tables
from dlrm_scale.planning.tables.table_set import TableSet, TableStats
from dlrm_scale.sharding.given_plan import differences
from dlrm_scale.sharding.hosts import ranks_per_host
from dlrm_scale.sharding.plan_file import PlanFile, load_plan
from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.sharding.rules import allowed_types, device_memory_bytes
from dlrm_scale.sharding.shard_shapes import TableShape
from dlrm_scale.train.random_state import capture_random_state, restore_random_state
from dlrm_scale.train.run_folder import RunRequest
from dlrm_scale.train.setup import device_kind, set_threads
from dlrm_scale.train.stop import StopRequest

__all__ = ["AutoPlan", "choose_auto_plan"]

_SAMPLES = 65_536
"""Training rows that tell how tables are looked up."""
_BATCHES = 4
_MEMORY_SHARE = 0.7
"""Of the free memory, that plans may take together while they are measured."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class AutoPlan:
    """What `auto` came to.

    Attributes:
        plan: to train with; None where `sharding.plan` isn't auto.
        notes: lines for the user.
    """

    plan: PlanFile | None = None
    notes: tuple[str, ...] = ()


def choose_auto_plan(
    request: RunRequest,
    dataset: Dataset,
    cursor: Mapping[str, object] | None,
    ranks: Ranks,
    stop: StopRequest,
    *,
    measure: bool = True,
) -> AutoPlan:
    """Choose a plan if `sharding.plan` is auto. A collective.

    Args:
        request: the run.
        dataset: what it trains on.
        cursor: where it begins; its first batches are those that are measured with.
        ranks: the process group.
        stop: set by a signal, which ends the measuring.
        measure: otherwise the best predicted plan is taken, as for a dry run.

    Raises:
        PlanError: nothing fits (exit code 3), or a type that is asked for isn't allowed.
        ConfigError: `sharding.cluster` can't be used here.
    """
    config = request.config
    if config.sharding.plan != "auto":
        return AutoPlan()
    random_state = capture_random_state()
    try:
        return _Choosing(request, dataset, cursor, ranks, stop, measure).run()
    finally:
        restore_random_state(random_state)
        set_threads(config, ranks.local_ranks)
        if ranks.device.type == "cuda":
            torch.cuda.empty_cache()


class _Choosing:
    def __init__(
        self,
        request: RunRequest,
        dataset: Dataset,
        cursor: Mapping[str, object] | None,
        ranks: Ranks,
        stop: StopRequest,
        measure: bool,
    ) -> None:
        self._request, self._config = request, request.config
        self._dataset, self._cursor, self._ranks, self._stop = dataset, cursor, ranks, stop
        self._measure = measure
        self._host_ranks = ranks_per_host(self._config.sharding.ranks_per_host, ranks)
        self._notes: list[str] = []

    def run(self) -> AutoPlan:
        kept = self._on_rank_0(self._kept_plan)
        if isinstance(kept, PlanFile):
            return AutoPlan(plan=kept, notes=("sharding.plan = auto: the plan that the run kept",))
        if kept:
            self._notes.append(f"the plan that the run kept is for other ranks ({kept}): choosing anew")
        if self._ranks.ranks == 1:
            return AutoPlan(plan=self._alone(), notes=("sharding.plan = auto: one rank holds every table",))
        cluster = self._cluster()
        self._say("looking at the dataset's lookups")
        tables = self._on_rank_0(self._tables)
        planned = self._planned(tables, cluster)
        self._say("predicting plans")
        candidates, told_of_torchrec = self._on_rank_0(lambda: self._candidates(planned))
        self._notes += told_of_torchrec
        workload = PlanWorkload(tables=tables, config=self._config, from_config=True)
        choice = choose_by_measuring(
            planned,
            workload,
            candidates,
            self._batches() if self._measure else [],
            self._ranks,
            free_bytes=self._free_bytes(),
            asked_to_stop=lambda: self._stop.requested,
            progress=self._say,
        )
        told = [*self._notes, *choice.notes, *([] if self._measure else ["a run measures these plans first"])]
        return AutoPlan(plan=choice.plan, notes=tuple(f"sharding.plan = auto: {line}" for line in told))

    def _on_rank_0(self, work: Callable[[], T]) -> T:
        """Let rank 0 work and give all ranks what it found, or the error."""
        found: object = None
        if self._ranks.rank == 0:
            try:
                found = work()
            except DlrmScaleError as error:
                found = error
            except Exception as error:
                self._ranks.broadcast_object(PlanError(f"rank 0 failed to choose a plan: {error!r}"))
                raise
        found = self._ranks.broadcast_object(found)
        if isinstance(found, DlrmScaleError):
            raise found
        return found  # type: ignore[return-value]  # rank 0's

    def _kept_plan(self) -> PlanFile | str:
        """The run's own plan, or what of it doesn't fit these ranks; "" for a run without one."""
        path = self._request.folder.plan
        if not self._request.resume or not path.is_file():
            return ""
        plan = load_plan(path)
        changed = differences(
            plan,
            table_specs(self._config.model, self._dataset.table_rows),
            optimizer=self._config.sparse_optimizer.kind,
            ranks=self._ranks.ranks,
            ranks_per_host=self._host_ranks,
        )
        return "; ".join(changed[:2]) if changed else plan

    def _alone(self) -> PlanFile:
        specs = table_specs(self._config.model, self._dataset.table_rows)
        tables = TableSet(
            name="run",
            optimizer=self._config.sparse_optimizer.kind,
            tables=tuple(TableStats(name=t.name, rows=t.rows, dim=t.dim, pooling=t.pooling) for t in specs),
        )
        shapes = [TableShape(sharding_type="table_wise", columns=t.dim, places=(0,)) for t in specs]
        return plan_file_for(tables, shapes, 1, 1, max(1, self._config.data.batch_size))

    def _cluster(self) -> Cluster:
        """The cluster that is named; else the ready-made one of the GPU at hand; else quickly measured."""
        sharding = self._config.sharding
        named = sharding.cluster or self._on_rank_0(self._ready_made)
        if named:
            cluster = self._on_rank_0(lambda: load_cluster(named))
            if cluster.device != device_kind(self._config):
                raise ConfigError(
                    f"sharding.cluster {named} describes {cluster.device} ranks, and these are on "
                    f"{device_kind(self._config)}",
                    remedy="leave it empty, or name a file that `dlrm-scale calibrate -o FILE` wrote here",
                )
            self._notes.append(f"costs of cluster {cluster.name}" + ("" if sharding.cluster else ", the GPU at hand"))
        else:
            asked = CalibrationRequest(
                name="here",
                device=device_kind(self._config),
                quick=True,
                allow_noise=True,
                ranks_per_host=self._host_ranks,
            )
            found = calibrate(asked, self._ranks, self._stop)
            cluster = self._on_rank_0(lambda: found.cluster)
            set_threads(self._config, self._ranks.local_ranks)
            self._notes.append(
                f"costs of these ranks, measured in {found.seconds:.0f} s; sharding.cluster = FILE of `dlrm-scale "
                "calibrate` saves this and is more exact"
            )
        if cluster.noise:
            self._notes.append(f"these costs come from a busy or noisy machine: {cluster.noise}")
        memory = device_memory_bytes(sharding)
        if memory is not None:
            cluster = cluster.model_copy(update={"memory_bytes": memory, "memory_source": "sharding.device_memory"})
        return cluster

    def _ready_made(self) -> str:
        if self._ranks.device.type != "cuda":
            return ""
        device = torch.cuda.get_device_name(self._ranks.device).lower()
        return next((name for name in cluster_names() if name.partition("x")[0] in device), "")

    def _tables(self) -> TableSet:
        config = self._config
        rows = self._dataset.split_rows("train")
        own = max(1, config.data.batch_size // self._ranks.ranks)
        sizes = tuple(sorted({size for size in (own, config.data.batch_size) if size <= rows}))
        return measure_tables(
            self._dataset,
            dim=config.model.dim,
            pooling=config.model.pooling,
            optimizer=config.sparse_optimizer.kind,
            sampling=Sampling(samples=min(_SAMPLES, rows), batch_sizes=sizes),
            order=config.data,
        )

    def _planned(self, tables: TableSet, cluster: Cluster) -> PlanRequest:
        config, sharding = self._config, self._config.sharding
        specs = table_specs(config.model, self._dataset.table_rows)
        asked = {name: sharding.tables.get(name, sharding.kind) for name in (spec.name for spec in specs)}
        allowed = allowed_types(specs, config, self._ranks.device.type, self._ranks.ranks)
        return plan_request(
            tables,
            cluster,
            ranks=self._ranks.ranks,
            ranks_per_host=self._host_ranks,
            batch_size_per_rank=max(1, config.data.batch_size // self._ranks.ranks),
            wide=sharding.allow_split_row_state,
            types={name: allowed[name] for name, kind in asked.items() if kind != "auto"},
            config=config,
        )

    def _candidates(self, planned: PlanRequest) -> tuple[list[AutoCandidate], list[str]]:
        least = self._config.sharding.min_columns_per_shard
        ours = auto_candidates(planned, least_columns=least)
        self._say("letting TorchRec's planner plan too")
        theirs, notes = torchrec_candidate(planned, ours, least_columns=least)
        return [*ours, *theirs], notes

    def _batches(self) -> list[Batch]:
        """The first batches that the run will train on, read by a loader of their own."""
        loader = TrainLoader(
            Dataset.open(Path(self._config.data.path)),
            self._config.data,
            rank=self._ranks.rank,
            ranks=self._ranks.ranks,
            epochs=self._config.train.epochs,
            cursor=self._cursor,
        )
        try:
            count = min(_BATCHES, loader.total_steps - loader.start_step)
            return [batch.to(self._ranks.device) for batch in keep_batches(loader, count)]
        finally:
            loader.close()

    def _free_bytes(self) -> int:
        ranks = self._ranks
        if ranks.device.type == "cuda":
            mine = int(_MEMORY_SHARE * torch.cuda.mem_get_info(ranks.device)[0]) * ranks.local_ranks
        else:
            mine = int(_MEMORY_SHARE * host_memory().free_bytes)
        return min(int(str(view)) for view in ranks.gather_objects(mine))

    def _say(self, text: str) -> None:
        if self._ranks.rank == 0:
            sys.stderr.write(f"choosing a plan: {text}\n")
            sys.stderr.flush()
