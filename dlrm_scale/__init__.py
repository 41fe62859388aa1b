"""Sharded training of deep learning recommendation models with incremental checkpoints."""

__version__ = "0.1.0"

__all__ = ["__version__"]
