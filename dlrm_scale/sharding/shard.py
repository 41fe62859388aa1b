"""A model spread over ranks: its tables by a sharding plan, its dense part replicated."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_parallel import DataParallelWrapper
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dlrm_scale.config import Config, SparseOptimizerConfig
from dlrm_scale.layout import LocalShard, ShardLayout
from dlrm_scale.schema import TableSpec
from dlrm_scale.sharding.dense_state import dense_state, load_dense_state, make_dense_optimizer
from dlrm_scale.sharding.empty_shards import support_empty_shards
from dlrm_scale.sharding.exchange_precision import exchange_codecs
from dlrm_scale.sharding.gradient_sum import sum_in_rank_order
from dlrm_scale.sharding.hosts import host_groups, ranks_per_host
from dlrm_scale.sharding.memory_pages import keep_freed_memory, on_huge_pages
from dlrm_scale.sharding.plan import check_agreement, check_equal_requests, make_plan
from dlrm_scale.sharding.plan_file import PlanFile
from dlrm_scale.sharding.plan_rows import plan_rows
from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.sharding.rules import allowed_types
from dlrm_scale.sharding.sharder import TableSharder
from dlrm_scale.sharding.table_kernels import (
    TableKernel,
    host_memory_of,
    local_shards,
    sharded_collections,
    table_kernels,
)
from dlrm_scale.sharding.table_threads import look_up_in_threads
from dlrm_scale.sharding.third_party_logs import quiet_start_up
from dlrm_scale.sharding.torchrec_plan import torchrec_plan
from dlrm_scale.sharding.touched_lookups import mark_lookups, union_replicated
from dlrm_scale.touched_rows import TouchedRows

__all__ = ["ShardedModel", "shard_model"]


@dataclass(kw_only=True)
class ShardedModel:
    """A sharded model with its optimizers.

    Three optimizers share the work, and each parameter has one: the fused one of the sharded tables runs inside the
    backward pass; `dense_optimizer` and `table_optimizer` run in `step`. Gradients are averages over ranks
    everywhere (DDP for replicated parameters, TorchRec's gradient division for sharded ones), so a loss
    of `ranks * sum / global rows` on each rank gives the gradient of the global mean.

    Attributes:
        module: call it with a `Batch`.
        plan: how tables were to be sharded, and who planned it.
        layout: which rank holds what; equal on all ranks.
        ranks: this process among the others.
        local_shards: this rank's shards as live views, in the order of `layout.regions_of_rank`; writing into
            them sets the model. Rows are zero until someone fills them.
        dense_parameters: everything that isn't an embedding table, by name.
        dense_optimizer: updates `dense_parameters`.
        table_optimizer: updates data-parallel tables; None when there are none.
        kernels: this rank's fbgemm kernels.
        gradient_clip_norm: longest global norm of the dense gradients, over all of them together; 0 for any.
        gradient_norm: that norm in the last step, `[]`, before clipping; None while clipping is off.
        touched: gets the looked-up rows; None until `track`.
    """

    module: DistributedModelParallel
    plan: PlanFile
    layout: ShardLayout
    ranks: Ranks
    local_shards: list[LocalShard]
    dense_parameters: dict[str, nn.Parameter]
    dense_optimizer: torch.optim.Optimizer
    table_optimizer: torch.optim.Optimizer | None
    kernels: list[TableKernel]
    optimizer_config: SparseOptimizerConfig
    dense_buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    gradient_clip_norm: float = 0.0
    gradient_norm: torch.Tensor | None = None
    touched: TouchedRows | None = None
    _table_steps: int = 0

    def zero_grad(self) -> None:
        """Drop the gradients of the last step."""
        self.dense_optimizer.zero_grad(set_to_none=True)
        if self.table_optimizer is not None:
            self.table_optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Apply the gradients of dense parameters and data-parallel tables; sharded tables have theirs already.

        Dense gradients are clipped first, if asked for. They are averages over ranks, so all ranks clip alike.
        """
        self._table_steps += 1
        if self.gradient_clip_norm:
            self.gradient_norm = nn.utils.clip_grad_norm_(self.dense_parameters.values(), self.gradient_clip_norm)
        self.dense_optimizer.step()
        if self.table_optimizer is not None:
            self.table_optimizer.step()

    def set_learning_rates(self, *, dense: float, sparse: float) -> None:
        """Set both rates; they hold from the next backward pass and step on."""
        for group in self.dense_optimizer.param_groups:
            group["lr"] = dense
        if self.table_optimizer is not None:
            for group in self.table_optimizer.param_groups:
                group["lr"] = sparse
        for kernel in self.kernels:
            if kernel.fused:
                kernel.module.emb_module.set_learning_rate(sparse)
                kernel.module.fused_optimizer.param_groups[0]["lr"] = sparse

    def learning_rates(self) -> dict[str, list[float]]:
        """Read the rates back from where they act: `dense`, `sparse` (one a kernel or group)."""
        sparse = [k.module.emb_module.get_learning_rate() for k in self.kernels if k.fused]
        if self.table_optimizer is not None:
            sparse += [float(group["lr"]) for group in self.table_optimizer.param_groups]
        return {"dense": [float(group["lr"]) for group in self.dense_optimizer.param_groups], "sparse": sparse}

    def dense_state(self) -> dict[str, torch.Tensor]:
        """Name every dense tensor, optimizer state included; equal on all ranks. Live tensors, not copies."""
        return dense_state(self.dense_parameters, self.dense_buffers, self.dense_optimizer)

    def load_dense_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy in what `dense_state` gave.

        Raises:
            CheckpointError: listing every name that is missing, unexpected or misshaped.
        """
        load_dense_state(self.dense_state(), state)

    def table_iterations(self) -> int:
        """Count the steps that the tables' optimizers have done (Adam's bias correction depends on it).

        Equal on all ranks, which step together: it counts calls of `step`, not a kernel's passes, so a rank without
        tables and one with only data-parallel tables count too. Right after `set_table_iterations` it is what was set.
        """
        return self._table_steps

    def set_table_iterations(self, steps: int) -> None:
        """Set the count, and with it the counters of this rank's fused kernels; call it on every rank."""
        self._table_steps = steps
        for kernel in self.kernels:
            if kernel.fused:
                tables = kernel.module.emb_module
                tables.iter.fill_(steps)
                # The kernel keeps a second counter on the host and copies `iter` into it only while that is 0.
                tables.iter_cpu.fill_(steps)

    def track(self, touched: TouchedRows) -> None:
        """Mark looked-up rows in `touched` while it is enabled; shard indices are those of `local_shards`."""
        assert self.touched is None, "already tracked"
        self.touched = touched
        mark_lookups(self.kernels, self.local_shards, touched)

    def union_replicated(self, touched: TouchedRows) -> None:
        """Merge the marks of data-parallel tables over all ranks. A collective: all ranks call it."""
        union_replicated(self.local_shards, touched, self.ranks)

    def optimizer_owners(self) -> dict[str, str]:
        """Name the optimizer of every parameter, tables included: each has exactly one.

        Raises:
            RuntimeError: a parameter has no optimizer, or two.
        """
        owners: dict[str, list[str]] = {name: [] for name, _ in self.module.module.named_parameters()}
        in_dense = {id(p) for group in self.dense_optimizer.param_groups for p in group["params"]}
        for name, parameter in self.dense_parameters.items():
            if id(parameter) in in_dense:
                owners[name].append(f"dense {type(self.dense_optimizer).__name__}")
        kind = self.optimizer_config.kind
        in_tables = _table_parameters(self.table_optimizer)
        for path, collection in sharded_collections(self.module.module).items():
            for table in self.layout.tables:
                name = f"{path}.embedding_bags.{table.spec.name}.weight"
                parameter = collection.embedding_bags[table.spec.name].weight
                if getattr(parameter, "_in_backward_optimizers", None):
                    owners[name].append(f"fused {kind}")
                if id(parameter) in in_tables:
                    owners[name].append(f"data-parallel {kind}")
        wrong = {name: found for name, found in owners.items() if len(found) != 1}
        if wrong:
            raise RuntimeError(f"parameters without exactly one optimizer: {wrong}")
        return {name: found[0] for name, found in owners.items()}

    def plan_rows(self) -> list[dict[str, object]]:
        """Describe the plan, one row a table, for printing."""
        return plan_rows(self.layout, self.optimizer_config.kind)


