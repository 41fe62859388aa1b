"""What comes after the lookup: own layers against TorchRec's, precision, micro-batches, compilation."""

from collections.abc import Callable

import pytest
import torch
from torchrec.models.dlrm import InteractionArch

from dlrm_scale.config import ModelConfig, TrainConfig
from dlrm_scale.models import compiled_layers
from dlrm_scale.models.compiled_layers import compile_dense_part
from dlrm_scale.models.dot_interaction import DotInteraction
from dlrm_scale.models.tables import table_specs
from tests.models.test_build import KINDS, ROWS, materialized
from tests.support.random_batches import random_batches, rank_batch


def _gradients(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    leaves = [i.clone().requires_grad_() for i in inputs]
    out = function(*leaves)
    weights = torch.sin(torch.arange(out.numel(), dtype=torch.float64)).view_as(out)
    out.backward(weights.to(out.dtype))
    return (out.detach(), *(leaf.grad for leaf in leaves))


@pytest.mark.parametrize("features", [1, 2, 26])
def test_the_dot_interaction_equals_torchrecs_in_values_and_gradients(features: int) -> None:
    torch.manual_seed(0)
    dense, sparse = torch.randn(5, 8, dtype=torch.float64), torch.randn(5, features, 8, dtype=torch.float64)
    ours = _gradients(DotInteraction(features), dense, sparse)
    theirs = _gradients(InteractionArch(features), dense, sparse)
    assert torch.equal(ours[0], theirs[0])
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(DotInteraction(features), [dense.requires_grad_(), sparse.requires_grad_()])


def _trained_step(config: ModelConfig, rows: int = 37, **settings: object) -> dict[str, torch.Tensor]:
    tables = table_specs(config, ROWS)
    (batch,) = random_batches(tables, [rows], seed=1, most_ids_per_bag=3)
    model = materialized(config, tables, TrainConfig(**settings))
    loss, (row_loss_sum, logits) = model(rank_batch(batch, tables))
    loss.backward()
    assert {loss.dtype, row_loss_sum.dtype, logits.dtype} == {torch.float32}
    assert not logits.requires_grad
    assert not row_loss_sum.requires_grad
    found = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": loss.detach(), "row_loss_sum": row_loss_sum, "logits": logits, **found}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [2, 3, 37, 100])
def test_micro_batches_have_the_loss_and_the_gradients_of_the_whole_batch(kind: str, count: int) -> None:
    whole = _trained_step(KINDS[kind])
    parts = _trained_step(KINDS[kind], micro_batches=count)
    assert whole.keys() == parts.keys()
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-5, atol=1e-7, msg=name)


def test_micro_batches_hold_the_activations_of_one_part() -> None:
    config = KINDS["dlrm"]
    tables = table_specs(config, ROWS)
    (batch,) = random_batches(tables, [37], seed=1)
    model = materialized(config, tables, TrainConfig(micro_batches=4))
    scored, held = [], []
    model.dlrm.over_arch.register_forward_hook(lambda _, inputs, __: scored.append(len(inputs[0])))

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        held.extend([len(tensor)] if tensor.dim() > 1 else [])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(rank_batch(batch, tables))
    assert scored == [10, 10, 10, 7]
    assert 10 in held
    assert 37 not in held


def test_micro_batches_score_alone_under_no_grad() -> None:
    config = KINDS["dlrm"]
    tables = table_specs(config, ROWS)
    (batch,) = random_batches(tables, [9], seed=1)
    with torch.no_grad():
        plain, split = (
            materialized(config, tables, TrainConfig(micro_batches=n))(rank_batch(batch, tables)) for n in (1, 4)
        )
    assert torch.equal(plain[1][1], split[1][1])


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_computes_layers_in_bf16_and_keeps_weights_gradients_and_loss_in_fp32(kind: str) -> None:
    exact, rounded = _trained_step(KINDS[kind]), _trained_step(KINDS[kind], precision="bf16")
    assert {value.dtype for value in rounded.values()} == {torch.float32}
    assert not torch.equal(rounded["logits"], exact["logits"])
    assert torch.equal(rounded["logits"], rounded["logits"].bfloat16().float())
    for name, value in exact.items():
        error = (rounded[name] - value).norm() / value.norm()
        assert error < 0.15, f"{name}: {error}"  # 8 bits of mantissa


