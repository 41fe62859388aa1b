"""From what a user names to a benchmark that every rank can run: plans made, predicted, and the hopeless refused."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from dlrm_scale.config import Config
from dlrm_scale.errors import ConfigError, DlrmScaleError, PlanError
from dlrm_scale.planning.cluster.cluster import Cluster
from dlrm_scale.planning.measuring.micro_timing import Clock
from dlrm_scale.planning.measuring.plan_bench import BenchRequest, choose_anchor, predict_plans
from dlrm_scale.planning.measuring.plan_matrix import make_plans
from dlrm_scale.planning.measuring.plan_workload import PlanWorkload, config_for_tables
from dlrm_scale.planning.plan.proposal import given_shapes
from dlrm_scale.planning.plan.request import PlanRequest, plan_request
from dlrm_scale.planning.tables.table_set import TableSet
from dlrm_scale.sharding.plan_file import load_plan
from dlrm_scale.sharding.shard_shapes import TableShape

__all__ = ["prepare_bench"]


def prepare_bench(
    tables: TableSet,
    cluster: Cluster,
    *,
    ranks: int,
    device: Literal["cpu", "cuda"],
    batch_size_per_rank: int,
    ranks_per_host: int | None = None,
    config: Config | None = None,
    wide: bool = False,
    names: Sequence[str] = (),
    files: Sequence[Path] = (),
    rounds: int = 30,
    seed: int = 0,
    clock: Clock = "elapsed",
    memory_bytes: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> BenchRequest:
    """Make and predict all plans. Nothing is measured yet.

    Args:
        tables: with their lookups.
        cluster: what the ranks at hand are, with its costs.
        ranks: that will be started.
        device: that they have.
        batch_size_per_rank: rows.
        ranks_per_host: ranks that count as one host; None for all.
        config: of a run whose model and dataset are taken; None for a small model and drawn batches.
        wide: allow types that cut columns, with row states split by row-wise Adagrad.
        names: of plans; none for all of `PLAN_NAMES`.
        files: plan files.
        rounds: of measuring.
        seed: of drawn batches and of the order.
        clock: by which plans are compared.
        memory_bytes: of a host, that plans may take together.
        say: told what begins.

    Raises:
        ConfigError: a cluster of another device, one rank, unknown names, or parts that don't go together.
        PlanFileError: a plan file is missing or malformed.
        PlanError: none of the plans is feasible, each with its reason (exit code 3).
    """
    if ranks < 2:
        raise ConfigError("one rank has nothing to spread: there must be at least two", remedy="use --ranks 2 or more")
    if cluster.device != device:
        raise ConfigError(
            f"cluster {cluster.name} describes {cluster.device} ranks, and these are {device}",
            remedy="measure the ranks at hand with `dlrm-scale calibrate -o FILE`, and name that file",
        )
    per_host = ranks_per_host or ranks
    batch_size = batch_size_per_rank * ranks
    if config is None:
        settings = config_for_tables(tables, batch_size=batch_size, wide=wide, ranks_per_host=per_host)
    else:
        settings = _adapted(config, batch_size, wide, per_host)
    workload = PlanWorkload(
        tables=tables,
        config=settings,
        dataset=config.data.path if config is not None else "",
        from_config=config is not None,
        seed=seed,
    )
    if cluster.clock not in ("", clock):
        measured = {"elapsed": "elapsed time", "processor": "processor time"}
        raise ConfigError(
            f"cluster {cluster.name} was calibrated by {measured[cluster.clock]}, and plans would be compared by "
            f"{measured[clock]}",
            remedy=f"{'add' if cluster.clock == 'processor' else 'leave out'} --processor-time, or calibrate again",
        )
    request = plan_request(
        tables,
        cluster,
        ranks=ranks,
        batch_size_per_rank=batch_size_per_rank,
        ranks_per_host=per_host,
        wide=wide,
        config=settings,
        dense=workload.dense(batch_size_per_rank),
    )
    plans = make_plans(request, names, [_given(path, request) for path in files], say)
    say("predicting")
    predictions = predict_plans(request, plans)
    made = BenchRequest(
        workload=workload,
        planned=request,
        plans=tuple(plans),
        predictions=predictions,
        device=device,
        rounds=rounds,
        seed=seed,
        clock=clock,
        memory_bytes=memory_bytes,
    )
    feasible = made.feasible
    if not feasible:
        reasons = [f"{p.name}: {p.reason or predictions[p.name].reason}" for p in plans if not p.same_as]
        raise PlanError(
            "none of the plans is feasible:\n  " + "\n  ".join(reasons),
            remedy="`dlrm-scale plan` tells which single change would make one fit",
        )
    return replace(made, anchor=choose_anchor(feasible))


def _adapted(config: Config, batch_size: int, wide: bool, ranks_per_host: int) -> Config:
    data = config.data.model_copy(update={"batch_size": batch_size})
    sharding = config.sharding.model_copy(update={"allow_split_row_state": wide, "ranks_per_host": ranks_per_host})
    return config.model_copy(update={"data": data, "sharding": sharding})


def _given(path: Path, request: PlanRequest) -> tuple[str, tuple[TableShape, ...] | DlrmScaleError]:
    plan = load_plan(path)  # a file that is missing or malformed is a wrong command, not a plan that can't be used
    try:
        return path.stem, given_shapes(plan, request)
    except DlrmScaleError as error:
        return path.stem, error
