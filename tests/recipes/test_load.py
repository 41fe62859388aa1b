"""Recipes, TOML files and overrides become a checked config."""

from pathlib import Path

import pytest

from dlrm_scale.errors import ConfigError
from dlrm_scale.recipes import load_config, recipe_names, write_config


def test_the_four_recipes_load() -> None:
    assert recipe_names() == ["criteo_kaggle", "criteo_terabyte", "mlperf_dcnv2", "sample"]
    assert load_config("mlperf_dcnv2").model.kind == "dcnv2"
    assert load_config("criteo_terabyte").model.dim == 128


@pytest.mark.parametrize("name", ["criteo_kaggle", "criteo_terabyte", "mlperf_dcnv2", "sample"])
def test_a_written_config_reads_back_equal(name: str, tmp_path: Path) -> None:
    config = load_config(name, ["data.path=2024", "sharding.tables.C3=row_wise"])
    write_config(config, tmp_path / "config.toml")
    assert load_config(tmp_path / "config.toml") == config
    assert config.data.path == "2024"
    assert config.sharding.tables == {"C3": "row_wise"}


def test_the_last_override_wins() -> None:
    config = load_config("sample", ["data.batch_size=64", "data.batch_size=128", "model.dense_layers=[8, 16]"])
    assert config.data.batch_size == 128
    assert config.model.dense_layers == (8, 16)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.bathc_size=3", ["unknown key data.bathc_size", "did you mean batch_size", "window_rows"]),
        ("dat.path=x", ["unknown key dat", "did you mean data", "checkpoint"]),
        ("model.kind=dcn", ["model.kind = 'dcn'", "did you mean dcnv2", "dlrm, projection, dcnv2"]),
        ("sharding.tables.C3=rowwise", ["sharding.tables.C3", "did you mean row_wise"]),
        ("sharding.kind=rowwise", ["sharding.kind = 'rowwise' is not allowed; did you mean row_wise?", "auto)"]),
        ("data.batch_size=0", ["data.batch_size = 0", "greater than or equal to 1"]),
        ("data.batch_size=2.5", ["data.batch_size = 2.5", "integer"]),
        ("data.seed=18446744073709551616", ["data.seed = 18446744073709551616", "less than"]),
        (
            "sharding.min_columns_per_shard=6",
            ["sharding.min_columns_per_shard = 6", "multiple of 4", "allowed: 4 or 8)"],
        ),
        ("sharding.min_columns_per_shard=0", ["sharding.min_columns_per_shard = 0", "greater than or equal to 4"]),
        ("sharding.min_columns_per_shard=2", ["sharding.min_columns_per_shard = 2", "allowed: 4)"]),
        ("data.drop_last=1", ["data.drop_last = 1", "boolean"]),
        ("sparse_optimizer.learning_rate=inf", ["sparse_optimizer.learning_rate", "finite"]),
        ("model.dense_layers=[64, 0]", ["model.dense_layers.1 = 0"]),
        ("batch_size", ["--set 'batch_size' is not an override", "section.key=value"]),
    ],
)
def test_a_wrong_override_is_named_with_what_is_allowed(override: str, says: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_config("sample", [override])
    for text in says:
        assert text in str(error.value)


def test_one_wrong_value_is_one_finding() -> None:
    with pytest.raises(ConfigError) as error:
        load_config("sample", ["sharding.kind=rowwise"])
    kinds = "table_wise, row_wise, column_wise, table_row_wise, table_column_wise, grid_shard, data_parallel, auto"
    assert error.value.message == (
        f"sample: sharding.kind = 'rowwise' is not allowed; did you mean row_wise? (allowed: {kinds})"
    )


def test_an_unknown_recipe_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'criteo_kaggle'"):
        load_config("critoe_kaggle")


def test_a_broken_toml_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[data\n")
    with pytest.raises(ConfigError, match=r"mine\.toml: not valid TOML"):
        load_config(path)


def test_a_config_is_frozen() -> None:
    config = load_config("sample")
    with pytest.raises(ValueError, match="frozen"):
        config.data.batch_size = 3
