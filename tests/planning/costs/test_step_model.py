"""A step's time: computed by hand, exact against linear, bounded from below, growing with its work."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from dlrm_scale.config import Config
from dlrm_scale.errors import ConfigError, PlanError
from dlrm_scale.layout import ShardLayout
from dlrm_scale.planning.cluster.cluster import Cluster, Constant
from dlrm_scale.planning.cluster.cluster_file import load_cluster
from dlrm_scale.planning.costs.dense_work import DenseWork
from dlrm_scale.planning.costs.plan_rating import Prediction
from dlrm_scale.planning.costs.step_model import make_problem, predict
from dlrm_scale.planning.solver.problem import Assignment, Option, Problem
from dlrm_scale.planning.solver.rate import rate
from dlrm_scale.planning.tables.table_set import TableSet, TableStats
from dlrm_scale.sharding.memory_estimate import table_memory
from dlrm_scale.sharding.shard_shapes import HOST_TYPES, TableShape, table_layout
from tests.planning.costs.small_cluster import bent_cluster, small_cluster

# Every id is another row, so that distinct rows are ids.
TWO = TableSet(
    name="two",
    optimizer="sgd",
    tables=(
        TableStats(name="C1", rows=10**6, dim=8, lookups_per_sample=2, unique_rows=((1, 2.0), (1000, 2000.0))),
        TableStats(name="C2", rows=10**5, dim=4, lookups_per_sample=1, unique_rows=((1, 1.0), (1000, 1000.0))),
    ),
)
BATCH = 100


def _rate(plan: Sequence[TableShape], cluster: Cluster | None = None, **settings: object) -> Prediction:
    settings = {"ranks": 2, "ranks_per_host": 2, "batch_size_per_rank": BATCH} | settings
    return predict(TWO, cluster or small_cluster(), plan, **settings)


def _table_wise(*ranks: int, dims: Sequence[int] = (8, 4)) -> list[TableShape]:
    return [
        TableShape(sharding_type="table_wise", columns=dim, places=(rank,))
        for dim, rank in zip(dims, ranks, strict=True)
    ]


def test_a_table_wise_step_by_hand() -> None:
    found = _rate(_table_wise(0, 1))
    samples = 2 * BATCH
    # rank 0 has C1: 400 ids of as many rows, 8 columns; rank 1 has C2: 200 ids, 4 columns
    lookup = [
        0.001 + 0.01 + (ids * (1 + 0.1 * d) + ids * (2 + 0.2 * d) + 0.3 * d * samples) / 1e6
        for ids, d in ((400, 8), (200, 4))
    ]
    arriving = [8 * ids + 4 * samples for ids in (400, 200)]
    moved = [0.5 + (4 * ids + 3 * samples) / 1e6 for ids in (400, 200)]
    sent = [4 * samples * d for d in (8, 4)]
    exchange = [0.13 + 0.5e-6 * size for size in sent]
    expected = {
        "input": [0.13 + 0.5e-6 * size + m for size, m in zip(arriving, moved, strict=True)],
        "lookup": lookup,
        "output": exchange,
        "dense": [1.0 + 6.0 * BATCH * 12 / 1e6] * 2,
        "gradient": exchange,
        "update": [2 * ms for ms in lookup],
        "replicas": [0.0, 0.0],
        "overhead": [1.5, 1.5],
    }
    for phase, by_rank in zip(found.phases, found.phase_ms, strict=True):
        assert by_rank.tolist() == pytest.approx(expected[phase]), phase
    assert found.step_ms == pytest.approx(sum(max(by_rank) for by_rank in expected.values()))
    assert sum(found.slowest_ms.values()) == pytest.approx(found.step_ms)


def test_a_row_wise_and_a_data_parallel_table_by_hand() -> None:
    plan = [TableShape(sharding_type="row_wise", columns=8), TableShape(sharding_type="data_parallel", columns=4)]
    found = dict(zip(*(lambda p: (p.phases, p.phase_ms))(_rate(plan)), strict=True))
    samples = 2 * BATCH
    # C1 on both ranks: half of 400 ids, vectors of all 200 samples; C2 on both: 100 ids, vectors of own samples
    halves = 0.01 + (200 * (1 + 0.8) + 200 * (2 + 1.6) + 0.3 * 8 * samples) / 1e6
    copies = 0.01 + (100 * (1 + 0.4) + 100 * (2 + 0.8) + 0.3 * 4 * BATCH) / 1e6
    assert found["lookup"].tolist() == pytest.approx([2 * 0.001 + halves + copies] * 2)
    assert found["update"].tolist() == pytest.approx([2 * (2 * 0.001 + halves + copies)] * 2)
    # a reduce-scatter of vectors of all samples: a step of 0.02 ms, half of the bytes
    assert found["output"].tolist() == pytest.approx([0.12 + 0.5e-6 * 4 * samples * 8] * 2)
    assert found["gradient"].tolist() == pytest.approx(found["output"].tolist())
    # each rank cuts its own 200 ids, gets 200, and the lengths of 200 bags
    arriving = 8 * 200 + 4 * samples
    moved = 0.5 + (4 * 200 + 3 * samples + 5 * 200) / 1e6
    assert found["input"].tolist() == pytest.approx([0.13 + 0.5e-6 * arriving + moved] * 2)
    elements = 4 * 10**5
    assert found["replicas"].tolist() == pytest.approx([0.25 + 7 * elements / 1e6 + 0.14 + 1e-6 * 4 * elements] * 2)
    assert found["overhead"].tolist() == pytest.approx([2.5 + 0.75] * 2)


def test_a_table_within_one_of_two_hosts_by_hand() -> None:
    plan = [TableShape(sharding_type="table_row_wise", columns=8, places=(1,)), *_table_wise(0, dims=(4,))]
    found = dict(zip(*(lambda p: (p.phases, p.phase_ms))(_rate(plan, ranks=4)), strict=True))
    samples = 4 * BATCH
    # reduce-scatter on host 1, then a rank of each host: half of the vectors of its host's tables
    within, between, whole = 0.12, 0.4, 0.73
    scattered = 4 * samples * 8
    table_wise = [whole + 5e-6 * 4 * samples * 4, whole, whole, whole]
    expected = [
        table_wise[rank] + within + between + (0.5e-6 * scattered + 5e-6 * scattered / 2 if rank >= 2 else 0.0)
        for rank in range(4)
    ]
    assert found["output"].tolist() == pytest.approx(expected)
    # every rank cuts its own 200 ids, but only host 1 gets them
    arriving = [0.0, 0.0, 8 * 400 + 4 * samples, 8 * 400 + 4 * samples]
    moved = [0.0, 0.0, (4 * 400 + 3 * samples) / 1e6, (4 * 400 + 3 * samples) / 1e6]
    arriving_c2, moved_c2 = 8 * 400 + 4 * samples, (4 * 400 + 3 * samples) / 1e6
    expected = [
        2 * (0.5 + 0.73)
        + 5 * 200 / 1e6
        + 5e-6 * (arriving[rank] + (arriving_c2 if rank == 0 else 0))
        + moved[rank]
        + (moved_c2 if rank == 0 else 0)
        for rank in range(4)
    ]
    assert found["input"].tolist() == pytest.approx(expected)


def test_the_dense_part_by_hand() -> None:
    dense = DenseWork(parameters=10**6, multiply_adds_per_row=2 * 10**6, precision="bf16")
    found = _rate(_table_wise(0, 0), dense=dense)
    gflop = 6 * 2e6 * BATCH / 1e9
    expected = 1.0 + 6.0 * BATCH * 12 / 1e6 + 5.0 * gflop + 8.0 + 0.14 + 1e-6 * 4e6
    assert found.slowest_ms["dense"] == pytest.approx(expected)


def test_tf32_is_counted_at_its_own_rate_or_at_half_that_of_bf16() -> None:
    in_tf32 = DenseWork(parameters=0, multiply_adds_per_row=2 * 10**6, precision="tf32")
    gflop = 6 * 2e6 * BATCH / 1e9

    def per_gflop(**rates: object) -> float:
        costs = small_cluster().dense.model_copy(update=rates)
        cluster = small_cluster(device="cuda", dense=costs)
        with_layers, without = (_rate(_table_wise(0, 0), cluster, dense=dense) for dense in (in_tf32, None))
        return (with_layers.slowest_ms["dense"] - without.slowest_ms["dense"]) / gflop

    def constant(value: float) -> Constant:
        return Constant(value=value, source="by hand")

    assert per_gflop(tf32_gflop_ms=constant(7.0)) == pytest.approx(7.0)
    assert per_gflop(bf16_gflop_ms=constant(3.0)) == pytest.approx(6.0)
    assert per_gflop(bf16_gflop_ms=constant(9.0)) == pytest.approx(10.0), "no slower than fp32"
    with pytest.raises(ConfigError, match=r"train.tf32 = true: .* cluster small is of CPUs"):
        _rate(_table_wise(0, 0), dense=in_tf32)


def test_a_runs_tf32_halves_the_layers_of_a_described_gpu_or_more() -> None:
    layers = {"model": {"dim": 16, "dense_layers": (32, 16), "over_layers": (64, 1)}}
    found = {}
    for name, train in (("fp32", {}), ("tf32", {"tf32": True}), ("bf16", {"tf32": True, "precision": "bf16"})):
        work = DenseWork.of_config(Config.model_validate({**layers, "train": train}), 3, 128)
        assert work.precision == name
        found[name] = load_cluster("h100x8").dense.flop_rate_ms(work.precision)
    assert found["bf16"] < found["tf32"] < found["fp32"] / 2


def test_vectors_in_16_bits_halve_what_is_exchanged() -> None:
    full, half = (_rate(_table_wise(0, 1), exchange=precision) for precision in ("fp32", "fp16"))
    sent = 0.5e-6 * 4 * 2 * BATCH * 8
    for phase in ("output", "gradient"):
        assert full.slowest_ms[phase] - half.slowest_ms[phase] == pytest.approx(sent / 2)
    assert full.slowest_ms["input"] == half.slowest_ms["input"]


def test_sparse_dist_hides_ids_on_cuda_alone_and_no_more_than_is_computed_meanwhile() -> None:
    on_gpu = small_cluster(device="cuda")
    plan = _table_wise(0, 1)
    plain, hidden = (_rate(plan, on_gpu, pipeline=pipeline) for pipeline in ("plain", "sparse_dist"))
    assert hidden.exposed_input_ms == 0
    assert plain.step_ms - hidden.step_ms == pytest.approx(plain.slowest_ms["input"])
    slow_ids = small_cluster(device="cuda", input=small_cluster().input.model_copy(
        update={"call_ms": small_cluster().input.call_ms.model_copy(update={"value": 100.0})}
    ))  # fmt: skip
    long = _rate(plan, slow_ids)
    computed = sum(long.slowest_ms[phase] for phase in ("lookup", "dense", "update"))
    assert long.exposed_input_ms == pytest.approx(long.phase_ms[0].max() - computed)
    assert _rate(plan, pipeline="sparse_dist").step_ms == _rate(plan, pipeline="plain").step_ms


def test_hot_rows_in_one_shard_slow_its_rank_alone() -> None:
    table = TableStats(name="C1", rows=1000, dim=8, lookups_per_sample=50, lookups_before_row=((1, 0.5),))
    tables = TableSet(name="hot", optimizer="sgd", tables=(table,))
    plan = [TableShape(sharding_type="row_wise", columns=8)]
    found = predict(tables, small_cluster(), plan, ranks=4, ranks_per_host=2, batch_size_per_rank=BATCH)
    ids = 50 * 4 * BATCH
    lookup = found.phase_ms[found.phases.index("lookup")]
    assert lookup[1:].tolist() == pytest.approx([lookup[1]] * 3, rel=1e-3)
    assert lookup[0] - lookup[1] == pytest.approx(ids / 2 * 1.8 / 1e6, rel=0.01)


def _shapes(problem: Problem, assignment: Assignment) -> list[TableShape]:
    return [
        _shape(options[chosen], ranks, problem)
        for options, chosen, ranks in zip(problem.options, assignment.chosen, assignment.ranks, strict=True)
    ]


def _shape(option: Option, ranks: tuple[int, ...], problem: Problem) -> TableShape:
    places = ranks
    if option.sharding_type in HOST_TYPES:
        places = tuple(rank // problem.ranks_per_host for rank in ranks[:: problem.ranks_per_host])
    return TableShape(sharding_type=option.sharding_type, columns=option.columns, places=places)


def _random_assignment(problem: Problem, random: np.random.Generator) -> Assignment:
    chosen, places = [], []
    for options in problem.options:
        index = int(random.integers(len(options)))
        option, local = options[index], problem.ranks_per_host
        hosts = problem.ranks // local
        if option.placement == "all_ranks":
            ranks: list[int] = []
        elif option.placement == "hosts":
            picked = random.permutation(hosts)[: option.shards // local]
            ranks = [int(host) * local + i for host in picked for i in range(local)]
        elif option.placement == "one_host":
            host = int(random.integers(hosts))
            ranks = [host * local + int(i) for i in random.integers(local, size=option.shards)]
        else:
            ranks = [int(rank) for rank in random.integers(problem.ranks, size=option.shards)]
        chosen.append(index)
        places.append(tuple(ranks))
    return Assignment(chosen=tuple(chosen), ranks=tuple(places))


def _tables(random: np.random.Generator, count: int, *, rows_unit: int) -> TableSet:
    tables = tuple(
        TableStats(
            name=f"C{i}",
            rows=rows_unit * int(random.integers(1, 200)),
            dim=int(random.choice([16, 32, 64])),
            lookups_per_sample=float(random.integers(1, 20)),
        )
        for i in range(count)
    )
    return TableSet(name="random", tables=tables)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("types", [("table_wise", "row_wise", "column_wise", "table_column_wise", "data_parallel")])
def test_the_problem_rates_a_plan_as_predict_does_where_costs_are_straight(seed: int, types: tuple[str, ...]) -> None:
    random = np.random.default_rng(seed)
    tables = _tables(random, 6, rows_unit=4)  # shards of all ranks are alike
    where = {"ranks": 4, "ranks_per_host": 2, "batch_size_per_rank": 64}
    problem = make_problem(tables, small_cluster(), **where, wide=True, types={t.name: types for t in tables.tables})
    for _ in range(20):
        assignment = _random_assignment(problem, random)
        rated = rate(problem, assignment)
        exact = predict(tables, small_cluster(), _shapes(problem, assignment), **where)
        assert rated.step_ms == pytest.approx(exact.step_ms, rel=1e-7)
        loads = {phase: ms.max() for phase, ms in zip(problem.phases, rated.load_ms, strict=True)}
        for phase in ("lookup", "update"):
            calls = sum(
                {"lookup": 0.001, "update": 0.002}[phase]
                for _ in {o.sharding_type for o in _chosen(problem, assignment)}
            )
            assert loads[phase] + calls == pytest.approx(exact.slowest_ms[phase])
        own_ids = exact.memory_bytes[exact.memory_parts.index("own_ids")]
        assert np.array_equal(rated.memory_bytes + own_ids, exact.bytes_per_rank)
        assert problem.memory_bytes + own_ids[0] == exact.capacity_bytes


def _chosen(problem: Problem, assignment: Assignment) -> list[Option]:
    return [options[index] for options, index in zip(problem.options, assignment.chosen, strict=True)]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("make_cluster", "local"), [(bent_cluster, 4), (small_cluster, 2)])
def test_a_plan_never_costs_less_than_the_problem_says(seed: int, make_cluster: object, local: int) -> None:
    random = np.random.default_rng(seed)
    tables = _tables(random, 6, rows_unit=4)
    where = {"ranks": 4, "ranks_per_host": local, "batch_size_per_rank": int(2 ** random.integers(4, 13))}
    problem = make_problem(tables, make_cluster(), **where, wide=True)
    ratios = []
    for _ in range(30):
        assignment = _random_assignment(problem, random)
        exact = predict(tables, make_cluster(), _shapes(problem, assignment), **where)
        linear = rate(problem, assignment).step_ms
        assert linear <= exact.step_ms * (1 + 1e-9)
        ratios.append(linear / exact.step_ms)
    assert np.mean(ratios) > 0.4, "a bound that low would be no use"


PLANS = {
    "table_wise": [TableShape(sharding_type="table_wise", columns=16, places=(r,)) for r in (0, 3)],
    "row_wise": [TableShape(sharding_type="row_wise", columns=16)] * 2,
    "table_row_wise": [TableShape(sharding_type="table_row_wise", columns=16, places=(h,)) for h in (0, 1)],
    "column_wise": [TableShape(sharding_type="column_wise", columns=8, places=(0, 2))] * 2,
    "table_column_wise": [TableShape(sharding_type="table_column_wise", columns=8, places=(0, 1))] * 2,
    "grid_shard": [TableShape(sharding_type="grid_shard", columns=8, places=(0, 1))] * 2,
    "data_parallel": [TableShape(sharding_type="data_parallel", columns=16)] * 2,
}


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize(
    "cluster", [small_cluster(), load_cluster("a100x8"), load_cluster("h200x8")], ids=lambda c: c.name
)
def test_more_work_is_never_cheaper(kind: str, cluster: Cluster) -> None:
    def step(rows: int = 1000, lookups: float = 3.0, batch: int = 64) -> float:
        tables = TableSet(
            name="two",
            tables=tuple(TableStats(name=n, rows=rows, dim=16, lookups_per_sample=lookups) for n in ("C1", "C2")),
        )
        return predict(
            tables, cluster, PLANS[kind], ranks=4, ranks_per_host=2, batch_size_per_rank=batch, pipeline="plain"
        ).step_ms

    for name, values in (("rows", (1000, 5000, 10**6)), ("lookups", (1.0, 3.0, 30.0)), ("batch", (16, 64, 4096))):
        steps = [step(**{name: value}) for value in values]
        assert steps == sorted(steps), name
        assert steps[0] < steps[-1], name


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
@pytest.mark.parametrize("kind", PLANS)
def test_static_memory_is_that_of_the_plan_spelt_out(kind: str, optimizer: str) -> None:
    tables = TableSet(
        name="two",
        optimizer=optimizer,
        tables=(TableStats(name="C1", rows=1001, dim=16), TableStats(name="C2", rows=3, dim=16)),
    )
    found = predict(tables, small_cluster(), PLANS[kind], ranks=4, ranks_per_host=2, batch_size_per_rank=8)
    spelt_out = tuple(
        table_layout(t.spec, shape, ranks=4, ranks_per_host=2)
        for t, shape in zip(tables.tables, PLANS[kind], strict=True)
    )
    layout = ShardLayout(ranks=4, tables=spelt_out)
    for rank in range(4):
        exact = table_memory(layout, rank, optimizer)
        by_part = dict(zip(found.memory_parts, found.memory_bytes[:, rank].tolist(), strict=True))
        assert by_part["weights"] == exact.weights
        assert by_part["optimizer_state"] == exact.optimizer_state
        assert by_part["replicas"] == exact.replicas
        assert by_part["replica_gradients"] == exact.replica_gradients
        assert by_part["touched_rows"] == 2 * exact.touched_rows


def test_a_plan_for_4096_ranks_is_rated_by_rank() -> None:
    tables = TableSet(
        name="many",
        tables=tuple(TableStats(name=f"C{i}", rows=10**7, dim=128, lookups_per_sample=5) for i in range(26)),
    )
    plan = [
        TableShape(sharding_type="row_wise", columns=128)
        if i % 2
        else TableShape(sharding_type="table_row_wise", columns=128, places=(i,))
        for i in range(26)
    ]
    found = predict(tables, load_cluster("h100x8"), plan, ranks=4096, ranks_per_host=8, batch_size_per_rank=512)
    assert found.phase_ms.shape == (8, 4096)
    weights = found.memory_bytes[0]
    assert weights.sum() == 26 * 10**7 * 128 * 4
    assert found.fits
    assert found.capacity_bytes == int(81559 * 2**20 * 0.85)


def test_dense_sizes_come_from_the_runs_settings() -> None:
    config = Config.model_validate(
        {"model": {"dim": 16, "dense_layers": (32, 16), "over_layers": (64, 1)}, "train": {"precision": "bf16"}}
    )
    found = DenseWork.of_config(config, tables=3, batch_size_per_rank=128)
    bottom, top, pairs = 13 * 32 + 32 * 16, (16 + 6) * 64 + 64, 4 * 4 * 16
    assert found.parameters == bottom + 48 + top + 65
    assert found.multiply_adds_per_row == pytest.approx(bottom + top + pairs, rel=0.06)
    assert found.precision == "bf16"
    assert found.memory_bytes > 4 * 4 * found.parameters


def test_numbers_that_dont_go_together_are_told() -> None:
    with pytest.raises(ConfigError, match="6 ranks don't divide into hosts of 4"):
        _rate(_table_wise(0, 1), ranks=6, ranks_per_host=4)
    with pytest.raises(ConfigError, match="a batch of 0 rows a rank"):
        _rate(_table_wise(0, 1), batch_size_per_rank=0)
    with pytest.raises(ConfigError, match="a plan for 2097152 ranks: at most 1,048,576 are allowed"):
        _rate(_table_wise(0, 1), ranks=2**21)
    with pytest.raises(PlanError, match="a plan of 1 tables for a set of 2"):
        _rate(_table_wise(0, dims=(8,)))
    with pytest.raises(PlanError, match="table C1: no legal way to shard it is left"):
        make_problem(
            TWO, small_cluster(), ranks=2, ranks_per_host=2, batch_size_per_rank=4, types={"C1": ("grid_shard",)}
        )


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rows": 2**31, "dim": 2**20}, "the weights of all tables take 8388608.0 GiB"),
        ({"lookups_per_sample": 1e6}, "the ids of a global batch of 2,000,000,000 rows take"),
        ({"dim": 2**20}, "the pooled vectors of a global batch of 2,000,000,000 rows take"),
    ],
)
def test_sizes_beyond_what_64_bits_add_up_are_refused(values: dict[str, object], words: str) -> None:
    table = TableStats(**{"name": "C1", "rows": 1000, "dim": 8, **values})
    tables = TableSet(name="huge", tables=(table,))
    with pytest.raises(ConfigError, match=f"huge: {words}") as error:
        make_problem(tables, small_cluster(), ranks=2, ranks_per_host=2, batch_size_per_rank=10**9)
    assert "up to 1048576.0 GiB" in error.value.message


def test_equal_inputs_give_equal_problems() -> None:
    random = np.random.default_rng(5)
    tables = _tables(random, 5, rows_unit=1)
    made = [
        make_problem(tables, load_cluster("a100x8"), ranks=16, ranks_per_host=8, batch_size_per_rank=64, wide=True)
        for _ in range(2)
    ]
    assert made[0] == made[1]


def test_every_step_phase_of_a_problem_is_one_of_the_prediction() -> None:
    problem = make_problem(TWO, small_cluster(), ranks=2, ranks_per_host=2, batch_size_per_rank=4)
    found = _rate(_table_wise(0, 1))
    assert set(problem.phases) <= set(found.phases)
    assert {o.sharding_type for o, _ in product(problem.options[0], [0])} == {
        "table_wise", "row_wise", "table_row_wise", "data_parallel",
    }  # fmt: skip
