"""Saving beside training: snapshot, staging, persist, vote and commit."""
