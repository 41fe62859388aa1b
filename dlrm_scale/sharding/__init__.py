"""Spreading a model's tables over ranks with TorchRec, and running its steps."""
