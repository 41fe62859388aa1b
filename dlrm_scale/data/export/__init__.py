"""A dataset to the formats of other tools."""
