import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dlrm_scale.layout import ShardRegion
from dlrm_scale.models import initial_rows
from dlrm_scale.models.initial_rows import fill_initial_rows
from dlrm_scale.schema import TableSpec

SPEC = TableSpec(name="C7", rows=1000, dim=32)


def _filled(
    spec: TableSpec = SPEC,
    *,
    rows: tuple[int, int] | None = None,
    columns: tuple[int, int] | None = None,
    seed: int = 0,
) -> torch.Tensor:
    (r0, r1), (c0, c1) = rows or (0, spec.rows), columns or (0, spec.dim)
    weight = torch.full((r1 - r0, c1 - c0), torch.nan)
    region = ShardRegion(table=spec.name, row_start=r0, row_end=r1, column_start=c0, column_end=c1, rank=3)
    fill_initial_rows(weight, spec, region, seed)
    return weight


WHOLE = _filled()
_BOUNDS = st.tuples(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 32), st.integers(0, 32))


@settings(max_examples=200, deadline=None)
@given(_BOUNDS)
def test_any_region_has_the_values_of_the_whole_table(bounds: tuple[int, int, int, int]) -> None:
    (r0, r1), (c0, c1) = sorted(bounds[:2]), sorted(bounds[2:])
    assert torch.equal(_filled(rows=(r0, r1), columns=(c0, c1)), WHOLE[r0:r1, c0:c1])


def _mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def _expected(table: str, rows: int, row: int, column: int, seed: int) -> float:
    golden = 0x9E3779B97F4A7C15
    key = int.from_bytes(hashlib.blake2b(f"rows/{seed}/{table}".encode(), digest_size=8).digest(), "little")
    state = _mix(key ^ _mix(row * golden % 2**64))
    bits = _mix((state + (column + 1) * golden) % 2**64)
    return ((bits >> 40) * 2 + 1 - 2**24) / 2**24 / rows**0.5


@pytest.mark.parametrize("seed", [0, 12345])
def test_values_follow_the_published_hash(seed: int) -> None:
    """They are part of what a seed means: a change must be noticed."""
    got = _filled(rows=(990, 1000), columns=(20, 32), seed=seed)
    expected = [[_expected("C7", 1000, r, c, seed) for c in range(20, 32)] for r in range(990, 1000)]
    torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-6, atol=0)


def test_values_are_uniform_within_one_over_the_root_of_the_rows() -> None:
    bound = SPEC.rows**-0.5
    assert WHOLE.abs().max() <= bound
    assert stats.kstest(WHOLE.flatten().numpy() / bound, "uniform", args=(-1, 2)).pvalue > 1e-3


def test_neighbours_in_rows_and_columns_are_uncorrelated() -> None:
    spec = TableSpec(name="C1", rows=20_000, dim=16)
    weight = _filled(spec)
    for a, b in ((weight[1:], weight[:-1]), (weight[:, 1:], weight[:, :-1])):
        r = torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]
        assert abs(r) < 4 / a.numel() ** 0.5


@pytest.mark.parametrize(
    "other",
    [_filled(seed=1), _filled(TableSpec(name="C8", rows=1000, dim=32))],
    ids=["other seed", "other table"],
)
def test_another_seed_or_table_has_other_values(other: torch.Tensor) -> None:
    assert (other != WHOLE).float().mean() > 0.999
    r = torch.corrcoef(torch.stack((WHOLE.flatten(), other.flatten())))[0, 1]
    assert abs(r) < 4 / WHOLE.numel() ** 0.5


def test_rows_beyond_32_bits_of_elements_are_distinct() -> None:
    spec = TableSpec(name="C1", rows=2**31, dim=128)
    last = _filled(spec, rows=(2**31 - 2, 2**31))
    wrapped = _filled(spec, rows=(2**25 - 2, 2**25))
    assert not torch.equal(last, wrapped)
    assert not torch.equal(last[0], last[1])


@pytest.mark.parametrize("chunk_elements", [1, 33, 320, 10**6])
def test_weights_that_cannot_be_filled_in_place_get_the_same_values(
    chunk_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initial_rows, "_CHUNK_ELEMENTS", chunk_elements)
    whole = ShardRegion(table="C7", row_start=0, row_end=1000, column_start=0, column_end=32, rank=0)
    strided = torch.zeros(1000, 64)[:, ::2]
    fill_initial_rows(strided, SPEC, whole, 0)
    assert torch.equal(strided, WHOLE)
    half = torch.zeros(1000, 32, dtype=torch.float16)
    fill_initial_rows(half, SPEC, whole, 0)
    assert torch.equal(half, WHOLE.half())


def test_a_parameter_is_filled_without_a_gradient_and_without_the_global_random_state() -> None:
    state = torch.get_rng_state()
    parameter = torch.nn.Parameter(torch.empty(1000, 32))
    whole = ShardRegion(table="C7", row_start=0, row_end=1000, column_start=0, column_end=32, rank=0)
    fill_initial_rows(parameter, SPEC, whole, 0)
    assert torch.equal(parameter.detach(), WHOLE)
    assert parameter.grad_fn is None
    assert torch.equal(torch.get_rng_state(), state)


def test_a_weight_of_another_shape_than_its_region_is_our_mistake() -> None:
    region = ShardRegion(table="C7", row_start=0, row_end=4, column_start=0, column_end=32, rank=0)
    with pytest.raises(ValueError, match="is not region"):
        fill_initial_rows(torch.empty(5, 32), SPEC, region, 0)


@pytest.mark.gpu
def test_cuda_weights_get_the_values_of_the_host() -> None:
    weight = torch.empty(1000, 32, device="cuda")
    whole = ShardRegion(table="C7", row_start=0, row_end=1000, column_start=0, column_end=32, rank=0)
    fill_initial_rows(weight, SPEC, whole, 0)
    assert torch.equal(weight.cpu(), WHOLE)
