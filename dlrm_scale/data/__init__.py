"""Raw Criteo rows to a dataset on disk, and a dataset to batches in a reproducible order."""
