"""The dataset on disk: immutable Arrow parts, their manifest and splits."""
