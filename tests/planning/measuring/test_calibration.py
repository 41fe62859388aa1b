"""A calibration on two gloo ranks, and what whole steps do to a cluster's costs."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dlrm_scale.errors import ConfigError, TrainingError
from dlrm_scale.planning.cluster.cluster import COLLECTIVES, Cluster, Constant
from dlrm_scale.planning.cluster.cluster_file import load_cluster, save_cluster
from dlrm_scale.planning.costs.plan_rating import Prediction
from dlrm_scale.planning.costs.step_model import predict
from dlrm_scale.planning.measuring.calibration import Calibration, CalibrationRequest, calibrate_rank
from dlrm_scale.planning.measuring.calibration_noise import judge_noise
from dlrm_scale.planning.measuring.micro_timing import Timing
from dlrm_scale.planning.measuring.probe_models import ProbeModel, probe_models
from dlrm_scale.planning.measuring.probe_steps import PARTS, ProbedStep, apply_probes, rated_step, type_evidence
from dlrm_scale.planning.tables.table_set import TableSet, TableStats
from dlrm_scale.sharding.shard_shapes import TableShape
from tests.planning.costs.small_cluster import bent_cluster
from tests.support.rank_runner import run_ranks

QUICK = CalibrationRequest(name="mine", device="cpu", quick=True, allow_noise=True)


def _calibrate(request: CalibrationRequest, stop_at_once: bool = False) -> Calibration:
    return calibrate_rank(request, SimpleNamespace(requested=stop_at_once))


def test_two_ranks_measure_a_cluster_that_plans_can_be_rated_with(tmp_path: Path) -> None:
    results = run_ranks(2, _calibrate, QUICK)
    cluster = results[0].cluster
    assert (cluster.device, cluster.hosts, cluster.ranks_per_host) == ("cpu", 1, 2)
    assert {costs.collective for costs in cluster.collectives} == set(COLLECTIVES)
    assert {costs.ranks for costs in cluster.collectives} == {2}
    assert set(cluster.fit_error) == {"lookup", "update", "input", "bucketize", "replicas", "dense", "step"}
    assert all(error < 1 for error in cluster.fit_error.values()), cluster.fit_error
    types = {"table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "data_parallel"}
    assert set(cluster.type_ms) == {*types, "grid_shard"}
    # A lookup costs something by the id, by the value, or both, and so does its update.
    for costs in (cluster.forward, cluster.backward):
        assert costs.lookup_ms.value + costs.element_ms.value + costs.output_element_ms.value > 0
        assert "calibrate" in costs.lookup_ms.source

    path = tmp_path / "mine.toml"
    save_cluster(cluster, path)
    assert load_cluster(path) == cluster
    tables = TableSet(name="one", tables=(TableStats(name="C1", rows=1000, dim=16),))
    plan = [TableShape(sharding_type="table_wise", columns=16, places=(1,))]
    step = predict(tables, cluster, plan, ranks=2, ranks_per_host=2, batch_size_per_rank=256).step_ms
    assert 0.1 < step < 1000


@pytest.mark.slow
def test_two_hosts_of_two_ranks_measure_groups_within_across_and_of_all() -> None:
    cluster = run_ranks(4, _calibrate, QUICK, ranks_per_host=2, timeout_seconds=280)[0].cluster
    assert (cluster.hosts, cluster.ranks_per_host) == (2, 2)
    assert {(costs.ranks, costs.hosts) for costs in cluster.collectives} == {(2, 1), (2, 2), (4, 2)}
    tables = TableSet(name="one", tables=(TableStats(name="C1", rows=1000, dim=16),))
    plan = [TableShape(sharding_type="table_row_wise", columns=16, places=(1,))]
    assert predict(tables, cluster, plan, ranks=4, ranks_per_host=2, batch_size_per_rank=256).step_ms > 0


def test_one_rank_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="one rank exchanges nothing"):
        run_ranks(1, _calibrate, QUICK)


def test_a_signal_stops_it_between_its_parts() -> None:
    with pytest.raises(TrainingError, match="nothing was written"):
        run_ranks(2, _calibrate, QUICK, stop_at_once=True)


def _rated(cluster: Cluster, probe: ProbeModel) -> Prediction:
    return predict(
        probe.tables,
        cluster,
        probe.plan,
        ranks=2,
        ranks_per_host=2,
        batch_size_per_rank=probe.batch_size_per_rank,
        dense=probe.dense(),
    )


def _step(cluster: Cluster, probe: ProbeModel, random: np.random.Generator, noise: float = 0.01) -> ProbedStep:
    """Take a step as a machine would whose parts are `FACTORS` times what `cluster` says, with some noise."""
    nothing = Timing(milliseconds=0.0, spread=0.0, delay_share=0.0)
    step = rated_step(probe, probe.tables, cluster, nothing, ranks=2, ranks_per_host=2)
    milliseconds = sum(ms * FACTORS.get(part, 1.0) for part, ms in zip(PARTS, step.parts_ms, strict=True))
    milliseconds += sum(CONSTANTS[kind] for kind in step.types)
    milliseconds *= float(np.exp(noise * random.standard_normal()))
    return replace(step, timing=replace(nothing, milliseconds=milliseconds))


FACTORS = {"dense": 1.3, "exchange": 0.7, "sums": 1.6, "input": 1.5}
CONSTANTS = {
    "table_wise": 1.0, "row_wise": 6.0, "column_wise": 2.0, "table_row_wise": 8.0, "table_column_wise": 3.0,
    "data_parallel": 4.0,
}  # fmt: skip


def _cluster_with_slow_layers() -> Cluster:
    slow = Constant(value=100.0, source="so that layers take a good part of small steps")
    dense = bent_cluster().dense.model_copy(update={"gflop_ms": slow})
    return bent_cluster().model_copy(update={"type_ms": {}, "dense": dense})


def test_whole_steps_of_some_models_correct_the_predictions_of_others() -> None:
    cluster = _cluster_with_slow_layers()
    random = np.random.default_rng(1)
    probes = probe_models(96, ranks=2, ranks_per_host=2)
    steps = [_step(cluster, probe, random) for probe in probes]
    found, error = apply_probes(cluster, steps[:64])
    assert error < 0.04

    def mean_error(model: Cluster) -> float:
        errors = [
            abs(_rated(model, probe).step_ms / step.timing.milliseconds - 1)
            for probe, step in zip(probes[64:], steps[64:], strict=True)
        ]
        return float(np.mean(errors))

    assert mean_error(found) < 0.05 < 0.15 < mean_error(cluster)
    # What every step pays can't be told from what every type pays: differences can.
    apart = {kind: constant.value - found.type_ms["table_wise"].value for kind, constant in found.type_ms.items()}
    for kind, value in CONSTANTS.items():
        assert apart[kind] == pytest.approx(value - 1.0, abs=1.0), kind
    assert found.type_ms["grid_shard"].value == found.type_ms["table_row_wise"].value
    assert "assumed" in found.type_ms["grid_shard"].source
    assert "in whole steps" in found.forward.lookup_ms.source


@pytest.mark.parametrize("seed", range(3))
def test_steps_of_a_noisy_machine_dont_bear_out_their_constants_and_those_of_a_quiet_one_do(seed: int) -> None:
    cluster, probes = _cluster_with_slow_layers(), probe_models(40, ranks=2, ranks_per_host=2)
    quiet = {"parts": [Timing(milliseconds=1.0, spread=0.0, delay_share=0.0)]}

    def faults(noise: float) -> tuple[str, ...]:
        random = np.random.default_rng(seed)
        steps = [_step(cluster, probe, random, noise) for probe in probes]
        evidence = type_evidence(steps)
        assert [constant.kind for constant in evidence] == sorted(CONSTANTS)
        for constant in evidence:
            assert 0 <= constant.low_ms <= constant.high_ms
        fitted = apply_probes(cluster, steps)[0].type_ms
        assert {c.kind: c.value_ms for c in evidence} == {c.kind: fitted[c.kind].value for c in evidence}
        return judge_noise(quiet, 0.0, 2, types=evidence, allowed=True).faults

    assert faults(0.03) == ()
    assert faults(0.1) == ()
    assert faults(1.0) != ()
