"""The pass that settles the order of gradient sums leaves the model as it was."""

import torch

from dlrm_scale.models.build import build_model
from dlrm_scale.models.tables import table_specs
from dlrm_scale.recipes import load_config
from dlrm_scale.sharding.first_pass import settle_gradient_order
from dlrm_scale.sharding.ranks import close_ranks, init_ranks
from dlrm_scale.sharding.shard import shard_model
from dlrm_scale.touched_rows import TouchedRows
from tests.support.rank_runner import run_ranks


def _changed(kind: str) -> list[str]:
    config = load_config(
        "sample",
        ["model.dim=8", "model.dense_layers=[8]", "model.over_layers=[8, 1]", f"sharding.kind={kind}"],
    )
    ranks = init_ranks("cpu", 60)
    try:
        tables = table_specs(config.model, {"C1": 30, "C2": 2, "C3": 7})
        sharded = shard_model(build_model(config.model, tables), tables, config, ranks)
        touched = TouchedRows([shard.region.rows for shard in sharded.local_shards])
        sharded.track(touched)
        touched.enabled = True
        for shard in sharded.local_shards:
            shard.weight.uniform_(-1, 1)
            for state in shard.state.values():
                state.uniform_(0, 1)
        sharded.set_table_iterations(7)

        def values() -> dict[str, torch.Tensor]:
            found = {f"dense {name}": value.detach().clone() for name, value in sharded.dense_state().items()}
            for index, shard in enumerate(sharded.local_shards):
                for name, value in (("weight", shard.weight), *shard.state.items()):
                    found[f"{shard.region.table} {index} {name}"] = value.detach().clone()
                found[f"touched {index}"] = touched.current(index).clone()
            found["iterations"] = torch.tensor(sharded.table_iterations())
            found["random"] = torch.get_rng_state()
            return found

        before = values()
        settle_gradient_order(sharded, 13)
        after = values()
        assert before.keys() == after.keys()
        return [name for name in before if not torch.equal(before[name], after[name])]
    finally:
        close_ranks()


def test_no_row_state_parameter_mark_counter_or_random_number_changes() -> None:
    for kind in ("table_wise", "row_wise", "table_row_wise", "data_parallel"):
        assert run_ranks(2, _changed, kind) == [[], []], kind