def shard_model(
    model: nn.Module,
    tables: Sequence[TableSpec],
    config: Config,
    ranks: Ranks,
    before_allocation: Callable[[ShardLayout], None] = lambda layout: None,
    given: PlanFile | None = None,
) -> ShardedModel:
    """Plan, shard and wrap a model. A collective: all ranks call it with equal arguments.

    Args:
        model: single-device, its `EmbeddingBagCollection` on the meta device, dense parameters filled. Only this
            rank's shards are allocated. The module is changed in place.
        tables: its tables.
        config: sections `sharding`, `sparse_optimizer`, `dense_optimizer`, `data.batch_size` and
            `train.gradient_clip_norm` are read.
        ranks: this process among the others.
        before_allocation: called with the plan before a table has memory; it may refuse, on all ranks alike.
        given: a plan that goes before `sharding.plan`; rank 0's counts.

    Raises:
        ConfigError: a key of `sharding` that doesn't fit the model or the ranks.
        PlanError: a plan that isn't allowed, doesn't fit, or differs between ranks.
    """
    check_equal_requests(tables, config, ranks)
    # before the codecs: making those of bf16 on CPU logs 12 lines of TorchRec's a rank that bury the refusal
    allowed_types(tables, config, ranks.device.type, ranks.ranks)
    with quiet_start_up():
        host_ranks = ranks_per_host(config.sharding.ranks_per_host, ranks)
        rows_per_rank = config.data.batch_size // ranks.ranks
        codecs = exchange_codecs(config.sharding.all_to_all_precision, rows_per_rank, ranks.device)
        sharder = TableSharder(config.sparse_optimizer, codecs)
        with host_groups(host_ranks, ranks):
            plan = make_plan(model, tables, config, sharder, ranks, host_ranks=host_ranks, given=given)
            layout = plan.layout([table.name for table in tables])
            check_agreement(layout.fingerprint(), "sharding plan", ranks)
            before_allocation(layout)
            spread = torchrec_plan(layout, model, ranks.device.type, host_ranks)
            module = _distribute(model, spread, sharder, ranks)
    kernels = table_kernels(module.module, ranks.rank)
    dense, buffers = _dense_tensors(module.module)
    table_optimizer = _table_optimizer(kernels, config.sparse_optimizer)
    sharded = ShardedModel(
        module=module,
        plan=plan,
        layout=layout,
        ranks=ranks,
        local_shards=local_shards(kernels, layout, ranks.rank, table_optimizer),
        dense_parameters=dense,
        dense_optimizer=make_dense_optimizer(dense, config.dense_optimizer),
        table_optimizer=table_optimizer,
        kernels=kernels,
        optimizer_config=config.sparse_optimizer,
        dense_buffers=buffers,
        gradient_clip_norm=config.train.gradient_clip_norm,
    )
    sharded.optimizer_owners()
    sum_in_rank_order(module, ranks)
    return sharded


