import pytest
import torch

from dlrm_scale.touched_rows import TouchedRows


def _marked(touched: TouchedRows, shards: int) -> list[list[int]]:
    return [touched.current(index).nonzero().flatten().tolist() for index in range(shards)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_one_call_marks_the_ids_of_all_keys_each_in_its_shard(dtype: torch.dtype) -> None:
    touched = TouchedRows([5, 0, 3, 4])
    touched.enabled = True
    ids = torch.tensor([4, 0, 4, 2, 2, 1, 3], dtype=dtype)
    touched.mark_keys([0, 2, 0, 1, 3], ids, [0, 2, 2, 4, 4, 7])
    assert _marked(touched, 4) == [[0, 2, 4], [], [], [1, 2, 3]]


def test_marks_are_taken_only_while_enabled() -> None:
    touched = TouchedRows([5])
    touched.mark_keys([0], torch.tensor([1]), [0, 1])
    touched.mark(0, torch.tensor([2]))
    assert _marked(touched, 1) == [[]]


@pytest.mark.parametrize("wrong", [-1, 5, 2**40])
def test_an_id_that_is_no_row_of_its_shard_is_refused_not_written_elsewhere(wrong: int) -> None:
    touched = TouchedRows([5, 7])
    touched.enabled = True
    with pytest.raises(IndexError, match=f"id {wrong} isn't a row of its shard"):
        touched.mark_keys([0], torch.tensor([wrong]), [0, 1])
    assert _marked(touched, 2) == [[], []]


def test_generations_and_rows_since_the_baseline_keep_their_shards_apart() -> None:
    touched = TouchedRows([3, 2])
    touched.enabled = True
    touched.keep_since_baseline()
    touched.mark_keys([0, 1], torch.tensor([2, 0]), [0, 1, 2])
    frozen = touched.freeze()
    touched.mark_keys([0], torch.tensor([0]), [0, 1])
    assert [marks.tolist() for marks in frozen] == [[0, 0, 1], [1, 0]]
    assert [marks.tolist() for marks in touched.since_baseline()] == [[0, 0, 1], [1, 0]]
    assert _marked(touched, 2) == [[0], []]
    touched.merge_back()
    assert _marked(touched, 2) == [[0, 2], [0]]
    touched.freeze()
    touched.release(baseline=True)
    assert [marks.tolist() for marks in touched.since_baseline()] == [[0, 0, 0], [0, 0]]
    assert _marked(touched, 2) == [[], []]


def test_a_rank_without_shards_has_nothing_to_mark() -> None:
    touched = TouchedRows([])
    touched.enabled = True
    touched.mark_keys([], torch.tensor([], dtype=torch.int64), [0])
    assert touched.freeze() == []
