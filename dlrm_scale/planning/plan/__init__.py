"""Whole plans: proposed, kept in files, explained, compared, simulated."""
