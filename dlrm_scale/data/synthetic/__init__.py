"""Criteo-format rows from a planted model."""
