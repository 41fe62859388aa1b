"""Chains of a baseline and deltas: finding, holding, streaming and comparing them."""
