"""Every knob of a training run, with its meaning. No logic: `recipes` reads, merges and reports errors.

TOML sections have the names of `Config`'s fields; `--set section.key=value` reaches any of them.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DenseOptimizerConfig",
    "ModelConfig",
    "RunConfig",
    "ScheduleConfig",
    "ShardingConfig",
    "ShardingType",
    "SparseOptimizerConfig",
    "TrainConfig",
]

ShardingType = Literal[
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
    "data_parallel",
]

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )


class RunConfig(_Section):
    """Where a run lives and how its processes end."""

    path: str = ""
    """Folder of the run: resolved config, plan, logs and checkpoints. Required."""
    shutdown_seconds: Positive = 300
    """How long the launcher waits after SIGINT or SIGTERM for the ranks to finish their step and commit."""


class DataConfig(_Section):
    """Which rows are trained on and in which order."""

    path: str = ""
    """Folder that `dlrm-scale preprocess` wrote. Required."""
    batch_size: Positive = 2048
    """Global batch size in rows, over all ranks."""
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    """Seed of the order of rows; the order depends on the dataset, this seed and the epoch alone."""
    streams: NonNegative = 0
    """Equal streams the order is cut into (a power of two that divides the batch size); 0 chooses."""
    window_rows: Positive = 16384
    """Rows are permuted inside windows of about this size: whole record batches, cut at the ends of streams."""
    prefetch_batches: Positive = 4
    """Batches that the background thread keeps ready."""
    readers: Annotated[int, Field(ge=1, le=64)] = 1
    """Threads a rank that read files and shuffle windows of rows. 1: the thread that makes the batches does it when it
    needs the next; more read ahead for it, each up to two windows, which hides storage that answers late and puts more
    cores to work. The rows of a batch don't depend on it, and a resumed run may change it."""
    drop_last: bool = False
    """Drop the last, short batch of an epoch; the number of dropped rows is logged."""


class ModelConfig(_Section):
    """The model. Tables take their rows from the dataset."""

    kind: Literal["dlrm", "projection", "dcnv2"] = "dlrm"
    """dlrm: dot interaction; projection: learned projections before it; dcnv2: low-rank cross network."""
    dim: Positive = 16
    """Columns of every embedding table; a multiple of 4."""
    pooling: Literal["sum", "mean"] = "sum"
    """How the rows of one bag are combined."""
    dense_layers: tuple[Positive, ...] = (512, 256, 16)
    """Hidden sizes of the bottom MLP; a last layer of size `dim` is required."""
    over_layers: tuple[Positive, ...] = (512, 512, 256, 1)
    """Sizes of the top MLP; the last is 1."""
    interaction_branch1_layers: tuple[Positive, ...] = ()
    """Projection DLRM: sizes of the first branch; the last is a multiple of `dim`."""
    interaction_branch2_layers: tuple[Positive, ...] = ()
    """Projection DLRM: sizes of the second branch; the last is a multiple of `dim`."""
    dcn_num_layers: Positive = 3
    """DCNv2: number of cross layers."""
    dcn_low_rank_dim: Positive = 512
    """DCNv2: rank of the cross layers."""
    seed: NonNegative = 0
    """Seed of the initial weights; an embedding row depends on (seed, table, global row, column) alone."""


class DenseOptimizerConfig(_Section):
    """The optimizer of the MLPs (and of nothing else)."""

    kind: Literal["sgd", "adagrad", "adam"] = "adagrad"
    """Which algorithm."""
    learning_rate: Annotated[float, Field(gt=0)] = 0.01
    """Base learning rate, multiplied by the schedule."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Adagrad and Adam: added to the denominator."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Adam: decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Adam: decay of the second moment."""


class SparseOptimizerConfig(_Section):
    """The optimizer of the embedding tables, fused into the backward pass."""

    kind: Literal["sgd", "rowwise_adagrad", "adam"] = "rowwise_adagrad"
    """Which algorithm. adam is refused on CPU, where fbgemm has no such kernel."""
    learning_rate: Annotated[float, Field(gt=0)] = 0.01
    """Base learning rate, multiplied by the schedule."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Row-wise Adagrad and Adam: added to the denominator."""


