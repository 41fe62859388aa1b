"""Builds the model of a config from `torchrec.models`: single-device, its tables without memory yet."""

from collections.abc import Sequence

import torch
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mlp import Perceptron

from dlrm_scale.config import ModelConfig, TrainConfig
from dlrm_scale.models.dot_interaction import DotInteraction
from dlrm_scale.models.initial_dense import fill_initial_dense
from dlrm_scale.models.tables import check_model
from dlrm_scale.models.training_model import TrainingModel
from dlrm_scale.schema import INTEGER_COLUMNS, TableSpec

__all__ = ["build_model"]

_POOLING = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN}


def build_model(
    config: ModelConfig,
    tables: Sequence[TableSpec],
    num_dense: int = len(INTEGER_COLUMNS),
    *,
    train: TrainConfig | None = None,
) -> TrainingModel:
    """Build a model whose tables are on the meta device and whose dense weights are ready, on CPU.

    The dense weights are a function of `config.seed` (and the sizes) alone; the global random state isn't touched.
    Interactions: dot products (Naumov et al., arXiv 1906.00091), learned projections of them, or the low-rank
    cross network DCNv2 (Wang et al., arXiv 2008.13535).

    Args:
        config: the model section.
        tables: what `table_specs` returned.
        num_dense: columns of the dense features.
        train: `precision` and `micro_batches` are read; the defaults where it is None.

    Raises:
        ConfigError: sizes that don't go together.
    """
    check_model(config, tables=tuple(t.name for t in tables))
    collection = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=t.name,
                embedding_dim=t.dim,
                num_embeddings=t.rows,
                feature_names=[t.name],
                pooling=_POOLING[t.pooling],
            )
            for t in tables
        ],
        device=torch.device("meta"),
    )
    # The constructors draw from the global generator; every value they draw is overwritten below.
    with torch.random.fork_rng(devices=[]):
        dlrm = _dlrm(config, collection, num_dense)
    if config.kind == "dlrm":
        dlrm.inter_arch = DotInteraction(len(tables))
    for layer in dlrm.modules():
        if isinstance(layer, Perceptron) and layer._activation_fn is torch.relu:
            layer._activation_fn = torch.relu_  # the same values without another [B, size] a layer and step
    train = train or TrainConfig()
    model = TrainingModel(dlrm, precision=train.precision, micro_batches=train.micro_batches)
    fill_initial_dense(model, config.seed, skip=collection)
    return model


def _dlrm(config: ModelConfig, collection: EmbeddingBagCollection, num_dense: int) -> DLRM:
    dense, over = list(config.dense_layers), list(config.over_layers)
    match config.kind:
        case "dlrm":
            return DLRM(collection, num_dense, dense, over)
        case "projection":
            return DLRM_Projection(
                collection,
                num_dense,
                dense,
                over,
                list(config.interaction_branch1_layers),
                list(config.interaction_branch2_layers),
            )
        case "dcnv2":
            return DLRM_DCN(collection, num_dense, dense, over, config.dcn_num_layers, config.dcn_low_rank_dim)
