"""Choosing an option and ranks for every table: bound, construction, search."""
