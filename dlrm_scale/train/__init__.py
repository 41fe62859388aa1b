"""Wires data, model, sharding and checkpoints into a run."""