class ScheduleConfig(_Section):
    """Learning-rate multiplier of both optimizers by step."""

    warmup_steps: NonNegative = 0
    """The multiplier rises linearly to 1 over these steps."""
    decay_start_step: NonNegative = 0
    """Step at which the decay begins, at the earliest after the warm-up."""
    decay_steps: NonNegative = 0
    """Length of the decay; 0 means no decay, unless `decay_to_end`."""
    decay_to_end: bool = False
    """The decay ends with the last step of the last epoch, whatever `decay_steps` says. Changing the epochs of a
    resumed run then changes its rates."""
    decay_power: Annotated[float, Field(gt=0)] = 2.0
    """Exponent of the polynomial decay."""
    final_multiplier: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Multiplier after the decay."""


class ShardingConfig(_Section):
    """How tables are spread over ranks."""

    plan: Annotated[str, Field(min_length=1)] = "torchrec"
    """Who decides. torchrec: its planner, among the types that `kind` and `tables` leave. auto: at the start of the run
    all plans among these types are predicted, the best three and table-wise with the longest first are measured for
    some seconds, and the fastest is kept. A path: the plan in this file of `dlrm-scale plan`, which decides for every
    table; `kind` and `tables` may repeat it, anything else is refused, as is a plan for other tables, ranks, hosts or
    another optimizer. A run keeps its plan in its folder and resumes with it."""
    kind: Literal[ShardingType, "auto"] = "auto"
    """One sharding type for all tables, or auto: the planner chooses for each table."""
    tables: dict[str, ShardingType] = Field(default_factory=dict)
    """Sharding type of single tables, by column name as in C3 = "row_wise"."""
    allow_split_row_state: bool = False
    """Allow column splits with row-wise Adagrad: each column shard keeps its own row state, another algorithm."""
    cluster: str = ""
    """With plan = "auto": what predicts, a ready-made cluster's name or a file of `dlrm-scale calibrate`. Empty: the
    ready-made one of the GPU at hand; without one the ranks are measured quickly, about half a minute."""
    min_columns_per_shard: Annotated[int, Field(ge=4, multiple_of=4)] = 8
    """Column splits cut no narrower than this; a multiple of 4."""
    ranks_per_host: NonNegative = 0
    """Ranks that count as one host for table_row_wise, table_column_wise and grid_shard; 0: the launcher's."""
    device_memory: str = ""
    """Memory a rank for the planner, as in 80GiB; empty: what the device has."""
    all_to_all_precision: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Precision in which pooled vectors and their gradients travel between ranks, under every type but data_parallel;
    fp16 halves the bytes and makes 65504 of whatever is larger, even infinite. bf16 is refused on CPU, where TorchRec
    would send fp16."""


class TrainConfig(_Section):
    """The loop."""

    epochs: Positive = 1
    """Passes over the training rows."""
    max_steps: NonNegative = 0
    """Stop after this many steps in all; 0: no limit."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is a GPU."""
    pipeline: Literal["auto", "plain", "sparse_dist"] = "auto"
    """auto: plain on CPU (sparse_dist costs 10-17 % there and hides nothing), sparse_dist on CUDA."""
    threads_per_rank: NonNegative = 0
    """CPU threads a rank; 0: the cores, as far as affinity and a container's quota allow, divided by the local
    ranks."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the dense part, in training and evaluation alike. bf16: autocast; weights, optimizer state, tables
    and loss stay fp32. A resumed run may change it."""
    micro_batches: Positive = 1
    """Parts of a rank's batch whose dense forward and backward passes follow one another, so that activations of
    one part alone are held. One lookup and one update a step, so the result equals the large batch but for rounding."""
    gradient_clip_norm: Annotated[float, Field(ge=0)] = 0.0
    """Largest global norm of the dense gradients, averaged over ranks; longer ones are scaled down to it. 0: off.
    Tables aren't clipped: sharded ones are updated inside the backward pass, before any norm is known."""
    compile: Literal["off", "dense"] = "off"
    """dense: torch.compile for the MLPs and the interaction. Where that fails, training goes on uncompiled with a
    note that says why. Changes rounding. Takes about a minute to start; in fp32 on CPU steps don't get faster."""
    tf32: bool = False
    """Let CUDA multiply fp32 matrices in TF32: faster, with 10 bits of mantissa. Refused on CPU, which has none."""
    log_every_steps: Positive = 20
    """Steps between log lines."""
    profile_steps: Annotated[tuple[Positive, ...], Field(max_length=20)] = ()
    """Steps, 1 for a run's first, whose torch profiler traces every rank writes into the run's folder `profile/`, as in
    [100, 101]; at most 20, as a trace takes about a megabyte a step."""
    validate_every_steps: NonNegative = 0
    """Steps between validations; 0: only at the end."""
    validation_rows: NonNegative = 0
    """Rows of a validation during training, from the start of the split; 0: all. The last one uses all."""
    validation_batch_size: NonNegative = 0
    """Global batch size of evaluation; 0: the training batch size."""
    best_metric: Literal["logloss", "auc", "none"] = "logloss"
    """What tells the best checkpoint. A validation that improves it saves one, which is kept; none keeps no best."""
    auc: Literal["auto", "exact", "binned"] = "auto"
    """AUC of evaluation. exact takes 4 bytes a row, spread over the ranks; binned takes fixed memory and states its
    largest error; auto: exact up to 268,435,456 rows."""
    collective_timeout_seconds: Positive = 300
    """How long a rank waits for the others before it gives up."""
    deterministic: bool = False
    """Two runs of one config on equal ranks and threads agree to the last bit. On CPU they do anyway; this makes torch
    refuse what it can't repeat, and on CUDA costs speed."""
    memory_check: Literal["refuse", "warn"] = "refuse"
    """What to do when the memory that a run is predicted to need isn't there: refuse it before anything is allocated,
    or warn and try."""


