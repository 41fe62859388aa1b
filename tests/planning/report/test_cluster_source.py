"""Where a cluster's constants come from, in one line."""

from dlrm_scale.planning.cluster.cluster_file import load_cluster
from dlrm_scale.planning.report.cluster_source import cluster_source, describe_source
from tests.planning.costs.small_cluster import small_cluster


def test_a_ready_made_gpu_cluster_has_nothing_measured() -> None:
    for name in ("a100x8", "h100x8", "h200x8"):
        assert describe_source(load_cluster(name)) == f"{name}: data sheets and assumptions, nothing measured"
    assert describe_source(small_cluster()) == "small: data sheets and assumptions, nothing measured"


def test_a_measured_cluster_tells_how_much_of_it_when_and_how_noisily() -> None:
    cluster = load_cluster("cpu2")
    source = cluster_source(cluster)
    assert source.given == 1  # grid_shard, which is assumed
    assert (source.kind, source.noise, source.when) == ("partly", cluster.noise, "2026-12-01")
    told = describe_source(cluster)
    assert told.startswith(f"cpu2: calibrated {source.measured} of {source.measured + 1} constants")
    assert told.endswith(f" on 2026-12-01; {cluster.noise}")
    undated = cluster.model_copy(update={"notes": "Elapsed times of dlrm-scale calibrate."})
    assert describe_source(undated).endswith(f", its file doesn't say when; {cluster.noise}")
    quiet = cluster.model_copy(update={"notes": "Elapsed times of dlrm-scale calibrate, 2026-11-30.", "noise": ""})
    assert describe_source(quiet).endswith(" on 2026-11-30")
