"""Packaged recipes (TOML files by name) and how a config is read, merged and checked."""

from dlrm_scale.recipes.checkpoint_location import checkpoint_location, find_checkpoints
from dlrm_scale.recipes.load import load_config, read_overrides, recipe_names, write_config
from dlrm_scale.recipes.validate import validate_config

__all__ = [
    "checkpoint_location",
    "find_checkpoints",
    "load_config",
    "read_overrides",
    "recipe_names",
    "validate_config",
    "write_config",
]