class CheckpointConfig(_Section):
    """Incremental checkpoints: one baseline, then deltas of the touched rows."""

    interval: Literal["steps", "seconds", "auto"] = "steps"
    """When checkpoints are due, besides those at the end, on a signal and of a best validation. steps: every
    `every_steps`. seconds: every `every_seconds`. auto: as often as `overhead_budget` allows by what saving turns out
    to cost, and at least as often as `recovery_point_seconds` asks for. Training doesn't depend on it."""
    every_steps: NonNegative = 500
    """Steps between checkpoints; 0: only at the end and on a signal. auto begins with it (with 100 in place of 0)."""
    every_seconds: Annotated[float, Field(gt=0)] = 600.0
    """Seconds between the beginnings of two checkpoints, by rank 0's clock; longer where writing one takes longer."""
    overhead_budget: Annotated[float, Field(gt=0, le=1)] = 0.035
    """auto: share of the training time that stalls and slower steps while writing may take; CheckFreq's is 3.5 %."""
    recovery_point_seconds: Annotated[float, Field(gt=0)] = 1800.0
    """auto: most seconds of training that a crash may cost; goes before the budget, and the run says so. What can't be
    written in less time isn't."""
    staging_memory: str = "auto"
    """Host memory a rank for the copy of rows that a checkpoint begins with, as in 4GiB, allocated at the start; auto:
    what all rows take, up to half of the memory that is left. Where rows don't fit, training waits until they are
    written, and the run says so with the numbers; 0 copies nothing."""
    path: str = ""
    """Where checkpoints go: empty for `checkpoints/` in the run's folder, another folder that all ranks share, or the
    URL of an object store, as s3://bucket/run. Credentials come from the environment and fsspec's configuration."""
    policy: Literal["consecutive", "one_shot", "intermittent"] = "consecutive"
    """What a delta holds. consecutive: the rows touched since the checkpoint before, so a restore reads the baseline
    and all deltas since. one_shot: all rows touched since the baseline, so it reads the baseline and one delta, and
    the deltas before the last `keep_baselines` are removed. intermittent: as one_shot, with a new baseline once the
    sizes of the deltas so far say that it pays (Check-N-Run's rule). A resumed run may change it."""
    baseline_ratio: Annotated[float, Field(gt=0)] = 1.0
    """consecutive and one_shot: a new baseline is written when the deltas that a restore reads exceed this many times
    its bytes."""
    merger: bool = False
    """consecutive: after the first baseline only deltas are written, whatever `baseline_ratio` says, as `dlrm-scale
    checkpoint merge RUN --watch 60 --keep 2` runs beside the trainer, makes new baselines and removes old ones."""
    delta_rows: Literal["fp32", "int8"] = "fp32"
    """How deltas store rows of tables. int8 takes a byte a value and 8 a row, and resumes are no longer bit-exact. Rows
    that would lose too much, and all baselines, stay fp32."""
    delta_state: Literal["fp32", "bf16"] = "fp32"
    """How deltas store optimizer state; bf16 keeps every exponent, and loses bit-exact resumes too."""
    expected_restores: Positive = 10
    """How many restores from rounded values a run expects, each of which adds an error; with int8 rows at most 10, for
    which there is evidence. A run that has had as many writes its deltas' rows in fp32, and says so."""
    keep_baselines: Positive = 2
    """Chains (a baseline with its deltas) that are kept; older files are removed after a commit. With 1
    a damaged baseline loses every checkpoint, which training warns of."""
    on_failure: Literal["warn", "stop"] = "warn"
    """What a failed save does to training; the rows stay marked for the next one either way."""
    vote_timeout_seconds: Positive = 120
    """How long a rank waits for another's vote on a checkpoint, from the last progress of its writing on."""


class Config(_Section):
    """A whole run. Frozen; `recipes.load` makes it from a recipe or TOML file and overrides."""

    run: RunConfig = RunConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    dense_optimizer: DenseOptimizerConfig = DenseOptimizerConfig()
    sparse_optimizer: SparseOptimizerConfig = SparseOptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    sharding: ShardingConfig = ShardingConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
