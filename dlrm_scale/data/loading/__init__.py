"""A dataset's rows to batches in a reproducible order, from any position."""
