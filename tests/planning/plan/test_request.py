"""What a plan may be asked for."""

import pytest

from dlrm_scale.errors import ConfigError
from dlrm_scale.planning.plan.cost_models import OurCosts
from dlrm_scale.planning.plan.request import plan_request, read_constraints
from dlrm_scale.planning.plan.shapes import shapes_of
from dlrm_scale.planning.solver.solve import solve
from dlrm_scale.recipes import load_config
from tests.planning.costs.small_cluster import small_cluster
from tests.planning.plan.small_requests import small_request, small_tables


def test_constraints_are_read_by_table() -> None:
    read = read_constraints(["C1=row_wise, C2=table_wise|row_wise", "C3=data_parallel"])
    assert read == {"C1": ("row_wise",), "C2": ("table_wise", "row_wise"), "C3": ("data_parallel",)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("C1", "--constrain 'C1' is no constraint"),
        ("=row_wise", "is no constraint"),
        ("C1=", "is no constraint"),
        ("C1=row_wise,", "--constrain '' is no constraint"),
        ("C1=row_wsie", "C1=row_wsie: no such sharding type; did you mean row_wise"),
        ("C1=row_wise,C1=table_wise", "table C1 is there twice"),
    ],
)
def test_constraints_of_another_form_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_constraints([text])


def test_a_constraint_on_a_table_that_is_not_there_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="--constrain larg: small has no such table") as caught:
        small_request(types={"larg": ("row_wise",)})
    assert "did you mean 'large'" in (caught.value.remedy or "")


def test_hosts_that_do_not_divide_the_ranks_are_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match="6 ranks don't divide into hosts of 4") as caught:
        small_request(ranks=6, ranks_per_host=4)
    assert "1, 2, 3, 6" in (caught.value.remedy or "")


def test_fewer_ranks_than_a_host_has_are_one_smaller_host() -> None:
    assert small_request(ranks=4).ranks_per_host == 4
    assert small_request(ranks=16).ranks_per_host == 8


def test_an_optimizer_without_a_kernel_on_the_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="adam isn't supported for tables on CPU"):
        plan_request(small_tables("adam"), small_cluster(), ranks=2, batch_size_per_rank=8)


def test_a_config_brings_its_dense_part_and_exchanges_into_the_step() -> None:
    tables, cluster = small_tables(), small_cluster(memory_bytes=80 << 30)
    alone = plan_request(tables, cluster, ranks=2, batch_size_per_rank=8)
    config = load_config("sample", ["sharding.all_to_all_precision=fp16"])
    whole = plan_request(tables, cluster, ranks=2, batch_size_per_rank=8, config=config)
    problem = OurCosts(alone).problem
    shapes = shapes_of(problem, solve(problem, effort=0.0).assignment)
    bare, full = OurCosts(alone).load(shapes), OurCosts(whole).load(shapes)
    assert full.slowest_ms["dense"] > bare.slowest_ms["dense"]
    assert max(full.memory_bytes["dense"]) > max(bare.memory_bytes["dense"]) == 0
    assert full.slowest_ms["output"] < bare.slowest_ms["output"]
    assert (whole.step_settings["touched_maps"], alone.step_settings) == (2, {})
