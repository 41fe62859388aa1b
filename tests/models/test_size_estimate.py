"""Sizes told before a model is built are those of the built model."""

import pytest

from dlrm_scale.config import ModelConfig
from dlrm_scale.models.build import build_model
from dlrm_scale.models.size_estimate import dense_sizes
from dlrm_scale.models.tables import table_specs

MODELS = (
    ModelConfig(),
    ModelConfig(dim=32, dense_layers=(64, 32), over_layers=(1024, 512, 1)),
    ModelConfig(kind="projection", interaction_branch1_layers=(64, 48), interaction_branch2_layers=(32, 16)),
    ModelConfig(kind="dcnv2", dcn_low_rank_dim=24, dcn_num_layers=2),
)


@pytest.mark.parametrize("tables", [1, 26])
@pytest.mark.parametrize("config", MODELS, ids=lambda config: f"{config.kind}-{config.dim}")
def test_dense_parameters_are_counted_exactly(config: ModelConfig, tables: int) -> None:
    specs = table_specs(config, {f"C{i + 1}": 10 for i in range(tables)})
    built = sum(p.numel() for p in build_model(config, specs).parameters() if not p.is_meta)
    assert dense_sizes(config, tables).parameters == built
