"""Advice on pages changes no value."""

import ctypes

import pytest
import torch

from dlrm_scale.sharding import memory_pages
from dlrm_scale.sharding.memory_pages import keep_freed_memory, on_huge_pages


@pytest.mark.parametrize("rows", [1, 1000, 40_000])
def test_zeros_stay_zeros_and_what_lies_around_them_stays(rows: int) -> None:
    around = torch.ones(2 * rows + 2, 64)
    inside = around[1 : rows + 1]
    inside.zero_()
    on_huge_pages(inside)
    assert not inside.any()
    assert around[0].eq(1).all()
    assert around[rows + 1 :].eq(1).all()
    inside[-1] = 3  # still ordinary memory
    assert inside.sum() == 3 * 64


def test_only_whole_pages_inside_the_tensor_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Library:
        @staticmethod
        def madvise(start: ctypes.c_void_p, size: ctypes.c_size_t, advice: int) -> int:
            calls.append((start.value, size.value, advice))
            return 0

    monkeypatch.setattr(memory_pages.ctypes, "CDLL", lambda _: Library)
    tensor = torch.zeros(5 * 2**20, dtype=torch.uint8)
    on_huge_pages(tensor)
    (start, size, advice), (again, same, drop) = calls
    assert (again, same) == (start, size)
    assert (advice, drop) == (14, 4)
    assert start % 2**21 == 0
    assert size % 2**21 == 0
    assert tensor.data_ptr() <= start < start + size <= tensor.data_ptr() + tensor.nbytes
    calls.clear()
    on_huge_pages(torch.zeros(1000, dtype=torch.uint8))
    assert calls == []


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_pages.ctypes, "CDLL", lambda _: object())
    keep_freed_memory()
    on_huge_pages(torch.zeros(5 * 2**20, dtype=torch.uint8))