class _NoRandomTables(TorchFunctionMode):
    """Skips `uniform_`: TorchRec draws every sharded table twice, and both draws would be thrown away.

    At 2 GiB a rank the draws take 10 s, four times as long as the final rows.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if func in (torch.Tensor.uniform_, nn.init.uniform_):
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


class _NoReplicas(DataParallelWrapper):
    """With one rank there is nothing to average: DDP would copy gradients and multiply them by one."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        dmp._dmp_wrapped_module = dmp._dmp_wrapped_module.to(device)


def _distribute(model: nn.Module, plan: ShardingPlan, sharder: TableSharder, ranks: Ranks) -> DistributedModelParallel:
    world = torch.distributed.group.WORLD
    assert world is not None
    # fbgemm draws data-parallel tables with `randn`: how much depends on the plan, and the caller's state must not.
    devices = [ranks.device] if ranks.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), _NoRandomTables():
        module = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(world),
            device=ranks.device,
            plan=plan,
            sharders=[sharder],
            init_data_parallel=False,
            data_parallel_wrapper=None if ranks.ranks > 1 else _NoReplicas(),
        )
    kernels = table_kernels(module.module, ranks.rank)
    support_empty_shards(kernels)
    look_up_in_threads(kernels, torch.get_num_threads())
    if ranks.device.type == "cpu":
        keep_freed_memory()
    for kernel in kernels:
        if kernel.fused:  # these begin with zeros, weights and state
            for memory in host_memory_of(kernel):
                on_huge_pages(memory)
            continue
        for weight in kernel.module.split_embedding_weights():
            weight.detach().zero_()
    module.init_data_parallel()
    return module


def _dense_tensors(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor]]:
    paths = tuple(f"{path}." for path in sharded_collections(model))
    parameters = {name: p for name, p in model.named_parameters() if not name.startswith(paths)}
    buffers = {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        if not f"{path}.".startswith(paths)
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
    return parameters, buffers


def _table_optimizer(kernels: Sequence[TableKernel], config: SparseOptimizerConfig) -> torch.optim.Optimizer | None:
    parameters = [p for k in kernels if not k.fused for _, p in k.module.named_parameters_by_table()]
    if not parameters:
        return None
    if config.kind == "sgd":
        return torch.optim.SGD(parameters, lr=config.learning_rate, foreach=False)
    assert config.kind == "rowwise_adagrad", config.kind  # rules.allowed_types refuses Adam here
    optimizer: torch.optim.Optimizer = RowWiseAdagrad(parameters, lr=config.learning_rate, eps=config.eps)
    return optimizer


def _table_parameters(optimizer: torch.optim.Optimizer | None) -> set[int]:
    return set() if optimizer is None else {id(p) for group in optimizer.param_groups for p in group["params"]}
