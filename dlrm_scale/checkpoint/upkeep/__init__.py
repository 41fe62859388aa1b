"""Keeping a folder of checkpoints small: merges, retention and garbage."""
