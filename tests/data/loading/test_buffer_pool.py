"""Memory that batches use again."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrm_scale.config import DataConfig
from dlrm_scale.data.loading.buffer_pool import BufferPool
from dlrm_scale.data.loading.loader import EvalLoader, TrainLoader
from tests.support.datasets import make_dataset


def _addresses(tensors: list[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def test_tensors_have_their_shapes_and_do_not_overlap() -> None:
    wanted = (((3,), torch.float32), ((5, 7), torch.int64), ((0,), torch.int64), ((2, 0), torch.int32))
    tensors = BufferPool(2).tensors(*wanted, ((9,), torch.int32))
    assert [(t.shape, t.dtype) for t in tensors] == [*wanted, ((9,), torch.int32)]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    assert [t.unique().tolist() for t in tensors] == [[0], [1], [], [], [4]]


def test_memory_is_used_again_when_the_last_tensor_is_gone() -> None:
    pool = BufferPool(2)
    tensors = pool.tensors(((100,), torch.float32), ((4, 5), torch.int64))
    first = _addresses(tensors)
    del tensors
    assert _addresses(pool.tensors(((100,), torch.float32), ((4, 5), torch.int64))) == first
    assert pool.made == 1


@pytest.mark.parametrize(
    "derived",
    [
        lambda t: t[1:],
        lambda t: t.view(-1)[-1:],
        lambda t: t.numpy(),
        lambda t: t.untyped_storage(),
        lambda t: t.detach().T,
        lambda t: (t * t.clone().requires_grad_()).grad_fn,
    ],
)
def test_whatever_shares_the_memory_keeps_it(derived: object) -> None:
    pool = BufferPool(2)
    tensors = pool.tensors(((10,), torch.float32), ((4, 5), torch.float32))
    address = tensors[0].data_ptr()
    kept = derived(tensors[1])  # type: ignore[operator]
    del tensors
    other = pool.tensors(((10,), torch.float32), ((4, 5), torch.float32))
    assert other[0].data_ptr() != address
    del kept
    assert pool.tensors(((10,), torch.float32), ((4, 5), torch.float32))[0].data_ptr() == address
    assert pool.made == 2


def test_larger_tensors_get_a_larger_buffer_and_few_are_kept() -> None:
    pool = BufferPool(2)
    held = [pool.tensors(((size,), torch.int64)) for size in (10, 1_000, 10, 10)]
    assert pool.made == 4
    held.clear()  # Two of the four are kept.
    held = [pool.tensors(((10,), torch.int64)) for _ in range(4)]
    assert pool.made == 6
    for tensor in pool.tensors(((5_000,), torch.int64)):
        assert tensor.fill_(1).sum() == 5_000


def test_memory_comes_back_from_any_thread() -> None:
    pool = BufferPool(4)
    held = [pool.tensors(((1_000,), torch.int64)) for _ in range(4)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert len([pool.tensors(((1_000,), torch.int64)) for _ in range(4)]) == 4
    assert pool.made == 4


@pytest.mark.parametrize("multi_hot", [{}, {"C3": 5}])
def test_batches_that_are_kept_never_change(tmp_path: Path, multi_hot: dict[str, int]) -> None:
    dataset = make_dataset(tmp_path, 20_000, split={"train": [(0, 20_000)]}, multi_hot=multi_hot)
    loaders = [
        TrainLoader(dataset, DataConfig(batch_size=256), rank=0, ranks=1, epochs=2),
        EvalLoader(dataset, split="train", batch_size=256, rank=0, ranks=1),
    ]
    for loader in loaders:
        kept = []
        for i, batch in enumerate(loader):
            if i % 3 == 0:  # The others' memory is used again.
                tensors = (batch.labels, batch.dense_features, batch.sparse_features.values())
                kept.append([(tensor, tensor.clone()) for tensor in tensors])
            del batch
        assert len(kept) >= 27
        assert all(torch.equal(a, b) for pairs in kept for a, b in pairs)
        assert len({a.data_ptr() for pairs in kept for a, _ in pairs}) == 3 * len(kept)
        assert np.isfinite([float(a.sum()) for pairs in kept for a, _ in pairs]).all()
