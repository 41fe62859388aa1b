"""How many streams there are, and which numbers are refused."""

import pytest

from dlrm_scale.config import DataConfig
from dlrm_scale.data.loading.streams import check_streams, choose_streams
from dlrm_scale.errors import ConfigError


@pytest.mark.parametrize(
    ("batch_size", "ranks", "streams"),
    [(2048, 1, 64), (2048, 3, 64), (65_536, 100, 128), (96, 4, 32), (24, 3, 8), (7, 1, 1), (1 << 20, 64, 64)],
)
def test_streams_are_chosen_from_the_batch_size(batch_size: int, ranks: int, streams: int) -> None:
    assert choose_streams(batch_size, ranks) == streams


@pytest.mark.parametrize(
    ("batch_size", "ranks", "streams", "words"),
    [
        (7, 2, 0, ["2 ranks", "7 rows", "at most 1 ranks", "multiple of 2"]),
        (24, 9, 0, ["9 ranks", "24 rows", "at most 8 ranks", "multiple of 16"]),
        (2048, 65, 64, ["65 ranks", "at most 64 ranks"]),
        (2048, 1, 48, ["data.streams = 48", "power of two"]),
        (40, 1, 16, ["data.streams = 16", "data.batch_size = 40", "use 8"]),
    ],
)
def test_more_ranks_than_streams_are_refused_with_the_remedy(
    batch_size: int, ranks: int, streams: int, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_streams(batch_size, ranks, streams)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(("batch_size", "streams"), [(2048, 3), (2048, 4096), (40, 16)])
def test_wrong_streams_are_refused_before_there_are_ranks(batch_size: int, streams: int) -> None:
    with pytest.raises(ConfigError, match=rf"data\.streams = {streams} must be a power of two that divides"):
        check_streams(DataConfig(batch_size=batch_size, streams=streams))


@pytest.mark.parametrize(("batch_size", "streams"), [(2048, 0), (7, 0), (2048, 2048), (40, 8), (7, 1)])
def test_streams_that_some_ranks_can_use_pass(batch_size: int, streams: int) -> None:
    check_streams(DataConfig(batch_size=batch_size, streams=streams))
