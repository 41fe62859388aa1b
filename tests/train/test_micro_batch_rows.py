"""A batch is cut into as many micro-batches as it has rows, at most."""

import pytest

from dlrm_scale.config import Config
from dlrm_scale.errors import ConfigError
from dlrm_scale.train.micro_batch_rows import check_micro_batches
from dlrm_scale.train.run_folder import check_config


def _config(batch_size: int, micro_batches: int) -> Config:
    return Config.model_validate({"data": {"batch_size": batch_size}, "train": {"micro_batches": micro_batches}})


def test_more_micro_batches_than_a_rank_has_rows_are_refused_with_the_most_that_fit() -> None:
    check_micro_batches(_config(64, 16), ranks=4)
    with pytest.raises(
        ConfigError, match=r"train\.micro_batches = 17: a rank's batch has only 16 rows.*= 64 over 4 ranks"
    ) as error:
        check_micro_batches(_config(64, 17), ranks=4)
    assert str(error.value.remedy).startswith("use at most 16;")


def test_more_micro_batches_than_the_global_batch_has_rows_are_refused_before_there_are_ranks() -> None:
    with pytest.raises(ConfigError, match=r"only 64 rows \(data\.batch_size = 64 over 1 rank\)"):
        check_config(_config(64, 65))
    check_config(_config(64, 64))


def test_fewer_rows_than_ranks_are_left_to_the_rule_on_ranks() -> None:
    check_micro_batches(_config(2, 1), ranks=4)
