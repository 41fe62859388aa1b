"""Restoring a chain to any layout, and checking that it can be."""
