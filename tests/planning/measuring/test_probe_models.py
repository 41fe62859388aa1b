"""Small models are the same every time, have every kind of plan, and know what their ids look up."""

import numpy as np
import torch

from dlrm_scale.planning.measuring.probe_models import probe_batches, probe_models
from dlrm_scale.sharding.shard_shapes import table_layout
from tests.planning.tables.uses_of_rows import share_of_rows


def test_eight_models_have_every_type_that_two_ranks_of_a_host_can_have() -> None:
    probes = probe_models(16, ranks=2, ranks_per_host=2)
    assert probes == probe_models(16, ranks=2, ranks_per_host=2)
    types = {shape.sharding_type for probe in probes for shape in probe.plan}
    assert types == {
        "table_wise", "row_wise", "table_row_wise", "column_wise", "table_column_wise", "data_parallel",
    }  # fmt: skip
    assert any(len({shape.sharding_type for shape in probe.plan}) > 1 for probe in probes)


def test_every_plan_is_one_that_the_trainer_can_run() -> None:
    for ranks, local in ((2, 2), (4, 2), (8, 4)):
        for probe in probe_models(24, ranks=ranks, ranks_per_host=local):
            for table, shape in zip(probe.tables.tables, probe.plan, strict=True):
                table_layout(table.spec, shape, ranks=ranks, ranks_per_host=local)  # refuses what can't be cut


def test_batches_of_two_ranks_are_what_the_tables_say_of_them() -> None:
    probe = probe_models(8, ranks=2, ranks_per_host=2)[4]
    drawn = [probe_batches(probe, rank, 2) for rank in range(2)]
    rows = probe.batch_size_per_rank
    for name, table in zip(drawn[0][0][0].sparse_features.keys(), drawn[0][1].tables, strict=True):
        ids = [batches[0].sparse_features[name].values() for batches, _ in drawn]
        assert len(ids[0]) == rows * table.lookups_per_sample
        both = torch.cat(ids).numpy()
        assert both.max() < table.rows
        assert dict(table.unique_rows)[2 * rows] == len(np.unique(both))
        assert dict(table.unique_rows)[rows] == len(np.unique(ids[0].numpy()))
        cut = -(-table.rows // 2)
        assert share_of_rows(table, 0, cut) == np.mean(both < cut)
    again, _ = probe_batches(probe, 0, 2)
    assert torch.equal(again[1].sparse_features.values(), drawn[0][0][1].sparse_features.values())