def test_micro_batches_in_bf16_equal_the_whole_batch_in_bf16() -> None:
    whole = _trained_step(KINDS["dlrm"], precision="bf16")
    parts = _trained_step(KINDS["dlrm"], precision="bf16", micro_batches=3)
    for name, value in whole.items():
        assert (parts[name] - value).norm() <= 0.01 * value.norm(), name


def _names(settings: TrainConfig) -> list[str]:
    config = KINDS["dcnv2"]
    model = materialized(config, table_specs(config, ROWS), settings)
    if settings.compile == "dense":
        compiled_layers.compile_dense_part(model.dense_part, 4)
    return [*model.state_dict(), *dict(model.named_parameters())]


def test_no_setting_renames_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_layers.torch, "compile", lambda function: function)
    plain = _names(TrainConfig())
    assert "dlrm.over_arch.model.1.weight" in plain
    for settings in (TrainConfig(precision="bf16"), TrainConfig(micro_batches=3), TrainConfig(compile="dense")):
        assert _names(settings) == plain


class _NoCompilerError(RuntimeError):
    pass


def _broken_compiler(works: int) -> Callable[..., object]:
    """A `torch.compile` whose functions work so many times and fail then."""

    def compile_function(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        calls = 0

        def compiled(*arguments: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls > works:
                raise _NoCompilerError("no C++ compiler\nlong story")
            return function(*arguments)

        return compiled

    return compile_function


@pytest.mark.parametrize("works", [0, 1])
def test_a_failing_compiler_is_named_and_changes_nothing(works: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = KINDS["dlrm"]
    tables = table_specs(config, ROWS)
    (batch,) = random_batches(tables, [9], seed=1)
    expected = materialized(config, tables)(rank_batch(batch, tables))
    monkeypatch.setattr(compiled_layers.torch, "compile", _broken_compiler(works))
    model = materialized(config, tables)
    failure = compile_dense_part(model.dense_part, 9)
    if works == 0:  # the trial finds it
        assert failure == "_NoCompilerError: no C++ compiler"
        assert not isinstance(model.dense_part.top_function, compiled_layers._CompiledOrPlain)
    else:  # a later shape finds it
        assert failure is None
    loss, (_, logits) = model(rank_batch(batch, tables))
    assert torch.equal(logits, expected[1][1])
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_an_error_of_the_layers_themselves_is_not_taken_for_the_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_layers.torch, "compile", _broken_compiler(1))
    model = materialized(KINDS["dlrm"], table_specs(KINDS["dlrm"], ROWS))
    assert compile_dense_part(model.dense_part, 9) is None
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.dense_part.score(torch.zeros(3, 99), torch.zeros(3, len(ROWS), 8))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of torch.compile itself
@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"micro_batches": 2}])
def test_compiled_layers_compute_what_plain_ones_do(settings: dict[str, object]) -> None:
    config = KINDS["dlrm"]
    tables = table_specs(config, ROWS)
    (batch,) = random_batches(tables, [9], seed=1)
    results = []
    for compiled in (False, True):
        model = materialized(config, tables, TrainConfig(**settings))
        if compiled:
            assert compile_dense_part(model.dense_part, 9) is None
        loss, (_, logits) = model(rank_batch(batch, tables))
        loss.backward()
        results.append([logits, *(p.grad for p in model.parameters())])
    tolerance = 0.03 if settings.get("precision") else 1e-5
    for plain, other in zip(*results, strict=True):
        assert (plain - other).norm() <= tolerance * plain.norm()
