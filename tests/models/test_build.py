import pytest
import torch
from torch import fx
from torchrec.models.dlrm import SparseArch
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dlrm_scale.config import ModelConfig, TrainConfig
from dlrm_scale.errors import ConfigError
from dlrm_scale.models.build import build_model
from dlrm_scale.models.tables import table_specs
from dlrm_scale.models.training_model import TrainingModel
from dlrm_scale.schema import TableSpec
from tests.support.random_batches import random_batches, rank_batch
from tests.support.reference import initial_dense, initial_tables, reference_logits, reference_loss

ROWS = {"C1": 103, "C2": 3, "C3": 57, "C10": 211}
SIZES = {"dim": 8, "dense_layers": (24, 8), "over_layers": (20, 12, 1), "seed": 5}
KINDS = {
    "dlrm": ModelConfig(kind="dlrm", **SIZES),
    "projection": ModelConfig(
        kind="projection", interaction_branch1_layers=(20, 16), interaction_branch2_layers=(24,), **SIZES
    ),
    "dcnv2": ModelConfig(kind="dcnv2", dcn_num_layers=2, dcn_low_rank_dim=6, **SIZES),
}


def materialized(config: ModelConfig, tables: tuple[TableSpec, ...], train: TrainConfig | None = None) -> TrainingModel:
    """Build a model with whole tables in memory, with their initial rows."""
    model = build_model(config, tables, train=train)
    collection = model.dlrm.sparse_arch.embedding_bag_collection
    assert isinstance(collection, EmbeddingBagCollection)
    collection.to_empty(device="cpu")
    with torch.no_grad():
        for name, weight in initial_tables(config, tables).items():
            collection.embedding_bags[name].weight.copy_(weight)
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("pooling", "most_ids_per_bag"), [("sum", 1), ("sum", 4), ("mean", 4)])
def test_each_model_scores_like_the_plain_torch_reference(kind: str, pooling: str, most_ids_per_bag: int) -> None:
    config = KINDS[kind].model_copy(update={"pooling": pooling})
    tables = table_specs(config, ROWS)
    (batch,) = random_batches(tables, [37], seed=1, most_ids_per_bag=most_ids_per_bag)
    weights, dense = initial_tables(config, tables), initial_dense(config, tables)
    loss, (row_loss_sum, logits) = materialized(config, tables)(rank_batch(batch, tables))
    expected = reference_logits(config, tables, weights, dense, batch)
    torch.testing.assert_close(logits, expected.detach(), rtol=1e-6, atol=1e-6)
    expected_loss = reference_loss(config, tables, weights, dense, batch)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(row_loss_sum, 37 * expected_loss.detach(), rtol=1e-6, atol=1e-5)
    assert logits.std() > 1e-3
    assert not logits.requires_grad
    assert not row_loss_sum.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_losses_of_padded_ranks_average_to_the_mean_over_true_rows(kind: str) -> None:
    config = KINDS[kind]
    tables = table_specs(config, ROWS)
    (batch,) = random_batches(tables, [7], seed=2)
    model = materialized(config, tables)
    whole = model(rank_batch(batch, tables))[0]
    parts = [model(rank_batch(batch, tables, rank, 3))[0] for rank in range(3)]
    torch.testing.assert_close(torch.stack(parts).mean(), whole, rtol=1e-6, atol=1e-7)


def test_padding_rows_change_no_gradient() -> None:
    config = KINDS["dlrm"]
    tables = table_specs(config, ROWS)
    (batch,) = random_batches(tables, [5], seed=3)
    model = materialized(config, tables)
    gradients = []
    for ranks in (1, 2):
        model.zero_grad()
        for rank in range(ranks):
            loss = model(rank_batch(batch, tables, rank, ranks))[0]
            (loss / ranks).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_tables_take_no_memory_and_dense_weights_depend_on_the_seed_alone(kind: str) -> None:
    config = KINDS[kind]
    tables = table_specs(config, ROWS)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = dict(build_model(config, tables).named_parameters())
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    second = dict(build_model(config, tables).named_parameters())
    other = dict(build_model(config.model_copy(update={"seed": 6}), tables).named_parameters())
    tables_found = {name.split(".")[-2] for name, p in first.items() if p.is_meta}
    assert tables_found == set(ROWS)
    for name, p in first.items():
        if p.is_meta:
            continue
        assert torch.equal(p, second[name]), name
        if "crossnet.bias" in name:
            assert not p.any()
        else:
            assert not torch.equal(p, other[name]), name
            assert p.abs().max() > 0, name


