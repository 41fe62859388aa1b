"""Batches and their KeyedJaggedTensors."""

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_scale.batch import make_batch, one_hot_features
from dlrm_scale.schema import CATEGORY_COLUMNS

KEYS = ["C1", "C2", "C3"]


def _slow_reference(keys: list[str], ids: torch.Tensor, rows: int) -> KeyedJaggedTensor:
    values, lengths = [], []
    for k in range(len(keys)):
        for row in range(rows):
            bag = [int(ids[k, row])] if row < ids.shape[1] else []
            values += bag
            lengths.append(len(bag))
    return KeyedJaggedTensor(
        keys=keys, values=torch.tensor(values, dtype=torch.int64), lengths=torch.tensor(lengths, dtype=torch.int32)
    )


@pytest.mark.parametrize(("true_rows", "rows"), [(5, 5), (3, 5), (0, 2), (1, 1)])
def test_all_fields_equal_what_torchrec_computes(true_rows: int, rows: int) -> None:
    ids = torch.arange(3 * true_rows).view(3, true_rows) * 7
    got, expected = one_hot_features(KEYS, ids, rows), _slow_reference(KEYS, ids, rows)
    assert got.keys() == expected.keys()
    assert torch.equal(got.values(), expected.values())
    assert torch.equal(got.lengths(), expected.lengths())
    assert got.lengths().dtype == expected.lengths().dtype
    assert torch.equal(got.offsets(), expected.offsets())
    assert got.offsets().dtype == expected.offsets().dtype
    assert got.stride() == rows
    assert got.stride_per_key() == [rows] * 3
    assert got.length_per_key() == expected.length_per_key() == [true_rows] * 3
    assert got.offset_per_key() == [0, true_rows, 2 * true_rows, 3 * true_rows]
    assert got.lengths_offset_per_key() == [0, rows, 2 * rows, 3 * rows]
    assert got.weights_or_none() is None
    for key, bags in got.to_dict().items():
        assert torch.equal(bags.values(), ids[KEYS.index(key)])
        assert bags.lengths().tolist() == [1] * true_rows + [0] * (rows - true_rows)


def test_permuting_and_splitting_keeps_bags() -> None:
    ids = torch.arange(9).view(3, 3)
    got, expected = one_hot_features(KEYS, ids, 5), _slow_reference(KEYS, ids, 5)
    pairs = [(got.permute([2, 0, 1]), expected.permute([2, 0, 1]))]
    pairs += zip(got.split([1, 2]), expected.split([1, 2]), strict=True)
    for a, b in pairs:
        assert a.keys() == b.keys()
        assert torch.equal(a.values(), b.values())
        assert torch.equal(a.lengths(), b.lengths())
        assert torch.equal(a.offsets(), b.offsets())


def test_padding_has_weight_zero_and_empty_bags() -> None:
    batch = make_batch(
        dense_features=torch.ones(4, 13),
        ids=torch.full((26, 3), 9),
        labels=torch.tensor([1.0, 0.0, 1.0, 0.0]),
        rows_global=7,
        ranks=2,
    )
    assert batch.weights.tolist() == [1, 1, 1, 0]
    assert (batch.rows_local, batch.rows_global) == (3, 7)
    assert batch.loss_scale == torch.tensor(2 / 7)
    assert batch.sparse_features.keys() == list(CATEGORY_COLUMNS)
    assert batch.sparse_features.lengths().view(26, 4)[:, 3].sum() == 0


def test_the_mean_over_ranks_of_scaled_losses_is_the_mean_over_true_rows() -> None:
    losses = torch.arange(1.0, 8.0)
    parts = [losses[:4], torch.cat([losses[4:], torch.tensor([99.0])])]
    total = torch.zeros(())
    for part, true_rows in zip(parts, (4, 3), strict=True):
        batch = make_batch(
            dense_features=torch.zeros(4, 13),
            ids=torch.zeros(26, true_rows, dtype=torch.int64),
            labels=torch.zeros(4),
            rows_global=7,
            ranks=2,
        )
        total += batch.loss_scale * (batch.weights * part).sum() / 2
    assert torch.allclose(total, losses.mean())


def test_a_copy_keeps_everything() -> None:
    batch = make_batch(
        dense_features=torch.rand(3, 13),
        ids=torch.arange(52).view(26, 2),
        labels=torch.ones(3),
        rows_global=5,
        ranks=2,
        cursor={"epoch": 1},
    )
    copy = batch.to(torch.device("cpu"), non_blocking=True)
    for name in ("dense_features", "labels", "weights", "loss_scale"):
        assert torch.equal(getattr(copy, name), getattr(batch, name))
    assert torch.equal(copy.sparse_features.values(), batch.sparse_features.values())
    assert copy.sparse_features.stride() == 3
    assert (copy.rows_global, copy.rows_local, copy.cursor) == (5, 2, {"epoch": 1})
