"""Which sharding types are refused, with reason and remedy (B24)."""

import subprocess
import sys

import pytest

from dlrm_scale.config import Config
from dlrm_scale.errors import ConfigError, PlanError
from dlrm_scale.schema import TableSpec
from dlrm_scale.sharding.rules import (
    COLUMN_SPLIT_TYPES,
    allowed_types,
    check_sharding,
    column_width,
    device_memory_bytes,
)
from dlrm_scale.sharding.sharder import ALL_SHARDING_TYPES

TABLES = (
    TableSpec(name="C1", rows=100, dim=16),
    TableSpec(name="C2", rows=100, dim=16, pooling="mean"),
    TableSpec(name="C12", rows=1, dim=16),
)


def _config(optimizer: str = "sgd", **sharding: object) -> Config:
    return Config.model_validate({"sharding": sharding, "sparse_optimizer": {"kind": optimizer}})


def _types(config: Config, device: str = "cpu", ranks: int = 2) -> dict[str, tuple[str, ...]]:
    return allowed_types(TABLES, config, device, ranks)


@pytest.mark.parametrize("kind", [t for t in ALL_SHARDING_TYPES if t != "grid_shard"])
def test_every_type_is_allowed_with_sgd_on_cpu(kind: str) -> None:
    assert _types(_config(kind=kind)) == {t.name: (kind,) for t in TABLES}


def test_grid_shard_with_mean_pooling_is_refused() -> None:
    with pytest.raises(PlanError, match=r"table C2: grid_shard with mean pooling trains as sum pooling") as caught:
        _types(_config(kind="grid_shard"))
    assert "another sharding type" in (caught.value.remedy or "")
    with pytest.raises(PlanError, match="table C2"):
        _types(_config(tables={"C2": "grid_shard"}))
    assert _types(_config(tables={"C1": "grid_shard"}))["C1"] == ("grid_shard",)


@pytest.mark.parametrize("kind", COLUMN_SPLIT_TYPES)
def test_column_splits_with_rowwise_adagrad_are_refused_unless_allowed_by_name(kind: str) -> None:
    with pytest.raises(PlanError, match=f"table C1: {kind} would give each column shard a row state") as caught:
        _types(_config("rowwise_adagrad", tables={"C1": kind}))
    assert "sharding.allow_split_row_state = true" in (caught.value.remedy or "")
    allowed = _types(_config("rowwise_adagrad", tables={"C1": kind}, allow_split_row_state=True))
    assert allowed["C1"] == (kind,)


def test_auto_offers_no_column_split_with_rowwise_adagrad_unless_allowed() -> None:
    without = _types(_config("rowwise_adagrad"))
    assert without["C1"] == ("table_wise", "row_wise", "table_row_wise", "data_parallel")
    allowed = _types(_config("rowwise_adagrad", allow_split_row_state=True))
    assert {"column_wise", "table_column_wise"} <= set(allowed["C1"])
    assert "column_wise" in _types(_config("sgd"))["C1"]


def test_auto_on_one_rank_keeps_tables_whole() -> None:
    assert _types(_config(), ranks=1) == {t.name: ("table_wise",) for t in TABLES}


def test_adam_for_tables_is_refused_on_cpu() -> None:
    with pytest.raises(ConfigError, match=r"adam isn't supported for tables on CPU: fbgemm has no such kernel"):
        _types(_config("adam"))
    assert "data_parallel" not in _types(_config("adam"), device="cuda")["C1"]
    with pytest.raises(PlanError, match="data_parallel with adam is another algorithm"):
        _types(_config("adam", kind="data_parallel"), device="cuda")


def test_an_unknown_table_gets_the_nearest_spelling() -> None:
    with pytest.raises(ConfigError, match=r"no table 'C21'; its tables are C1, C2, C12") as caught:
        _types(_config(tables={"C21": "row_wise"}))
    assert "did you mean 'C2'?" in (caught.value.remedy or "")


def test_a_dim_that_cannot_be_split_is_refused_with_a_width_that_can() -> None:
    with pytest.raises(PlanError, match=r"table C1: column_wise can't cut 16 columns .* at least 16") as caught:
        _types(_config(kind="column_wise", min_columns_per_shard=16))
    assert "sharding.min_columns_per_shard = 8" in (caught.value.remedy or "")
    assert "column_wise" not in _types(_config(min_columns_per_shard=16))["C1"]


def test_a_one_row_table_is_refused_for_grid_shard_with_optimizer_state() -> None:
    config = _config("rowwise_adagrad", tables={"C12": "grid_shard"}, allow_split_row_state=True)
    with pytest.raises(PlanError, match="table C12: grid_shard can't describe the optimizer state"):
        _types(config)
    assert _types(_config("sgd", tables={"C12": "grid_shard"}))["C12"] == ("grid_shard",)


@pytest.mark.parametrize(
    ("dim", "minimum", "width"),
    [(16, 4, 4), (16, 8, 8), (16, 16, 16), (12, 8, 12), (24, 8, 8), (4, 4, 4), (128, 32, 32)],
)
def test_column_width_is_the_smallest_legal_divisor(dim: int, minimum: int, width: int) -> None:
    assert column_width(dim, minimum) == width


@pytest.mark.parametrize(
    ("sections", "error", "says"),
    [
        (
            {"sharding": {"device_memory": "lots"}},
            ConfigError,
            r"sharding\.device_memory = 'lots' is not a size[\s\S]*1GiB",
        ),
        ({"sharding": {"device_memory": "0 GiB"}}, ConfigError, r"sharding\.device_memory = 0: nothing fits"),
        ({"sharding": {"tables": {"C27": "row_wise"}}}, ConfigError, r"no table 'C27'[\s\S]*did you mean 'C7'"),
        ({"sharding": {"kind": "column_wise"}}, PlanError, "row state of its own"),
        (
            {"sharding": {"kind": "grid_shard"}, "model": {"pooling": "mean"}, "sparse_optimizer": {"kind": "sgd"}},
            PlanError,
            "grid_shard with mean pooling",
        ),
        (
            {"sharding": {"kind": "column_wise", "min_columns_per_shard": 16}, "sparse_optimizer": {"kind": "sgd"}},
            PlanError,
            "can't cut 16 columns",
        ),
        ({"sparse_optimizer": {"kind": "adam"}, "train": {"device": "cpu"}}, ConfigError, "adam isn't supported"),
    ],
)
def test_what_the_config_alone_shows_is_refused_before_there_are_ranks(
    sections: dict[str, object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        check_sharding(Config.model_validate(sections))


def test_what_depends_on_the_device_or_the_dataset_passes_before_there_are_ranks() -> None:
    check_sharding(Config())
    check_sharding(Config.model_validate({"sparse_optimizer": {"kind": "adam"}}))
    check_sharding(_config(kind="grid_shard"))
    assert device_memory_bytes(_config(device_memory="1.5GiB").sharding) == 3 * 2**29
    assert device_memory_bytes(Config().sharding) is None


def test_checking_a_config_loads_nothing_heavy() -> None:
    modules = "dlrm_scale.data.loading.streams, dlrm_scale.models.tables, dlrm_scale.sharding.rules"
    code = f"import sys, {modules}; print(sorted({{'numba', 'numpy', 'torch', 'torchrec'}} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "[]"