def test_linear_layers_start_within_torchs_default_bounds() -> None:
    config = KINDS["dlrm"]
    dense = initial_dense(config, table_specs(config, ROWS))
    weight = dense["dlrm.dense_arch.model._mlp.0._linear.weight"].detach()
    bound = 13**-0.5
    assert weight.abs().max() <= bound
    assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, module: torch.nn.Module, name: str) -> bool:
        """As TorchRec's tracer: what holds no tables is a leaf."""
        return isinstance(module, EmbeddingBagCollection) or not any(
            isinstance(part, EmbeddingBagCollection) for part in module.modules()
        )


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_can_be_traced_down_to_the_tables(kind: str) -> None:
    config = KINDS[kind]
    model = build_model(config, table_specs(config, ROWS))
    graph = _Tracer().trace(model)
    (lookup,) = (n for n in graph.nodes if n.op == "call_module" and n.target.endswith("embedding_bag_collection"))
    (features,) = lookup.args
    assert features.args[1] == "sparse_features"
    assert features.args[0].op == "placeholder"
    assert any(isinstance(m, SparseArch) for m in model.modules())


class _Permuted(torch.nn.Module):
    """A lookup whose result comes in another order, as from a plan that groups tables by rank."""

    def __init__(self, collection: EmbeddingBagCollection) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        by_name = self.collection(features).to_dict()
        names = sorted(by_name, reverse=True)
        return KeyedTensor(names, [8] * len(names), torch.cat([by_name[n] for n in names], dim=1))


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_in_which_a_lookup_returns_tables_changes_nothing(kind: str) -> None:
    config = KINDS[kind]
    tables = table_specs(config, ROWS)
    (batch,) = random_batches(tables, [9], seed=4)
    results = []
    for permuted in (False, True):
        model = materialized(config, tables)
        sparse_arch = model.dlrm.sparse_arch
        if permuted:
            sparse_arch.embedding_bag_collection = _Permuted(sparse_arch.embedding_bag_collection)
        loss, (_, logits) = model(rank_batch(batch, tables))
        loss.backward()
        results.append([logits, *(p.grad for p in model.parameters())])
    assert len(results[0]) > len(ROWS)
    for in_order, reordered in zip(*results, strict=True):
        assert torch.equal(in_order, reordered)


@pytest.mark.parametrize("dim", [1, 2, 6, 10, 13])
def test_a_dim_that_is_no_multiple_of_4_is_refused_with_table_value_and_nearest(dim: int) -> None:
    with pytest.raises(ConfigError) as caught:
        table_specs(ModelConfig(dim=dim, dense_layers=(8, dim)), ROWS)
    text = str(caught.value)
    assert f"model.dim = {dim}" in text
    assert "tables C1 to C10" in text
    assert {1: "4", 2: "4", 6: "4 or 8", 10: "8 or 12", 13: "12 or 16"}[dim] in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dense_layers": (24, 16)}, r"model\.dense_layers = \[24, 16\].*model\.dim = 8[\s\S]*\[24, 8\]"),
        ({"dense_layers": ()}, r"model\.dense_layers = \[\][\s\S]*\[8\]"),
        ({"over_layers": (20, 12)}, r"model\.over_layers = \[20, 12\][\s\S]*\[20, 12, 1\]"),
        ({"over_layers": (1,)}, r"model\.over_layers = \[1\].*two sizes[\s\S]*\[64, 1\]"),
        ({"kind": "projection"}, r"model\.interaction_branch1_layers = \[\].*multiple of model\.dim = 8"),
        (
            {"kind": "projection", "interaction_branch1_layers": (16,), "interaction_branch2_layers": (20, 13)},
            r"model\.interaction_branch2_layers = \[20, 13\][\s\S]*\[20, 16\]",
        ),
    ],
)
def test_sizes_that_do_not_go_together_are_refused_by_key(changes: dict[str, object], message: str) -> None:
    config = ModelConfig(**{**SIZES, **changes})
    with pytest.raises(ConfigError, match=message):
        table_specs(config, ROWS)
    with pytest.raises(ConfigError, match=message):
        build_model(config, [TableSpec(name="C1", rows=3, dim=8)])


@pytest.mark.parametrize("rows", [0, 2**31 + 1])
def test_a_table_of_an_impossible_size_is_refused_by_name(rows: int) -> None:
    with pytest.raises(ConfigError, match=rf"table C3 has {rows} rows"):
        table_specs(KINDS["dlrm"], {"C1": 5, "C3": rows})


def test_tables_are_named_after_their_columns_in_order() -> None:
    specs = table_specs(KINDS["dlrm"], ROWS)
    assert [(s.name, s.rows, s.dim, s.pooling) for s in specs] == [(n, r, 8, "sum") for n, r in ROWS.items()]
